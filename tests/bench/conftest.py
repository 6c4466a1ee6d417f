import pytest

from mosar.bench import timing


@pytest.fixture(autouse=True)
def no_gemm(monkeypatch):
    """The machine's peak takes a second to measure and is not what these tests are about."""
    monkeypatch.setattr(timing, "gemm_gflops", lambda: 100.0)
