"""Where a benchmark runs: how time, memory and the machine's peak are taken there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from mosar.bench import memory, timing
from mosar.bench.cases import Case, build_problem, call_of
from mosar.kernels.triton import triton_version

DEVICES = ("cpu", "cuda")
DTYPES = ("float32", "bfloat16", "float16")
# Written before every sample: more than any GPU's second-level cache holds.
_FLUSHED_BYTES = 256 * 2**20
_GEMM_SIZE = 8192


class DeviceUnavailable(RuntimeError):
    """The device is not here; the message says why."""


class Device(Protocol):
    """What a benchmark needs to know of a device."""

    @property
    def dtype(self) -> str:
        """Of q, k and v."""
        ...

    @property
    def place(self) -> str:
        """As torch calls it."""
        ...

    def check(self) -> None:
        """Raises DeviceUnavailable where it cannot be used."""
        ...

    def describe(self) -> dict[str, Any]:
        """What a record's environment says of it besides the CPU."""
        ...

    def warm_up(self, call: Callable[[], object]) -> None:
        """What must have happened before the first time says anything."""
        ...

    def seconds(self, call: Callable[[], object], repeats: int) -> float:
        """Time of a call, over `repeats` calls."""
        ...

    def gemm_gflops(self) -> float:
        """The best rate of a large matrix product."""
        ...

    def measure_peak(self, case: Case, competitor: str) -> int:
        """Peak memory of one call, bytes; raises memory.MemoryUnavailable."""
        ...


@dataclass(frozen=True)
class Cpu:
    """The wall clock, and a fresh process whose resident memory is watched."""

    dtype: str = "float32"
    place: str = "cpu"

    def check(self) -> None:
        pass

    def describe(self) -> dict[str, Any]:
        return {}

    def warm_up(self, call: Callable[[], object]) -> None:
        pass

    def seconds(self, call: Callable[[], object], repeats: int) -> float:
        return timing.wall_seconds(call, repeats)

    def gemm_gflops(self) -> float:
        return timing.gemm_gflops()

    def measure_peak(self, case: Case, competitor: str) -> int:
        return memory.measure_peak(case, competitor)


@dataclass(frozen=True)
class Cuda:
    """Events on the GPU's own clock, and torch's count of what it has allocated (CUDA and HIP)."""

    dtype: str = "bfloat16"
    place: str = "cuda"

    def check(self) -> None:
        if not torch.cuda.is_available():
            build = "has CUDA or HIP" if torch.version.cuda or torch.version.hip else "is for CPUs"
            raise DeviceUnavailable(
                f"--device cuda needs a GPU, and torch sees none (this build of torch {build})"
            )

    def describe(self) -> dict[str, Any]:
        properties = torch.cuda.get_device_properties(self.place)
        return {
            "device": properties.name,
            "processors": properties.multi_processor_count,
            "dtype": self.dtype,
            "triton": triton_version(),
        }

    def warm_up(self, call: Callable[[], object]) -> None:
        """Kernels are compiled, and their block sizes timed."""
        for _ in range(2):
            call()
        torch.cuda.synchronize()

    def seconds(self, call: Callable[[], object], repeats: int) -> float:
        """With a cold second-level cache at the start of the sample."""
        torch.empty(_FLUSHED_BYTES, dtype=torch.int8, device=self.place).zero_()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(repeats):
            call()
        end.record()
        end.synchronize()
        return max(start.elapsed_time(end) / 1e3 / repeats, 1e-9)

    def gemm_gflops(self, size: int = _GEMM_SIZE, runs: int = 5) -> float:
        a, b = (
            torch.randn(size, size, device=self.place).to(getattr(torch, self.dtype))
            for _ in range(2)
        )
        best = min(self.seconds(lambda: a @ b, 3) for _ in range(runs))
        return 2 * size**3 / best / 1e9

    def measure_peak(self, case: Case, competitor: str) -> int:
        call = call_of(build_problem(case), competitor)
        self.warm_up(call)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        result = call()
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before
        del result
        return peak


def open_device(name: str, dtype: str | None) -> Device:
    """The device of that name; DeviceUnavailable where it is not here."""
    given = {} if dtype is None else {"dtype": dtype}
    device = Cpu(**given) if name == "cpu" else Cuda(**given)
    device.check()
    return device
