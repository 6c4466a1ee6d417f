"""Preparing: the same input gives the same files, splits are by document, arguments are checked."""

import json
import tracemalloc
from itertools import pairwise

import numpy as np
import pytest

from mosar.data import prepare as module
from mosar.data.manifest import Manifest, token_dtype
from mosar.data.packing import SplitWriter
from mosar.data.prepare import check_dataset, prepare, split_of
from mosar.data.stream import TokenStream
from mosar.data.tokenizer import ByteTokenizer, load_tokenizer
from mosar.errors import DataError

from .conftest import TEXTS


def documents(folder, split):
    """The texts of a split, by its document starts."""
    stream, coder = TokenStream(folder, split), load_tokenizer(folder)
    (tokens,) = stream.windows([0], stream.num_tokens - 1).tolist()
    starts = [*np.load(folder / f"{split}.docs.npy").tolist(), stream.num_tokens]
    return [coder.decode(tokens[a:b]) for a, b in pairwise(starts)]


@pytest.mark.parametrize("tokenizer", ["byte", "bpe:300"])
def test_the_same_input_gives_the_same_files(tmp_path, write_lines, tokenizer):
    source = write_lines()
    for name in ("a", "b"):
        prepare([source], tmp_path / name, tokenizer=tokenizer, seed=5)
    files = {path.name: path.read_bytes() for path in (tmp_path / "a").iterdir()}
    assert files == {path.name: path.read_bytes() for path in (tmp_path / "b").iterdir()}
    wanted = {"manifest.json", "train.bin", "train.docs.npy", "valid.bin", "valid.docs.npy"}
    assert files.keys() == wanted | ({"tokenizer.json"} if tokenizer != "byte" else set())
    assert not list(tmp_path.glob(".*"))


def test_documents_are_split_whole_and_keep_their_order(tmp_path, write_lines):
    source = write_lines()
    for seed in range(3):
        out = tmp_path / f"set{seed}"
        prepare([source], out, valid_fraction=0.3, seed=seed)
        train, valid = documents(out, "train"), documents(out, "valid")
        assert sorted(train + valid) == sorted(TEXTS)
        assert train == [text for text in TEXTS if text in set(train)]
        assert valid == [text for text in TEXTS if text in set(valid)]
        assert 8 <= len(valid) <= 30
    assert documents(tmp_path / "set0", "valid") != documents(tmp_path / "set1", "valid")


def test_the_split_of_a_document_is_its_own():
    """Adding documents moves none, equal ones stay together, the fraction is kept."""
    openings = [str(number) for number in range(4000)]
    splits = [split_of(index + 2, text, 0, 0.1) for index, text in enumerate(openings)]
    assert splits == [split_of(index + 50, text, 0, 0.1) for index, text in enumerate(openings)]
    assert 330 < splits.count("valid") < 470


@pytest.mark.parametrize("tokenizer", ["byte", "bpe:300"])
def test_the_tail_of_a_single_document_is_held_out(tmp_path, write_lines, tokenizer):
    words = " ".join(f"word{number}" for number in range(400))
    (tmp_path / "one.txt").write_text(words)
    for source in (str(tmp_path / "one.txt"), write_lines([words])):
        out = tmp_path / "set"
        manifest = prepare(
            [source], out, tokenizer=tokenizer, force=True, valid_fraction=0.1, seed=3
        )
        (train,), (valid,) = documents(out, "train"), documents(out, "valid")
        assert train + valid == words
        # It is cut in front of a word.
        assert valid.startswith(" word") and 0.08 < len(valid) / len(words) < 0.12
        assert manifest.valid_fraction == 0.1 and "tail" in manifest.split_rule
        assert any("its last 10 % are held out" in note for note in module.notes(manifest))


def test_a_document_of_several_pieces_is_cut_once(tmp_path, monkeypatch):
    """The cut falls where it should, whichever piece holds it, and with no white space too."""
    for text in ("ab " * 30, "a" * 90):
        for fraction in (0.001, 0.1, 0.5, 0.9, 0.999):
            for length in (7, 9, 1000):
                monkeypatch.setattr("mosar.data.documents.PIECE_LENGTH", length)
                monkeypatch.setattr("mosar.data.documents.cut_pieces.__defaults__", (length,))
                (tmp_path / "one.txt").write_text(text)
                prepare(
                    [str(tmp_path / "one.txt")],
                    tmp_path / "set",
                    valid_fraction=fraction,
                    force=True,
                )
                parts = [documents(tmp_path / "set", split) for split in ("train", "valid")]
                (train,), (valid,) = parts
                assert train and valid and train + valid == text
                assert abs(len(valid) - 90 * fraction) <= 3


