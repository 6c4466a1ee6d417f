"""RMSNorm and GeGLU as single passes, with gradients: in C++ for float32 on the CPU, else in torch.

    rms_norm   x / sqrt(mean(x^2) + eps) * (1 + w), computed in float32 or wider
    geglu      gelu(gate) * up, with the tanh form of GELU

Let g be the gradient of the output of rms_norm, r = 1 / sqrt(mean(x^2) + eps), u = g (1 + w):

    dw = sum(g x r)       dx = r (u - x r^2 mean(u x))
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from mosar.core.inputs import without_autocast
from mosar.core.layout import is_traced
from mosar.kernels.native import native_obstacle


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., C] normalised over its last dimension; a weight [C] of 0 is a factor of 1."""
    return _RMSNorm.apply(x, weight, eps)  # pyright: ignore[reportReturnType]


def geglu(gate: Tensor, up: Tensor) -> Tensor:
    """gelu(gate) * up, both of one shape."""
    if not _serves(gate, up):
        return F.gelu(gate, approximate="tanh") * up
    return _GeGLU.apply(gate, up)  # pyright: ignore[reportReturnType]


def _serves(*tensors: Tensor) -> bool:
    """Whether the native passes can take these; torch.compile fuses the plain formulas itself."""
    return (
        not is_traced()
        and all(t.device.type == "cpu" and t.dtype == torch.float32 for t in tensors)
        and native_obstacle() is None
    )


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        ctx.native = _serves(x, weight)
        if ctx.native:
            rows = x.contiguous().view(-1, x.shape[-1])
            out, inverse = torch.ops.mosar.rms_norm(rows, weight.contiguous(), eps)
            ctx.save_for_backward(rows, inverse, weight)
            return out.view(x.shape)
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
        if ctx.native:
            rows = gradient.contiguous().view(x.shape)
            dx, dweight = torch.ops.mosar.rms_norm_backward(rows, x, inverse, weight.contiguous())
            return dx.view(gradient.shape), dweight, None
        with without_autocast(x):
            x_wide, g_wide = x.to(inverse.dtype), gradient.to(inverse.dtype)
            factor = 1 + weight.to(inverse.dtype)
            product = (g_wide * x_wide).reshape(-1, x.shape[-1])
            dweight = inverse.flatten() @ product
            mean = (product @ factor).view_as(inverse) / x.shape[-1]
            dx = torch.addcmul(g_wide * factor, x_wide, mean * inverse.square(), value=-1)
            return dx.mul_(inverse).to(x.dtype), dweight.to(weight.dtype), None


class _GeGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate: Tensor, up: Tensor) -> Tensor:
        flat = gate.contiguous().view(-1), up.contiguous().view(-1)
        ctx.save_for_backward(*flat)
        return torch.ops.mosar.geglu(*flat).view(gate.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        flat = gradient.contiguous().view(-1)
        dgate, dup = torch.ops.mosar.geglu_backward(flat, *ctx.saved_tensors)
        return dgate.view(gradient.shape), dup.view(gradient.shape)
