"""Damage: a file that is cut, altered, swapped or missing is named, with what to do."""

import json
import shutil

import numpy as np
import pytest

from mosar.data import stream as stream_module
from mosar.data.manifest import Manifest
from mosar.data.prepare import check_dataset, prepare
from mosar.data.stream import TokenStream
from mosar.data.tokenizer import load_tokenizer
from mosar.errors import DataError

FILES = ("train.bin", "valid.bin", "train.docs.npy", "valid.docs.npy", "tokenizer.json")


@pytest.fixture
def twins(tmp_path, write_lines):
    """Two datasets that are the same to the byte in all their sizes."""
    for name in ("a", "b"):
        texts = [f"{name}{number}" for number in range(100, 130)]
        valid = write_lines([f"{name}{number}" for number in range(200, 209)], "valid.jsonl")
        prepare([write_lines(texts)], tmp_path / name, valid=[valid], tokenizer="bpe:257")
    return tmp_path / "a", tmp_path / "b"


def assert_refused(folder, name, part, check=check_dataset):
    with pytest.raises(DataError) as caught:
        check(folder)
    message = str(caught.value)
    assert str(folder / name) in message
    assert part in message
    assert "\n" not in message


def both_streams(folder, **options):
    return [TokenStream(folder, split, **options) for split in ("train", "valid")]


def altered(content):
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize(
    ("change", "part", "when"),
    [
        (None, "is missing; prepare the dataset again", {}),
        (lambda content: content[:-1], "should have", {}),
        (lambda content: content + b"x", "should have", {}),
        (altered, "its checksum is wrong", {"verify": True}),
        (altered, "its checksum is wrong", {"verify": None}),
    ],
)
def test_a_file_that_is_not_as_it_was(bpe_dataset, name, change, part, when):
    """On opening where the size tells, else where checksums are compared; always by a check."""
    path = bpe_dataset / name
    if change is None:
        path.unlink()
    else:
        path.write_bytes(change(path.read_bytes()))
    assert_refused(bpe_dataset, name, part, lambda folder: both_streams(folder, **when))
    assert_refused(bpe_dataset, name, part)


@pytest.mark.parametrize("name", ["train.bin", "valid.bin", "tokenizer.json"])
def test_a_file_of_another_dataset_is_seen(twins, name):
    ours, other = twins
    # Even one of the same size: with 257 tokens nothing is merged, so pad the tokenizer.
    content = (other / name).read_bytes()
    if name == "tokenizer.json":
        content = content.replace(b"endoftext", b"endoftexT")
    assert len(content) == (ours / name).stat().st_size
    (ours / name).write_bytes(content)
    assert_refused(ours, name, "belongs to another dataset")
    with pytest.raises(DataError, match="belongs to another dataset"):
        both_streams(ours, verify=None)
    if name == "tokenizer.json":
        assert_refused(ours, name, "belongs to another dataset", load_tokenizer)


def test_checksums_are_left_out_for_large_splits(dataset, monkeypatch):
    content = bytearray((dataset / "train.bin").read_bytes())
    content[0] ^= 1
    (dataset / "train.bin").write_bytes(content)
    TokenStream(dataset)
    monkeypatch.setattr(stream_module, "VERIFY_LIMIT", len(content) - 1)
    TokenStream(dataset, verify=None)
    monkeypatch.setattr(stream_module, "VERIFY_LIMIT", len(content))
    with pytest.raises(DataError, match="checksum"):
        TokenStream(dataset, verify=None)


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"version": 2, "something": "new"}, "format version 2, this mosar reads 1: upgrade"),
        ({"seed": 7}, "was altered"),
        *(({"version": version}, "was altered") for version in (0, "1", None)),
    ],
)
def test_an_altered_manifest(dataset, changes, part):
    path = dataset / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    assert_refused(dataset, "manifest.json", part)


@pytest.mark.parametrize(
    ("content", "part"),
    [
        *((text, "is damaged; prepare the dataset again") for text in (b"", b"{", b"\xff\xfe")),
        *((text, "not the manifest of a dataset") for text in (b"[]", b'{"format": "other"}')),
    ],
)
def test_a_file_that_is_no_manifest(dataset, content, part):
    (dataset / "manifest.json").write_bytes(content)
    assert_refused(dataset, "manifest.json", part)


def test_no_dataset_at_all(tmp_path, dataset):
    assert_refused(tmp_path, "", "is not a dataset (it has no manifest.json)")
    assert_refused(
        tmp_path / "nothing", "", "make one: mosar prepare stdlib --tokenizer bpe:4096 --out"
    )
    (dataset / "manifest.json").unlink()
    assert_refused(dataset, "", "has no manifest.json", TokenStream)


def test_the_manifest_of_another_dataset(tmp_path, write_lines, dataset):
    prepare([write_lines(["some", "other", "text"])], tmp_path / "other")
    shutil.copy(tmp_path / "other" / "manifest.json", dataset / "manifest.json")
    assert_refused(dataset, "train.bin", "belongs to another dataset", TokenStream)


def test_starts_that_are_no_array(dataset):
    """Right in size, wrong in content, and not verified: still no pickle and no traceback."""
    path = dataset / "train.docs.npy"
    path.write_bytes(b"x" * path.stat().st_size)
    assert_refused(dataset, "train.docs.npy", "is damaged", TokenStream)
    number = Manifest.read(dataset).splits["train"].documents
    np.save(path, np.zeros(number, dtype=np.float64))
    assert_refused(dataset, "train.docs.npy", "belongs to another dataset", TokenStream)
