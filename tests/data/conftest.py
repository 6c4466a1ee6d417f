"""Small corpora and datasets."""

import json

import pytest

from mosar.data.prepare import prepare

TEXTS = [
    f"Document {number}.\n" + f"line {number} of text\n" * (number % 7) for number in range(60)
]


@pytest.fixture
def write_lines(tmp_path):
    """Writes texts as JSON Lines and returns the path as a source."""

    def write(texts=TEXTS, name="corpus.jsonl", field="text"):
        path = tmp_path / name
        path.write_text("".join(json.dumps({field: text}) + "\n" for text in texts))
        return str(path)

    return write


@pytest.fixture
def dataset(tmp_path, write_lines):
    """A dataset of bytes."""
    prepare([write_lines()], tmp_path / "set")
    return tmp_path / "set"


@pytest.fixture
def bpe_dataset(tmp_path, write_lines):
    """A dataset with a trained tokenizer."""
    prepare([write_lines()], tmp_path / "bpe", tokenizer="bpe:300")
    return tmp_path / "bpe"
