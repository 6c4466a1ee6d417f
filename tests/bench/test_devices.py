"""`mosar bench attention --device cuda` without a GPU: its clock, its memory, its rows."""

import sys
from dataclasses import replace

import pytest
import torch

from benchmark_records import make_benchmark
from mosar.bench import attention, devices, problem
from mosar.bench.attention import AttentionComparison
from mosar.bench.comparison import Unavailable
from mosar.bench.correctness import check_problem
from mosar.bench.devices import Cuda, open_device
from mosar.bench.problem import Case, Shape, build_problem
from mosar.bench.table import footer
from mosar.kernels import triton as package

triton = pytest.importorskip("triton")

COMPARISON = AttentionComparison(
    shapes=(Shape(4, 2, 8),),
    lengths=(40,),
    memory=(40,),
    competitors=("sdpa", "flash", "ours"),
    seconds=0.001,
    device="cuda",
)


class Gpu:
    """A GPU whose clock and memory are moved by hand: torch.cuda as far as it is used."""

    def __init__(self, monkeypatch):
        self.milliseconds, self.allocated, self.peak = 0.0, 1000, 5000
        gpu = self

        class Event:
            def __init__(self, enable_timing=False):
                assert enable_timing
                self.at, self.waited = None, False

            def record(self):
                self.at = gpu.milliseconds

            def synchronize(self):
                self.waited = True

            def elapsed_time(self, end):
                assert end.waited, "a time was read before the GPU was done"
                return end.at - self.at

        class Properties:
            name, multi_processor_count = "Pretended GPU", 7

        fakes = {
            "Event": Event,
            "synchronize": lambda: None,
            "get_device_properties": lambda place: Properties,
            "reset_peak_memory_stats": lambda: setattr(gpu, "peak", gpu.allocated),
            "memory_allocated": lambda: gpu.allocated,
            "max_memory_allocated": lambda: gpu.peak,
        }
        for name, fake in fakes.items():
            monkeypatch.setattr(torch.cuda, name, fake)


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.setattr(devices, "_FLUSHED_BYTES", 16)
    return Gpu(monkeypatch)


@pytest.fixture
def benchmark(gpu, monkeypatch):
    """A benchmark that believes "cpu:0" to be a GPU."""
    device = Cuda(dtype="float32", place="cpu:0")
    monkeypatch.setattr(attention, "open_device", lambda name, dtype: device)
    monkeypatch.setattr(Cuda, "gemm_gflops", lambda self: 100.0)
    time_calls = Cuda.seconds

    def seconds(self, call, repeats):
        def moving():
            call()
            gpu.milliseconds += 10

        return time_calls(self, moving, repeats)

    monkeypatch.setattr(Cuda, "seconds", seconds)
    return gpu


def test_time_is_the_gpus(gpu):
    def call():
        gpu.milliseconds += 4

    assert Cuda(place="cpu").seconds(call, 3) == pytest.approx(4e-3)


def test_peak_is_above_what_was_there(gpu, monkeypatch):
    def prepare_call(case, competitor):
        def call():
            gpu.peak = max(gpu.peak, gpu.allocated + 700)

        return call

    monkeypatch.setattr(devices, "prepare_call", prepare_call)
    case = Case(mode="sparse", shape=Shape(4, 2, 8), length=40)
    assert Cuda(place="cpu").measure_peak(case, "ours") == 700


@pytest.mark.parametrize(
    ("mode", "installed"),
    [("sparse", True), ("sparse", False), ("sparse-train", True), ("soft-train", True)],
)
def test_rows(benchmark, monkeypatch, mode, installed):
    """With Triton, and without it: its kernels' plan is timed where they serve."""
    if not installed:
        monkeypatch.setitem(sys.modules, "triton", None)
        monkeypatch.setattr(package, "_machine_obstacle", lambda device: "it needs Triton")
    (record,) = replace(COMPARISON, mode=(mode,)).run()
    assert record.correct and None not in record.peaks_bytes("ours", "sdpa")
    assert record.environment["device"] == "Pretended GPU"
    assert record.environment["dtype"] == "float32"
    for name in ("sdpa", "flash", "ours"):
        assert len(record.measurements[name].samples_ms) >= 5, record.measurements[name]
    assert record.plan.samples_ms
    kernels = f"Triton {triton.__version__}" if installed else "no Triton"
    said = footer([record], COMPARISON.notes([record]))
    assert f"Pretended GPU, float32; {kernels}" in said
    assert "fresh process" not in said


def test_flash_that_does_not_serve_gives_its_reason(benchmark, monkeypatch):
    def attend(problem):
        raise RuntimeError("No available kernel. Aborting execution.")

    monkeypatch.setattr(problem, "_attend_flash", attend)
    (record,) = replace(COMPARISON).run()
    assert "No available kernel" in record.measurements["flash"].unavailable
    assert record.speedup


def test_half_precision_is_checked_in_its_own_budget():
    drawn = build_problem(Case(mode="sparse", shape=Shape(4, 2, 8), length=80, dtype="bfloat16"))
    assert drawn.q.dtype == torch.bfloat16 and drawn.pi_q.dtype == torch.float32
    checks = check_problem(drawn)
    assert checks["out"].passed
    assert checks["out"].budget > 1e-3


def test_a_gpu_has_no_targets():
    record = make_benchmark()
    assert COMPARISON.verdicts(record)
    on_gpu = make_benchmark(environment=record.environment | {"device": "Some GPU"})
    assert not COMPARISON.verdicts(on_gpu)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_one_line_says_so(bench):
    with pytest.raises(Unavailable, match="needs a GPU, and torch sees none"):
        open_device("cuda", None)
    result = bench("attention --device cuda --lengths 40")
    assert result.exit_code == 1
    (line,) = result.stderr.splitlines()
    assert line.startswith("mosar: error: --device cuda needs a GPU")
