"""What the native and the Triton operators of attention share: kinds of bias, shapes, autograd.

The forward operator takes q, k, v, pi_q, pi_k and more. It returns output, log-sum-exp and softmax
(maximum and sum). The backward operator takes dout, dlse, output, softmax and the same inputs. It
returns dq, dk, dv, dpi_q, dpi_k; the last two are empty without pi_q and pi_k. If it can also
differentiate a bias by distance, it takes one more argument before the inputs: bits that say which
parts of the bias to differentiate. Their gradients follow the others; the rest is empty.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

# Kinds of bias, as in csrc/attention.h.
NONE, GEOMETRY, WORTH, TABLE = range(4)


def register_attention(name: str, *, impl: str, bias_inputs: tuple[int, ...] = ()) -> None:
    """Registers shapes and derivatives of `mosar::{name}` and `mosar::{name}_backward` with torch.

    bias_inputs: the indices of the inputs of a bias by distance that can be learned.
    """
    forward, backward = f"mosar::{name}", f"mosar::{name}_backward"
    backward_op = getattr(torch.ops.mosar, f"{name}_backward")

    def differentiate(ctx, dout: Tensor, dlse: Tensor, _: Tensor):
        out, softmax, *tensors = ctx.saved_tensors
        tensors, others = iter(tensors), iter(ctx.others)
        inputs = [next(tensors) if is_tensor else next(others) for is_tensor in ctx.is_tensor]
        wanted = [place for place in bias_inputs if ctx.needs_input_grad[place]]
        learned = [sum(1 << bias_inputs.index(place) for place in wanted)] if bias_inputs else []
        found = backward_op(dout.contiguous(), dlse.contiguous(), out, softmax, *learned, *inputs)
        routed = inputs[3] is not None
        gradients = [*found[:3], *(found[3:5] if routed else (None, None))]
        gradients += [None] * (len(inputs) - len(gradients))
        for place, gradient in zip(bias_inputs, found[5:], strict=True):
            gradients[place] = gradient if place in wanted else None
        return tuple(gradients)

    def refuse(ctx, *gradients: Tensor):
        raise NotImplementedError(
            f"impl='{impl}' gives no second derivatives; use impl='reference' or impl='tiled'"
        )

    torch.library.register_fake(forward)(_fake_attend)
    torch.library.register_fake(backward)(
        partial(_fake_backward_of_bias, bias_inputs) if bias_inputs else _fake_backward
    )
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


def _fake_backward_of_bias(bias_inputs, dout, dlse, out, softmax, learned, *inputs):
    """The same, and the gradients of the parts of the bias whose bits `learned` has."""
    parts = [
        inputs[place].new_empty(inputs[place].shape if learned >> bit & 1 else (0,))
        if inputs[place] is not None
        else dlse.new_empty((0,), dtype=torch.float64 if bit == 2 else torch.float32)
        for bit, place in enumerate(bias_inputs)
    ]
    return (*_fake_backward(dout, dlse, out, softmax, *inputs), *parts)


def _fake_backward(dout, dlse, out, softmax, q, k, v, pi_q, pi_k, *inputs):
    empty = dlse.new_empty
    routings = [empty((0,)) if pi is None else empty(pi.shape) for pi in (pi_q, pi_k)]
    return torch.empty_like(out), k.new_empty(k.shape), v.new_empty(v.shape), *routings
