"""A small corpus and runs trained on it for a few steps, each made once."""

import shutil
from functools import cache
from pathlib import Path

import pytest
import torch

from mosar.data.prepare import prepare
from mosar.evaluation.loaded_run import LoadedRun
from mosar.training.config import resolve_config
from mosar.training.loop import train

CORPUS = Path(__file__).parents[1] / "training" / "corpus"
SHORT = (
    *("train.steps=6", "train.warmup_steps=2", "train.checkpoint_every=3", "train.eval_every=6"),
    *("model.hidden_size=32", "model.head_dim=8", "model.ffn_size=48", "train.keep_last=3"),
)
SMALL_TASK = (
    *("train.steps=2", "train.warmup_steps=1", "train.micro_batch=2", "train.eval_batches=1"),
    *("model.max_length=64", "model.hidden_size=16", "model.num_heads=2", "model.num_kv_heads=1"),
    *("model.head_dim=8", "model.ffn_size=16", "model.num_layers=1"),
)


@pytest.fixture(scope="session")
def dataset(tmp_path_factory) -> Path:
    """The corpus in bytes; its validation split has 3,049 tokens."""
    folder = tmp_path_factory.mktemp("data") / "corpus"
    prepare([str(CORPUS / "train.jsonl")], folder, valid=[str(CORPUS / "valid.jsonl")])
    return folder


@pytest.fixture(scope="session")
def trained(dataset, tmp_path_factory):
    """The run folder of a variant with changes, trained once; only to be read."""

    @cache
    def make(variant: str = "mosar", *changes: str) -> Path:
        config = resolve_config(
            variant=variant, preset="smoke", data=dataset, changes=[*SHORT, *changes]
        )
        out = tmp_path_factory.mktemp("runs") / variant
        train(config, out, progress=False)
        return out

    return make


@pytest.fixture
def run(trained, tmp_path):
    """A copy of a trained run that may be written to."""

    def make(variant: str = "mosar", *changes: str, name: str | None = None) -> Path:
        return shutil.copytree(trained(variant, *changes), tmp_path / (name or variant))

    return make


@pytest.fixture
def loaded(trained):
    """A trained run, opened."""
    return lambda variant="mosar", *changes: LoadedRun.open(trained(variant, *changes))


@pytest.fixture
def scattered(loaded):
    """The same far from where it began: every regime is chosen, and every choice matters."""

    def make(variant: str = "mosar", *changes: str) -> LoadedRun:
        made = loaded(variant, *changes)
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for name, parameter in made.decoder.named_parameters():
                if "bias" not in name:
                    noise = torch.randn(parameter.shape, generator=generator)
                    parameter.add_(noise, alpha=1.0 if "router" in name else 0.3)
        return made

    return make


@pytest.fixture(scope="session")
def task_run(tmp_path_factory):
    """The run folder of a task, hardly trained, made once."""

    @cache
    def make(task: str, variant: str = "mosar") -> Path:
        changes = [*SMALL_TASK, f"data.task={task}"]
        config = resolve_config(
            variant=variant, preset="retrieval", data="nowhere", changes=changes
        )
        out = tmp_path_factory.mktemp(task) / variant
        train(config, out, progress=False)
        return out

    return make
