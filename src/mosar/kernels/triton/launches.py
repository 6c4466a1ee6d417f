"""What every launch needs: its device, numbers in base 2, and tensors from the host."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager

import torch
from torch import Tensor
from torch._subclasses.functional_tensor import FunctionalTensorMode

LOG2E = math.log2(math.e)


def launching_on(tensor: Tensor) -> AbstractContextManager[object]:
    """A context for launches: Triton uses the current device, which may not be the tensors'."""
    return torch.cuda.device_of(tensor)


def keep_whole(name: str) -> None:
    """Makes torch.compile treat `mosar::{name}` as one operator, like an operator in C++.

    Otherwise it would copy the source of the kernels into its own, but not the named tuples that
    they use.
    """
    torch.library.register_torch_dispatch(
        f"mosar::{name}",
        FunctionalTensorMode,
        lambda mode, func, types, args, kwargs: mode.__torch_dispatch__(func, types, args, kwargs),
    )


def in_base_two(scale: float, softcap: float, barrier: float) -> dict[str, float | bool]:
    """The factors of products, of capped scores (softcap 0: no cap) and of gates."""
    capped = softcap > 0
    return {
        "factor": scale / softcap if capped else scale * LOG2E,
        "cap": softcap * LOG2E,
        "barrier": barrier * LOG2E,
        "CAPPED": capped,
    }


def handed_over(tensor: Tensor, device: torch.device) -> Tensor:
    """Copies a tensor from the host through pinned memory, so that nothing waits for the device."""
    if device.type != "cuda" or tensor.device == device:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