def test_a_single_document_may_have_validation_text(tmp_path, write_lines):
    valid = write_lines(["two", "three"], "valid.jsonl")
    manifest = prepare([write_lines(["one"])], tmp_path / "set", valid=[valid])
    assert documents(tmp_path / "set", "train") == ["one"]
    assert documents(tmp_path / "set", "valid") == ["two", "three"]
    assert manifest.valid_fraction is None
    assert [entry.source for entry in manifest.valid_sources] == [valid]
    with pytest.raises(DataError, match=r"holds a single character; .* --valid"):
        prepare([write_lines(["1"])], tmp_path / "other")
    # Two are enough for both splits, whatever the seed.
    for seed in range(4):
        two = write_lines(["one", "two"])
        manifest = prepare([two], tmp_path / f"{seed}", seed=seed, valid_fraction=0.001)
        assert [entry.documents for entry in manifest.splits.values()] == [1, 1]


def test_a_source_on_both_sides_is_refused(tmp_path, write_lines):
    train = write_lines()
    with pytest.raises(DataError, match="among the training and the validation sources"):
        prepare([train], tmp_path / "set", valid=[str(tmp_path)])
    with pytest.raises(DataError, match="hf:a::train is among"):
        prepare(["hf:a"], tmp_path / "set", valid=["hf:a::train"])


def test_no_text_at_all(tmp_path, write_lines):
    with pytest.raises(DataError, match=r"no text in .*corpus.jsonl \(skipped: 2 empty documents"):
        prepare([write_lines(["", " "])], tmp_path / "set")
    with pytest.raises(DataError, match=r"no text in .*valid.jsonl"):
        prepare([write_lines()], tmp_path / "set", valid=[write_lines([" "], "valid.jsonl")])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus.jsonl", "valid.jsonl"]


def test_the_tokenizer_sees_training_text_only(tmp_path, write_lines):
    """A word that fills the validation documents leaves no trace in the tokenizer."""
    train = [f"plain words {number}" for number in range(50)]
    plain = write_lines(train)
    for name, word in (("a", "zebra"), ("b", "quagga")):
        valid = write_lines([word * 20] * 20, f"{name}.jsonl")
        prepare([plain], tmp_path / name, valid=[valid], tokenizer="bpe:400")
    tokenizers = [(tmp_path / name / "tokenizer.json").read_bytes() for name in ("a", "b")]
    assert tokenizers[0] == tokenizers[1]
    # The same where the sources are split: drop the validation documents, and nothing changes.
    prepare([plain], tmp_path / "c", tokenizer="bpe:400", valid_fraction=0.3)
    left = write_lines(documents(tmp_path / "c", "train"), "left.jsonl")
    prepare([left], tmp_path / "d", valid=[valid], tokenizer="bpe:400")
    tokenizers = [(tmp_path / name / "tokenizer.json").read_bytes() for name in ("c", "d")]
    assert tokenizers[0] == tokenizers[1]


def test_training_the_tokenizer_stops_at_its_sample(tmp_path, write_lines, monkeypatch):
    monkeypatch.setattr(module, "SAMPLE_CHARACTERS", 100)
    texts = ["first words " * 10, "second"] + ["later zebra words"] * 50
    valid = write_lines(["v"], "valid.jsonl")
    prepare([write_lines(texts)], tmp_path / "set", tokenizer="bpe:400", valid=[valid])
    assert "zebra" not in (tmp_path / "set" / "tokenizer.json").read_text()
    assert len(documents(tmp_path / "set", "train")) == 52


def test_the_smallest_type_is_used(tmp_path, write_lines, bpe_dataset):
    assert [token_dtype(size) for size in (257, 65536, 65537)] == ["uint16", "uint16", "uint32"]
    values = json.loads((bpe_dataset / "tokenizer.json").read_text())
    words = {f"word{number}": number for number in range(65537)}
    values["model"] = {"type": "WordLevel", "vocab": words, "unk_token": "word7"}
    values["added_tokens"] = []
    values["pre_tokenizer"] = {"type": "WhitespaceSplit"}
    (tmp_path / "tokenizer.json").write_text(json.dumps(values))
    texts = ["word0 word65536 nothing", "word65535"]
    manifest = prepare(
        [write_lines(texts, "words.jsonl")],
        tmp_path / "set",
        tokenizer=str(tmp_path / "tokenizer.json"),
        end_of_text="word9",
    )
    assert manifest.dtype == "uint32"
    both = [TokenStream(tmp_path / "set", split) for split in ("train", "valid")]
    found = [stream.windows([0], stream.num_tokens - 1)[0].tolist() for stream in both]
    assert sorted(found) == [[0, 65536, 7, 9], [65535, 9]]


