"""What the native and the Triton operators of attention share: kinds of bias, shapes, autograd.

The operator takes q, k, v, pi_q, pi_k and more, and returns output, log-sum-exp and softmax
(maximum and sum). The backward one takes dout, dlse, output, softmax and the same inputs, and
returns dq, dk, dv, dpi_q, dpi_k; the last two are empty without pi_q and pi_k.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Kinds of bias, as in csrc/attention.h.
NONE, GEOMETRY, WORTH, TABLE = range(4)


def register_attention(name: str, *, impl: str) -> None:
    """Tells torch shapes and derivatives of `mosar::{name}` and of `mosar::{name}_backward`."""
    forward, backward = f"mosar::{name}", f"mosar::{name}_backward"
    backward_op = getattr(torch.ops.mosar, f"{name}_backward")

    def differentiate(ctx, dout: Tensor, dlse: Tensor, _: Tensor):
        out, softmax, *tensors = ctx.saved_tensors
        tensors, others = iter(tensors), iter(ctx.others)
        inputs = [next(tensors) if is_tensor else next(others) for is_tensor in ctx.is_tensor]
        dq, dk, dv, dpi_q, dpi_k = backward_op(
            dout.contiguous(), dlse.contiguous(), out, softmax, *inputs
        )
        routed = inputs[3] is not None
        gradients = [dq, dk, dv, dpi_q if routed else None, dpi_k if routed else None]
        return (*gradients, *[None] * (len(inputs) - len(gradients)))

    def refuse(ctx, *gradients: Tensor):
        raise NotImplementedError(
            f"impl='{impl}' gives no second derivatives; use impl='reference' or impl='tiled'"
        )

    torch.library.register_fake(forward)(_fake_attend)
    torch.library.register_fake(backward)(_fake_backward)
    torch.library.register_autograd(forward, differentiate, setup_context=_keep_inputs)
    torch.library.register_autograd(backward, refuse)


def empty_results(q: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Output [B, Hq, T, D], log-sum-exp [B, Hq, T] and softmax [2, B, Hq, T]."""
    rows = q.shape[:-1]
    return (
        q.new_empty(q.shape),
        q.new_empty(rows, dtype=torch.float32),
        q.new_empty((2, *rows), dtype=torch.float32),
    )


def _keep_inputs(ctx, inputs, output) -> None:
    ctx.is_tensor = [isinstance(x, Tensor) for x in inputs]
    ctx.others = [x for x in inputs if not isinstance(x, Tensor)]
    out, _, softmax = output
    ctx.mark_non_differentiable(softmax)
    ctx.save_for_backward(out, softmax, *(x for x in inputs if isinstance(x, Tensor)))


def _fake_attend(q, *inputs):
    return empty_results(q)


def _fake_backward(dout, dlse, out, softmax, q, k, v, pi_q, pi_k, *inputs):
    empty = dlse.new_empty
    routings = [empty((0,)) if pi is None else empty(pi.shape) for pi in (pi_q, pi_k)]
    return torch.empty_like(out), k.new_empty(k.shape), v.new_empty(v.shape), *routings
