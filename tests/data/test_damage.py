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


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file(bpe_dataset, name):
    (bpe_dataset / name).unlink()
    assert_refused(bpe_dataset, name, "is missing; prepare the dataset again", both_streams)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("change", [-1, -20, 1])
def test_a_file_of_another_size_is_seen_on_opening(bpe_dataset, name, change):
    path = bpe_dataset / name
    content = path.read_bytes()
    path.write_bytes(content[:change] if change < 0 else content + b"x")
    assert_refused(bpe_dataset, name, "should have", both_streams)
    assert_refused(bpe_dataset, name, "should have")


@pytest.mark.parametrize("name", FILES)
def test_one_altered_byte_is_seen(bpe_dataset, name):
    path = bpe_dataset / name
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    assert_refused(bpe_dataset, name, "its checksum is wrong")
    for verify in (True, None):
        with pytest.raises(DataError, match="its checksum is wrong"):
            both_streams(bpe_dataset, verify=verify)


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


def test_training_and_validation_swapped(dataset):
    (dataset / "train.bin").rename(dataset / "x")
    (dataset / "valid.bin").rename(dataset / "train.bin")
    (dataset / "x").rename(dataset / "valid.bin")
    assert_refused(dataset, "train.bin", "should have", TokenStream)


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


def change_manifest(folder, **changes):
    values = json.loads((folder / "manifest.json").read_text()) | changes
    (folder / "manifest.json").write_text(json.dumps(values))


def test_a_manifest_of_a_newer_version(dataset):
    change_manifest(dataset, version=2, something="new")
    assert_refused(dataset, "manifest.json", "format version 2, this mosar reads 1: upgrade")


def test_an_altered_manifest(dataset):
    change_manifest(dataset, seed=7)
    assert_refused(dataset, "manifest.json", "was altered")


@pytest.mark.parametrize("version", [0, "1", None])
def test_an_impossible_version(dataset, version):
    change_manifest(dataset, version=version)
    assert_refused(dataset, "manifest.json", "was altered")


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe"])
def test_a_damaged_manifest(dataset, content):
    (dataset / "manifest.json").write_bytes(content)
    assert_refused(dataset, "manifest.json", "is damaged; prepare the dataset again")


@pytest.mark.parametrize("content", ["[]", "{}", '{"format": "other"}'])
def test_the_manifest_of_something_else(dataset, content):
    (dataset / "manifest.json").write_text(content)
    assert_refused(dataset, "manifest.json", "not the manifest of a dataset")


def test_no_dataset_at_all(tmp_path, dataset):
    assert_refused(tmp_path, "", "is no dataset (it has no manifest.json)")
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