def test_the_manifest_counts(tmp_path, write_lines):
    texts = ["é" * 10, "b", "", "c" * 7]
    manifest = prepare([write_lines(texts)], tmp_path / "set")
    assert manifest == Manifest.read(tmp_path / "set")
    assert sum(entry.text_bytes for entry in manifest.splits.values()) == 28
    assert sum(entry.tokens for entry in manifest.splits.values()) == 31
    assert sum(entry.documents for entry in manifest.splits.values()) == 3
    assert (manifest.empty_documents, manifest.sources[0].documents) == (1, 3)


def test_many_documents_and_their_starts(tmp_path, monkeypatch):
    """The array of starts is written in parts and its header last."""
    monkeypatch.setattr("mosar.data.packing._STARTS_HELD", 7)
    writer = SplitWriter(tmp_path, "train", ByteTokenizer())
    for number in range(1000):
        writer.write(np.zeros(number % 3, dtype=np.uint8))
        writer.end_document()
    entry = writer.finish()
    starts = np.load(tmp_path / "train.docs.npy")
    assert entry.documents == len(starts) == 1000
    assert starts.tolist() == np.cumsum([0, *(n % 3 + 1 for n in range(999))]).tolist()


def test_memory_stays_bounded(tmp_path):
    """A single document of 40 MB is never held: neither as text nor as tokens."""
    big, small = tmp_path / "big.txt", tmp_path / "small.txt"
    with open(big, "w") as file:
        for _ in range(40):
            file.write("some words and more\n" * 50_000)
    small.write_text("small")
    tracemalloc.start()
    try:
        manifest = prepare([str(big)], tmp_path / "set", valid=[str(small)])
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert manifest.splits["train"].tokens == 40_000_001
    assert peak < 16e6


def test_an_existing_dataset_is_kept_unless_forced(tmp_path, write_lines, dataset):
    before = Manifest.read(dataset)
    source = write_lines(["x", "y"])
    with pytest.raises(DataError, match="already holds a dataset; --force"):
        prepare([source], dataset)
    assert check_dataset(dataset) == before
    prepare([source], dataset, force=True)
    assert check_dataset(dataset).splits["train"].documents == 1
    assert not list(tmp_path.glob(".*"))


def test_other_things_are_never_replaced(tmp_path, write_lines, dataset):
    source = write_lines()
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").write_text("mine")
    (dataset / "mine.txt").write_text("mine")
    for out in (tmp_path / "notes", dataset, tmp_path / "corpus.jsonl"):
        with pytest.raises(DataError, match="holds something other than a dataset"):
            prepare([source], out, force=True)
    assert (tmp_path / "notes" / "a.txt").read_text() == "mine"
    assert (dataset / "mine.txt").exists()
    assert not list(tmp_path.glob(".*"))


def test_out_may_be_an_empty_folder_or_a_link(tmp_path, write_lines):
    source = write_lines()
    (tmp_path / "empty").mkdir()
    prepare([source], tmp_path / "empty")
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    prepare([source], tmp_path / "link", force=True)
    assert (tmp_path / "link").is_symlink()
    assert check_dataset(tmp_path / "empty")
    prepare([source], tmp_path / "new" / "folders" / "set")


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ({"sources": []}, "at least one source"),
        ({"sources": "stdlib"}, "must be a list"),
        ({"tokenizer": "bpe:12"}, "VOCAB from 257 to 1048576"),
        ({"valid_fraction": 0}, "between 0 and 1"),
        ({"valid_fraction": 1.0}, "between 0 and 1"),
        ({"seed": -1}, "seed must be"),
        ({"end_of_text": "</s>"}, "is for a tokenizer.json"),
    ],
)
def test_wrong_arguments_are_no_data_errors(tmp_path, arguments, part):
    with pytest.raises(ValueError, match=part) as caught:
        prepare(**{"sources": ["stdlib"], "out": tmp_path / "set"} | arguments)
    assert not isinstance(caught.value, DataError)
    assert not list(tmp_path.iterdir())
