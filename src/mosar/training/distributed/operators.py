"""The three operators between processes that divide a layer, each with its gradient.

    copy      y = x                the gradient is the sum over processes   (each uses x in part)
    add       y = sum of all x     the gradient is the same for each        (each gave a summand)
    common    y = x                the gradient is divided by their number  (all do the same with x,
                                   and a `copy` before it will add the gradients up)

Every process computes the whole loss, so a gradient is either whole and equal everywhere or waits
for the `copy` that makes it so.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def copy(group: dist.ProcessGroup, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Passes on tensors that are equal in all processes; gradients are summed."""
    return _Copy.apply(group, *tensors)  # pyright: ignore[reportReturnType]


def add(group: dist.ProcessGroup, x: Tensor) -> Tensor:
    """The sum of the processes' tensors."""
    return _Add.apply(group, x)  # pyright: ignore[reportReturnType]


def common(size: int, x: Tensor) -> Tensor:
    """A tensor that all processes of `size` use in the same way, after a `copy`."""
    return _Common.apply(size, x)  # pyright: ignore[reportReturnType]


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: dist.ProcessGroup, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.group = group
        return tuple(x.view_as(x) for x in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        if len(gradients) == 1:
            total = gradients[0].contiguous().clone()
            dist.all_reduce(total, group=ctx.group)
            return None, total
        # All in one message.
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(flat, group=ctx.group)
        parts = flat.split([gradient.numel() for gradient in gradients])
        return None, *(part.view(g.shape) for part, g in zip(parts, gradients, strict=True))


class _Add(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: dist.ProcessGroup, x: Tensor) -> Tensor:
        total = x.contiguous().clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return None, gradient


class _Common(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, size: int, x: Tensor) -> Tensor:
        ctx.size = size
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return None, gradient / ctx.size
