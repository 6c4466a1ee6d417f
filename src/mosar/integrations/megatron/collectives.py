"""Sums over the ranks of a tensor-parallel group, with the gradients that belong to them.

    sum_over_ranks          forward: y = Σ_r x_r      backward: dx_r = dy     (each adds its share)
    sum_gradients           forward: y_r = x          backward: dx = Σ_r dy_r (each uses x its way)
    from_one_rank           forward: y = x if `speaks` else 0                 backward: dx = dy
    gradient_from_one_rank  forward: y = x            backward: dx = dy if `speaks` else 0

Between the first two lies what all ranks compute alike. The last two are for a tensor of which
several ranks hold a copy: one of them speaks for all, and each learns the whole of its weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable


def sum_over_ranks(tensors: Sequence[Tensor], group: Any) -> tuple[Tensor, ...]:
    """The sums of each tensor over the group, by one all-reduce for all of them."""
    return tuple(tensors) if _alone(group) else _SumOverRanks.apply(group, *tensors)  # pyright: ignore[reportReturnType]


def sum_gradients(tensors: Sequence[Tensor], group: Any) -> tuple[Tensor, ...]:
    """The tensors as they are; their gradients are summed by one all-reduce for all of them."""
    return tuple(tensors) if _alone(group) else _SumGradients.apply(group, *tensors)  # pyright: ignore[reportReturnType]


def from_one_rank(x: Tensor, speaks: bool) -> Tensor:
    return x if speaks else _Silent.apply(x)  # pyright: ignore[reportReturnType]


def gradient_from_one_rank(x: Tensor, speaks: bool) -> Tensor:
    return x if speaks else x.detach()


def _alone(group: Any) -> bool:
    return group is None or group.size() == 1


def _all_reduce(tensors: Sequence[Tensor], group: Any) -> tuple[Tensor, ...]:
    """New tensors of the same shapes; all must have one dtype."""
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    dist.all_reduce(flat, group=group)
    parts = flat.split([tensor.numel() for tensor in tensors])
    return tuple(part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True))


class _SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, group, *tensors):  # pyright: ignore[reportIncompatibleMethodOverride]
        return _all_reduce(tensors, group)

    @staticmethod
    @once_differentiable
    def backward(ctx, *gradients):
        return None, *gradients


class _SumGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx, group, *tensors):  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.group = group
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx, *gradients):
        return None, *_all_reduce(gradients, ctx.group)


class _Silent(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):  # pyright: ignore[reportIncompatibleMethodOverride]
        return torch.zeros_like(x)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):  # pyright: ignore[reportIncompatibleMethodOverride]
        return gradient
