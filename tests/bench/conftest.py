import pytest
from typer.testing import CliRunner

from mosar.bench.devices import Cpu
from mosar.cli import app


@pytest.fixture(autouse=True)
def no_gemm(monkeypatch):
    """The machine's peak takes a second to measure and is not what these tests are about."""
    monkeypatch.setattr(Cpu, "gemm_gflops", lambda self: 100.0)


@pytest.fixture
def bench():
    """Runs `mosar bench` with some words and further arguments."""
    return lambda words, *more: CliRunner().invoke(app, ["bench", *words.split(), *map(str, more)])
