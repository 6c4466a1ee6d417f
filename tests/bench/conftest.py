import pytest

from mosar.bench.devices import Cpu


@pytest.fixture(autouse=True)
def no_gemm(monkeypatch):
    """The machine's peak takes a second to measure and is not what these tests are about."""
    monkeypatch.setattr(Cpu, "gemm_gflops", lambda self: 100.0)
