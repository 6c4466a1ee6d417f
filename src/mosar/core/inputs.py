"""Input checks that all kinds of attention share; errors name the argument."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from numbers import Real

import torch
from torch import Tensor

from mosar.core.layout import Layout, resolve_layout

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def without_autocast(x: Tensor) -> AbstractContextManager:
    """A context without autocast; the meta device has no autocast."""
    if x.device.type == "meta":
        return nullcontext()
    return torch.autocast(x.device.type, enabled=False)


class NotANumber(ValueError):
    """A routing that contains NaN: the input is not wrong, but the model has diverged."""


def check_attention_inputs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None,
    softcap: float | None,
    dropout: float = 0.0,
    **placement: Tensor | float | None,
) -> Layout:
    """Checks what every kind of attention takes, and resolves which pairs exist."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if not isinstance(tensor, Tensor):
            raise ValueError(f"{name} must be a tensor, got {type(tensor).__name__}")
        if tensor.dim() != 4 or 0 in tensor.shape:
            raise ValueError(
                f"{name} must be [batch, heads, length, head_dim], none of them 0, "
                f"got {list(tensor.shape)}"
            )
        if tensor.dtype not in DTYPES:
            raise ValueError(
                f"{name} must be one of {[str(d) for d in DTYPES]}, got {tensor.dtype}"
            )
    if k.dtype != q.dtype or v.dtype != q.dtype:
        raise ValueError(f"q, k and v must have one dtype, got {q.dtype}, {k.dtype}, {v.dtype}")
    if k.device != q.device or v.device != q.device:
        raise ValueError(
            f"q, k and v must be on one device, got {q.device}, {k.device}, {v.device}"
        )
    if k.shape != v.shape:
        raise ValueError(f"k and v must have one shape, got {list(k.shape)} and {list(v.shape)}")
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise ValueError(
            f"q and k must agree in batch and head_dim, got {list(q.shape)} and {list(k.shape)}"
        )
    if q.shape[1] % k.shape[1]:
        raise ValueError(
            f"the {q.shape[1]} heads of q must be a multiple of the {k.shape[1]} heads of k"
        )
    if dropout != 0.0:
        raise ValueError(f"attention dropout is not supported, got dropout={dropout}; set it to 0")
    check_scores(scale, softcap)
    return resolve_layout(q.shape[0], q.shape[2], k.shape[2], device=q.device, **placement)  # pyright: ignore[reportArgumentType]


def check_scores(scale: float | None, softcap: float | None) -> None:
    """A ValueError unless scale and softcap are None or numbers that float32 can hold."""
    for name, value, positive in (("scale", scale, False), ("softcap", softcap, True)):
        if value is None:
            continue
        number = isinstance(value, Real) and not isinstance(value, bool)
        # Kernels store both in float32.
        lowest = 1e-30 if positive else -1e30
        if not number or not lowest <= value <= 1e30:
            raise ValueError(f"{name} must be None or a number in [{lowest}, 1e30], got {value!r}")
