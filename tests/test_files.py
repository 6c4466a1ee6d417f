"""JSON that can be read, checksums that notice, folders that cannot be made."""

import json
from pathlib import Path

import pytest

from mosar.files import (
    LINE_DIGITS,
    make_folder,
    parse_json,
    replace_synced,
    rust_os_errors,
    sealed,
    unsealed,
)

VALUES = {"b": [1, 0.1, 1e-300, None], "a": {"ü": "é", **{str(n): n for n in range(12)}}}


@pytest.mark.parametrize("depth", [101, 900, 100_000])
@pytest.mark.parametrize(("opening", "end"), [("[", "]"), ('{"a":', "}")])
@pytest.mark.parametrize("encode", [str, str.encode])
def test_json_that_is_nested_too_deeply_is_a_value_error(depth, opening, end, encode):
    with pytest.raises(ValueError, match="nested more than 100 deep"):
        parse_json(encode(opening * depth + "0" + end * depth))


def test_other_json_is_read():
    for text in (json.dumps([[]] * 500), "[" * 100 + "]" * 100, json.dumps("[{" * 500), "7"):
        assert parse_json(text) == parse_json(text.encode()) == json.loads(text)
    with pytest.raises(ValueError):
        parse_json("[" * 300)


@pytest.mark.parametrize("digits", [None, LINE_DIGITS])
@pytest.mark.parametrize("before", ["", "0f"])
def test_a_seal_is_that_of_the_values(digits, before):
    written = json.loads(json.dumps(sealed(VALUES, before, digits), indent=1))
    assert unsealed(written, before) == (VALUES, True)
    for spoilt in (
        written | {"b": [1, 0.2, 1e-300, None]},
        written | {"c": 1},
        {key: value for key, value in written.items() if key != "a"},
    ):
        with pytest.raises(ValueError, match="altered after it was written"):
            unsealed(spoilt, before)
    with pytest.raises(ValueError, match="altered"):
        unsealed(written, before + "1")


def test_keys_that_are_numbers_are_sealed_as_they_are_written():
    values = {n: n for n in range(12)}
    written = json.loads(json.dumps(sealed(values)))
    assert unsealed(written) == ({str(n): n for n in values}, True)


def test_what_has_no_seal_is_left_to_the_reader():
    assert unsealed(VALUES) == (VALUES, False)
    for value in (7, "", "abc", None):
        with pytest.raises(ValueError, match="its checksum is"):
            unsealed(VALUES | {"checksum": value})
    with pytest.raises(ValueError, match="must be a JSON object, got list"):
        unsealed([])


def test_not_a_number_is_not_sealed():
    with pytest.raises(ValueError, match="JSON"):
        sealed({"a": float("nan")})


def test_a_folder_that_cannot_be_made_says_what_to_do(tmp_path):
    file = tmp_path / "file"
    replace_synced(file, b"mine")
    for folder in (file, file / "inside"):
        with pytest.raises(OSError, match="a file is in the place of a folder; give another") as e:
            make_folder(folder)
        assert e.value.filename == str(folder)
    with pytest.raises(OSError, match=r"cannot be made \(No such file or directory\); give"):
        make_folder(Path("/proc/x"))
    assert file.read_bytes() == b"mine"


def test_errors_of_the_disk_by_packages_in_rust(tmp_path):
    with pytest.raises(OSError, match="No space left") as caught, rust_os_errors(tmp_path):
        raise Exception("I/O error: No space left on device (os error 28)")
    assert caught.value.filename == str(tmp_path)
    with pytest.raises(KeyError), rust_os_errors(tmp_path):
        raise KeyError("os error")
