"""Small models, and run folders that hold them without having been trained."""

from pathlib import Path

import pytest

from mosar.data.prepare import prepare

from .runs import CORPUS, make_run


@pytest.fixture(scope="session")
def dataset(tmp_path_factory) -> Path:
    """A small corpus in bytes."""
    folder = tmp_path_factory.mktemp("data") / "corpus"
    prepare([str(CORPUS / "train.jsonl")], folder, valid=[str(CORPUS / "valid.jsonl")])
    return folder


@pytest.fixture(scope="session")
def bpe_dataset(tmp_path_factory) -> Path:
    """The same with a trained tokenizer."""
    folder = tmp_path_factory.mktemp("data") / "bpe"
    sources = {"valid": [str(CORPUS / "valid.jsonl")], "tokenizer": "bpe:300"}
    prepare([str(CORPUS / "train.jsonl")], folder, **sources)
    return folder


@pytest.fixture
def run(dataset, tmp_path):
    """A run folder of a variant, over the bytes or another dataset."""

    def make(variant: str = "mosar", data: Path | None = None, *changes: str) -> Path:
        return make_run(tmp_path / variant, variant, data or dataset, *changes)

    return make
