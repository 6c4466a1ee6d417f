"""RMSNorm, GeGLU and cross-entropy as single passes: in C++ on the CPU, else in torch.

    rms_norm        x / sqrt(mean(x^2) + eps) * (1 + w), computed in float32 or wider
    geglu           gelu(gate) * up, with the tanh form of GELU
    cross_entropy_  log(sum_i exp(l_i)) - l_target of logits c tanh(s) or s, and its gradient

Let g be the gradient of the output of rms_norm, r = 1 / sqrt(mean(x^2) + eps), u = g (1 + w):

    dw = sum(g x r)       dx = r (u - x r^2 mean(u x))

The C++ passes take float32 and bfloat16 and compute in float32.
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


def cross_entropy_(scores: Tensor, targets: Tensor, softcap: float | None, share: float) -> Tensor:
    """`share` times the sum of the losses of scores [n, V] against targets [n], at least float32.

    With a soft-cap, the scores are logits over the cap. They are replaced by the gradient of the
    result with respect to the projected hidden states: that of the logits times 1 - tanh(s)^2.
    """
    if _serves(scores):
        losses = torch.ops.mosar.cross_entropy(scores, targets, softcap or 0.0, share)
        return share * losses.sum()
    wide = scores.to(torch.promote_types(scores.dtype, torch.float32))
    loss = _loss_and_gradient(wide, targets[:, None], softcap, share)
    if wide is not scores:
        scores.copy_(wide)
    return loss


# Logits up to this value need no shift before exp in float32.
_TAME = 60.0


def _loss_and_gradient(
    scores_nV: Tensor, target_n1: Tensor, softcap: float | None, share: float
) -> Tensor:
    t_nV = None
    logits_nV = scores_nV
    if softcap is not None:
        t_nV = scores_nV.tanh_()
        logits_nV = t_nV * softcap
    if softcap is None or softcap > _TAME:
        logits_nV.sub_(logits_nV.amax(dim=1, keepdim=True))
    chosen_n1 = logits_nV.gather(1, target_n1)
    odds_nV = logits_nV.exp_()
    sum_n1 = odds_nV.sum(dim=1, keepdim=True)
    loss = share * (sum_n1.log() - chosen_n1).sum()
    dlogits_nV = odds_nV.mul_(share / sum_n1)
    dlogits_nV.scatter_add_(1, target_n1, torch.full_like(chosen_n1, -share))
    if t_nV is not None:
        # The derivative of c tanh(x / c) is 1 - tanh².
        torch.addcmul(dlogits_nV, dlogits_nV, t_nV.square_(), value=-1, out=scores_nV)
    return loss


_NATIVE = (torch.float32, torch.bfloat16)


def _serves(x: Tensor, *others: Tensor) -> bool:
    """Whether the native passes can take these; torch.compile fuses the plain formulas itself."""
    return (
        not is_traced()
        and x.dtype in _NATIVE
        and all(t.device.type == "cpu" and t.dtype == x.dtype for t in (x, *others))
        and native_obstacle() is None
    )


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        ctx.native = weight.dtype == torch.float32 and weight.is_cpu and _serves(x)
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
            rows = gradient.to(x.dtype).contiguous().view(x.shape)
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
        gate, up = ctx.saved_tensors
        flat = gradient.to(gate.dtype).contiguous().view(-1)
        dgate, dup = torch.ops.mosar.geglu_backward(flat, gate, up)
        return dgate.view(gradient.shape), dup.view(gradient.shape)
