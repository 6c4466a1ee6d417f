"""A small fixed corpus, prepared once, and the configurations that train on it."""

from pathlib import Path

import pytest

from mosar.data.prepare import prepare
from mosar.training.config import RunConfig, resolve_config

CORPUS = Path(__file__).parent / "corpus"


@pytest.fixture(scope="session")
def dataset(tmp_path_factory) -> Path:
    """The corpus in bytes."""
    folder = tmp_path_factory.mktemp("data") / "corpus"
    prepare([str(CORPUS / "train.jsonl")], folder, valid=[str(CORPUS / "valid.jsonl")])
    return folder


@pytest.fixture(scope="session")
def smoke(dataset):
    """The smoke preset of a variant with changes."""

    def make(variant: str = "mosar", *changes: str) -> RunConfig:
        return resolve_config(variant=variant, preset="smoke", data=dataset, changes=changes)

    return make
