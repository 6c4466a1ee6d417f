"""What every launch needs: its device, numbers in base 2, and what the host hands over."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager

import torch
from torch import Tensor
from torch._subclasses.functional_tensor import FunctionalTensorMode

LOG2E = math.log2(math.e)


def launching_on(tensor: Tensor) -> AbstractContextManager[object]:
    """Around launches: Triton takes the current device, which need not be the tensors'."""
    return torch.cuda.device_of(tensor)


def keep_whole(name: str) -> None:
    """Makes torch.compile take `mosar::{name}` as one piece, as it takes operators of C++.

    Left to itself it would copy the kernels' source into its own, but not the named tuples that
    this source is written with.
    """
    torch.library.register_torch_dispatch(
        f"mosar::{name}",
        FunctionalTensorMode,
        lambda mode, func, types, args, kwargs: mode.__torch_dispatch__(func, types, args, kwargs),
    )


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
