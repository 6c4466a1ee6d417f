"""Block sizes: a small set per kernel and head dim, timed on first use.

The rows and keys of a tile are limited by the registers for its sums (rows x head dim of float32)
and the shared memory for its operands, so a wide head dim needs narrow blocks. The runs of sorted
supports have uneven edges, so narrow key blocks are always tried: they waste less at the edges.

The first entry of each set needs at most the 99 KiB of shared memory of consumer cards, or the
64 KiB of HIP. If another entry does not fit, tuning skips it.

The interpreter and `torch.use_deterministic_algorithms` use the first entry without timing, because
other blocks sum in another order.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
from triton.runtime.interpreter import InterpretedFunction

from mosar.kernels.triton.backward import key_kernel, query_kernel
from mosar.kernels.triton.forward import forward_kernel


class Blocks(NamedTuple):
    """Rows and keys of a tile, warps of a program, stages of its loop over blocks."""

    rows: int
    keys: int
    warps: int
    stages: int


KERNELS = {"forward": forward_kernel, "query": query_kernel, "key": key_kernel}
# Half precision on CUDA, by the largest padded head dim. Three stages, because the loop loads
# indices first, and then keys by these indices.
_CUDA = {
    "forward": {
        64: (Blocks(128, 32, 8, 3), Blocks(64, 32, 4, 3), Blocks(128, 64, 8, 3)),
        128: (Blocks(128, 32, 8, 3), Blocks(64, 32, 4, 3), Blocks(128, 64, 8, 3)),
        256: (Blocks(64, 32, 8, 2), Blocks(64, 32, 8, 3), Blocks(64, 16, 4, 3)),
    },
    "query": {
        64: (Blocks(64, 32, 4, 3), Blocks(128, 32, 8, 3)),
        128: (Blocks(64, 32, 8, 3), Blocks(64, 32, 4, 3)),
        256: (Blocks(64, 16, 8, 2), Blocks(64, 32, 8, 2), Blocks(32, 32, 4, 2)),
    },
    "key": {
        64: (Blocks(32, 64, 8, 3), Blocks(32, 64, 4, 3)),
        128: (Blocks(32, 64, 8, 3), Blocks(32, 32, 4, 3)),
        256: (Blocks(32, 32, 8, 2), Blocks(16, 64, 8, 2)),
    },
}
# HIP has wavefronts of 64, 64 KiB of shared memory, and loads that wait in registers.
_HIP = {
    "forward": {
        64: (Blocks(128, 32, 4, 2), Blocks(64, 32, 4, 1)),
        128: (Blocks(64, 32, 4, 2), Blocks(64, 32, 4, 1)),
        256: (Blocks(64, 32, 4, 1), Blocks(64, 16, 4, 1)),
    },
    "query": {
        64: (Blocks(64, 32, 4, 2), Blocks(64, 32, 4, 1)),
        128: (Blocks(64, 32, 4, 1), Blocks(32, 32, 4, 2)),
        256: (Blocks(32, 32, 4, 1), Blocks(32, 16, 4, 1)),
    },
    "key": {
        64: (Blocks(32, 64, 4, 1), Blocks(32, 32, 4, 1)),
        128: (Blocks(32, 32, 4, 1), Blocks(16, 64, 4, 1)),
        256: (Blocks(16, 32, 4, 1), Blocks(32, 16, 4, 1)),
    },
}
# float32 uses no matrix unit, and every operand is twice as large; all kernels use the same set.
_CUDA_SINGLE = {
    64: (Blocks(32, 32, 8, 1), Blocks(32, 32, 4, 1)),
    128: (Blocks(32, 32, 8, 1), Blocks(16, 32, 8, 1)),
    256: (Blocks(16, 16, 8, 1), Blocks(16, 32, 8, 1)),
}
_HIP_SINGLE = {
    64: (Blocks(32, 32, 4, 1), Blocks(16, 32, 4, 1)),
    128: (Blocks(16, 32, 4, 1), Blocks(32, 32, 4, 1)),
    256: (Blocks(16, 16, 4, 1), Blocks(16, 32, 4, 1)),
}
INTERPRETED = Blocks(32, 32, 4, 1)


def is_interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, on the CPU."""
    return isinstance(forward_kernel, InterpretedFunction)


def candidates(
    name: str, head_dim: int, dtype: torch.dtype, *, hip: bool = False
) -> tuple[Blocks, ...]:
    """The blocks worth timing; the first is a good guess and fits every device."""
    if dtype == torch.float32:
        by_dim = _HIP_SINGLE if hip else _CUDA_SINGLE
    else:
        by_dim = (_HIP if hip else _CUDA)[name]
    return by_dim[min(dim for dim in by_dim if dim >= head_dim)]


def choose(
    name: str, head_dim: int, dtype: torch.dtype, device: torch.device
) -> tuple[Any, dict[str, int]]:
    """The kernel to launch, and its blocks, unless the kernel tunes them itself."""
    kernel = KERNELS[name]
    if is_interpreted():
        return kernel, {"BLOCK_M": INTERPRETED.rows, "BLOCK_N": INTERPRETED.keys}
    found = candidates(name, head_dim, dtype, hip=torch.version.hip is not None)
    if len(found) == 1 or torch.are_deterministic_algorithms_enabled():
        return kernel, _launch_options(found[0])
    return _tuned(name, found, device), {}


def _launch_options(blocks: Blocks) -> dict[str, int]:
    return {
        "BLOCK_M": blocks.rows,
        "BLOCK_N": blocks.keys,
        "num_warps": blocks.warps,
        "num_stages": blocks.stages,
    }


@lru_cache(maxsize=64)
def _tuned(name: str, found: tuple[Blocks, ...], device: torch.device) -> Any:
    """One tuner per device, because the best blocks of one may not fit another."""
    configs = [
        triton.Config(
            {"BLOCK_M": blocks.rows, "BLOCK_N": blocks.keys},
            num_warps=blocks.warps,
            num_stages=blocks.stages,
        )
        for blocks in found
    ]
    return triton.autotune(configs, key=_KEY)(KERNELS[name])


# The values that the best blocks depend on, besides dtypes.
_KEY = [
    *("SHARE", "HEAD_DIM", "BIAS", "KEYED", "CAPPED", "PRECISION", "LABELS", "REGIMES", "COLUMNS"),
    "length_class",
]


def length_class(num_keys: int) -> int:
    """The classes of contexts that are timed separately: a few tiles, some tens, many."""
    return (num_keys > 1024) + (num_keys > 8192)


def num_splits(programs: int, share: int, device: torch.device) -> int:
    """The number of parts into which the query heads of a key/value head are divided.

    Each part is one program and needs a float32 copy of dk and dv, so there are only as many parts
    as fill the device.
    """
    splits = 1
    while programs * splits < 2 * _num_processors(device) and share % (2 * splits) == 0:
        splits *= 2
    return splits


@lru_cache(maxsize=16)
def _num_processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    return torch.cuda.get_device_properties(device).multi_processor_count
