"""Attention on the GPU, in Triton, with the same plan and arithmetic as the native kernels.

Importing this package does not import Triton; the first call does. The modules:

    tiles, logits       what the kernels share
    forward, backward   the kernels of attention
    planning            the kernels of the plan
    decode              the kernels of the regime cache
    blocks              the sizes of blocks
    plan                the plan on the device
    ops                 the operators `torch.ops.mosar.triton_*`
    callers             the functions that `mosar.attention` calls
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from mosar.lazy import install_line

LARGEST_HEAD_DIM = 256
# The oldest NVIDIA GPUs whose matrix units support bfloat16.
_OLDEST_CAPABILITY = (8, 0)


def triton_version() -> str | None:
    """The version of Triton; None if it is not installed."""
    try:
        import triton
    except ImportError:
        return None
    return triton.__version__


def obstacle(q: Tensor) -> str | None:
    """Why these kernels cannot serve a call with this q; None if they can."""
    if q.dtype == torch.float64:
        return "it computes in float32, and q is float64"
    if q.shape[-1] > LARGEST_HEAD_DIM:
        return f"it takes head dims up to {LARGEST_HEAD_DIM}, and q has {q.shape[-1]}"
    return _machine_obstacle(str(q.device))


@torch.compiler.assume_constant_result
def _machine_obstacle(device: str) -> str | None:
    return _kept_machine_obstacle(device)


@lru_cache(maxsize=16)
def _kept_machine_obstacle(device: str) -> str | None:
    try:
        from mosar.kernels.triton.blocks import is_interpreted
    except ImportError as error:
        if (error.name or "").partition(".")[0] != "triton":
            raise
        return f"it needs Triton, which is not installed: {install_line('gpu')}"
    if is_interpreted():
        return None
    if not device.startswith("cuda"):
        return f"it runs on a GPU, and q is on {device}"
    capability = torch.cuda.get_device_capability(device)
    if torch.version.hip is None and capability < _OLDEST_CAPABILITY:
        return "it needs compute capability {}.{}, and {} has {}.{}".format(
            *_OLDEST_CAPABILITY, device, *capability
        )
    return None
