"""RMSNorm as Gemma 2 has it: x / sqrt(mean(x^2) + eps) * (1 + w), in float32, in the dtype of x.

With g the gradient of the output, r = 1 / sqrt(mean(x^2) + eps) and u = g (1 + w):

    dw = sum(g x r)       dx = r (u - x r^2 mean(u x))

Written out because a decoder has four norms per layer and autograd's own backward pass over the
steps of the forward takes twice the time and keeps twice as much.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension; its weight starts at 0, which stands for 1."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        return _Normalize.apply(x, self.weight, self.eps)  # pyright: ignore[reportReturnType]

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}"


class _Normalize(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        x_wide, factor = x.to(wide), 1 + weight.to(wide)
        mean_square = torch.linalg.vector_norm(x_wide, dim=-1, keepdim=True).square() / x.shape[-1]
        inverse = (mean_square + eps).rsqrt()
        ctx.save_for_backward(x, inverse, weight)
        return (x_wide * inverse).mul_(factor).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        x, inverse, weight = ctx.saved_tensors
        with torch.autocast(x.device.type, enabled=False):
            x_wide, g_wide = x.to(inverse.dtype), gradient.to(inverse.dtype)
            factor = 1 + weight.to(inverse.dtype)
            product = (g_wide * x_wide).reshape(-1, x.shape[-1])
            dweight = inverse.flatten() @ product
            mean = (product @ factor).view_as(inverse) / x.shape[-1]
            dx = torch.addcmul(g_wide * factor, x_wide, mean * inverse.square(), value=-1)
            return dx.mul_(inverse).to(x.dtype), dweight.to(weight.dtype), None
