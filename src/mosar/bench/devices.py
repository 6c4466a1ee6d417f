"""How time, memory and peak speed are measured on each device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from mosar.bench import memory, timing
from mosar.bench.comparison import Unavailable
from mosar.bench.problem import Case, prepare_call
from mosar.kernels.triton import triton_version

DTYPES = ("float32", "bfloat16", "float16")
# Bytes written before every sample: more than the L2 cache of any GPU.
_FLUSHED_BYTES = 256 * 2**20
_WARM_UP_LENGTH = 128


@dataclass(frozen=True)
class Cpu:
    """The wall clock, and a fresh process whose resident memory is watched."""

    dtype: str = "float32"
    """Of q, k and v."""
    place: str = "cpu"
    """As torch calls it."""

    def describe(self) -> dict[str, Any]:
        """Entries of a record's environment besides the CPU."""
        return {}

    def warm_up(self, call: Callable[[], object]) -> None:
        """Warm-up before the first timing."""

    def seconds(self, call: Callable[[], object], repeats: int) -> float:
        """Time of a call, over `repeats` calls."""
        return timing.wall_seconds(call, repeats)

    def gemm_gflops(self, size: int = 2048, runs: int = 5) -> float:
        """The best rate of a large matrix product."""
        a, b, out = (torch.randn(size, size) for _ in range(3))
        best = min(self.seconds(lambda: torch.mm(a, b, out=out), 1) for _ in range(runs))
        return 2 * size**3 / best / 1e9

    def measure_peak(self, case: Case, competitor: str) -> int:
        """Peak memory of one call, bytes; raises Unavailable."""
        short = replace(case, length=min(case.length, _WARM_UP_LENGTH))
        return memory.measure_peak(prepare_call, case, short, competitor)


@dataclass(frozen=True)
class Cuda:
    """Events on the GPU's clock, and torch's count of allocated memory (CUDA and HIP)."""

    dtype: str = "bfloat16"
    place: str = "cuda"

    def describe(self) -> dict[str, Any]:
        properties = torch.cuda.get_device_properties(self.place)
        return {
            "device": properties.name,
            "processors": properties.multi_processor_count,
            "dtype": self.dtype,
            "triton": triton_version(),
        }

    def warm_up(self, call: Callable[[], object]) -> None:
        """Compiles kernels and times their block sizes."""
        for _ in range(2):
            call()
        torch.cuda.synchronize()

    def seconds(self, call: Callable[[], object], repeats: int) -> float:
        """Each sample starts with a cold L2 cache."""
        torch.empty(_FLUSHED_BYTES, dtype=torch.int8, device=self.place).zero_()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(repeats):
            call()
        end.record()
        end.synchronize()
        return max(start.elapsed_time(end) / 1e3 / repeats, 1e-9)

    def gemm_gflops(self, size: int = 8192, runs: int = 5) -> float:
        dtype = getattr(torch, self.dtype)
        a, b = (torch.randn(size, size, device=self.place).to(dtype) for _ in range(2))
        best = min(self.seconds(lambda: a @ b, 3) for _ in range(runs))
        return 2 * size**3 / best / 1e9

    def measure_peak(self, case: Case, competitor: str) -> int:
        call = prepare_call(case, competitor)
        self.warm_up(call)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        _result = call()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before


DEVICES = {"cpu": Cpu, "cuda": Cuda}


def open_device(name: str, dtype: str | None) -> Cpu | Cuda:
    """The device with this name; Unavailable if this machine lacks it."""
    if name == "cuda" and not torch.cuda.is_available():
        build = "has CUDA or HIP" if torch.version.cuda or torch.version.hip else "is for CPUs"
        raise Unavailable(
            f"--device cuda needs a GPU, and torch sees none (this build of torch {build})"
        )
    return DEVICES[name]() if dtype is None else DEVICES[name](dtype)
