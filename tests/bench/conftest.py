import pytest

from mosar.bench import attention


@pytest.fixture(autouse=True)
def no_gemm(monkeypatch):
    """The machine's peak takes a second to measure and is not what these tests are about."""
    monkeypatch.setattr(attention, "gemm_gflops", lambda: 100.0)
