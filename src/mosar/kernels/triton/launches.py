"""What every launch needs: its device, numbers in base 2, and what the host hands over."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

LOG2E = math.log2(math.e)


def launching_on(tensor: Tensor) -> AbstractContextManager[object]:
    """Around launches: Triton takes the current device, which need not be the tensors'."""
    # A compiled graph brings its own guard.
    return nullcontext() if torch.compiler.is_compiling() else torch.cuda.device_of(tensor)


def in_base_two(scale: float, softcap: float, barrier: float) -> dict[str, float | bool]:
    """The factors that kernels take: of products, of capped scores (softcap 0: none), of gates."""
    capped = softcap > 0
    return {
        "factor": scale / softcap if capped else scale * LOG2E,
        "cap": softcap * LOG2E,
        "barrier": barrier * LOG2E,
        "CAPPED": capped,
    }


def handed_over(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host on a device, which does not wait for it: from pinned memory."""
    if device.type != "cuda" or tensor.device == device:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
