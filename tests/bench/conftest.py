import pytest
from typer.testing import CliRunner

from evaluation.conftest import dataset, trained  # noqa: F401
from mosar.bench.devices import Cpu
from mosar.bench.training import TrainingCase
from mosar.cli import app


@pytest.fixture(autouse=True)
def quick_benchmarks(monkeypatch):
    """Steps of few tokens, and no second to measure the machine's peak."""
    monkeypatch.setattr(Cpu, "gemm_gflops", lambda self: 100.0)
    *others, _ = TrainingCase.__init__.__defaults__
    monkeypatch.setattr(TrainingCase.__init__, "__defaults__", (*others, 64))


@pytest.fixture
def bench():
    """Runs `mosar bench` with some words and further arguments."""
    return lambda words, *more: CliRunner().invoke(app, ["bench", *words.split(), *map(str, more)])
