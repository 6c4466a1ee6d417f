"""The error budget of every fast path, in values and in gradients:

    error(ours) <= 2 error(plain PyTorch, same dtype) + 4 eps max|exact|

both errors against the float64 reference on the same inputs, largest entry by largest entry. Plain
PyTorch is the dense definition in torch operators: in float32 the reference itself, below that
scores, softmax and sums in the inputs' own dtype.

The budget compares two largest errors, so it means little where there are few entries, or where all
terms of a sum cancel: a query with one key has dp - delta = 0, and one correct order of summation
gets 0 there while another gets eps. For calls drawn at random max|exact| is therefore replaced by
what it would be if no terms cancelled, times 1 + max|logit| (a logit of size L is off by L eps, and
its weight by as much); `conditioned=True` asks for that.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from cases import DISTANCE_BIASES, ROUTINGS, Case
from mosar import distance_attention, mosar_attention
from mosar.core.bias import routed_bias
from mosar.core.layout import resolve_layout
from mosar.core.reference_attention import attend_routed
from mosar.kernels import native

# "planned" is "native" without its short cut for sparse routing of few keys.
PATHS = [
    (impl, kind)
    for kind in (*ROUTINGS, *DISTANCE_BIASES)
    for impl in ("native", "tiled", *(("planned",) if kind == "sparse" else ()))
]
NAMES = ("output", "lse", "dq", "dk", "dv", "dpi_q", "dpi_k")
Tensors = tuple[Tensor, ...]


def attend(
    case: Case, kind: str, inputs: Tensors, *, impl: str, **changes: Any
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp; `kind` is a routing, or a distance bias of the case."""
    if impl == "planned":
        # Sparse routing walks the runs of its plan however short the context is.
        with mock.patch.object(native, "_FEW_KEYS", 0):
            return operator(case, kind, impl="native", **changes)(*inputs)
    return operator(case, kind, impl=impl, **changes)(*inputs)


def operator(case: Case, kind: str, *, impl: str, **changes: Any) -> Callable[..., Any]:
    """The call of a case as a function of q, k, v, pi_q, pi_k."""
    options = {**case.options, "impl": impl, "return_lse": True} | changes
    if kind in ROUTINGS:
        return partial(mosar_attention, config=case.config, routing=kind, **options)
    attention = partial(distance_attention, **distance_bias(case, kind) | options)
    return lambda q, k, v, pi_q, pi_k: attention(q, k, v)


def distance_bias(case: Case, kind: str) -> dict[str, Tensor]:
    """The bias in float32, so that every path starts from the same numbers."""
    return {name: tensor.float() for name, tensor in case.distance_bias(kind).items()}


def differentiable(*tensors: Tensor) -> Tensors:
    """The same tensors, strides included, as leaves that ask for a gradient."""
    return tuple(tensor.detach().requires_grad_() for tensor in tensors)


def run(
    case: Case, kind: str, *, impl: str, inputs: Tensors | None = None, **changes: Any
) -> dict[str, Tensor]:
    """Values, and gradients of a random linear function of output and log-sum-exp."""
    leaves = differentiable(*(case.inputs if inputs is None else inputs))
    return collect(case, *attend(case, kind, leaves, impl=impl, **changes), leaves)


# Neighbouring tests ask for the same ones: the paths of a case come one after the other.
@lru_cache(maxsize=8)
def run_plain(case: Case, kind: str) -> dict[str, Tensor]:
    if case.dtype in (torch.float32, torch.float64):
        return run(case, kind, impl="reference")
    leaves = differentiable(*case.inputs)
    return collect(case, *plain_attend(case, kind, leaves), leaves)


@lru_cache(maxsize=8)
def run_exact(case: Case, kind: str) -> dict[str, Tensor]:
    return run(case, kind, impl="reference", inputs=tuple(x.double() for x in case.inputs))


def upstream(case: Case, output: Tensor, lse: Tensor) -> list[Tensor]:
    """The gradients that arrive at output and log-sum-exp."""
    generator = torch.Generator().manual_seed(case.seed)
    return [
        torch.randn(x.shape, generator=generator).to(case.dtype).to(x.dtype) for x in (output, lse)
    ]


def collect(case: Case, output: Tensor, lse: Tensor, leaves: Tensors) -> dict[str, Tensor]:
    arriving = upstream(case, output, lse)
    gradients = torch.autograd.grad((output, lse), leaves, arriving, allow_unused=True)
    # A routing that is not used, or only for its labels, has no gradient or zeros.
    gradients = [
        torch.zeros_like(leaf) if gradient is None else gradient
        for gradient, leaf in zip(gradients, leaves, strict=True)
    ]
    return dict(zip(NAMES, (output.detach(), lse.detach(), *gradients), strict=True))


def pairs(case: Case, kind: str, pi_q: Tensor, pi_k: Tensor) -> tuple[Tensor, Tensor]:
    """Bias and existence of every pair, broadcastable to [B, H, T, S]."""
    layout = resolve_layout(case.batch, case.num_queries, case.num_keys, **case.placement)
    if kind in ROUTINGS:
        zeros = [torch.zeros_like(tensor, dtype=pi_q.dtype) for tensor in (case.q, case.k, case.v)]
        routed = attend_routed(*zeros, layout, routed_bias(pi_q, pi_k, case.config, kind))
        bias = routed.bias.repeat_interleave(case.num_heads // routed.bias.shape[1], dim=1)
        return bias, routed.attention > 0
    distances = layout.distances().clamp_min(0)
    given, bias = distance_bias(case, kind), torch.zeros(1, 1, 1, 1, dtype=pi_q.dtype)
    if "log_gate" in given:
        last = given["log_gate"].shape[1] - 1
        bias = bias + given["log_gate"][:, distances.clamp_max(last)].transpose(0, 1)
    if "slopes" in given:
        bias = bias - given["slopes"][:, None, None] * distances[:, None]
    return bias, layout.exists()[:, None] & (bias > -math.inf)


def scores(case: Case, q: Tensor, k: Tensor) -> Tensor:
    """cap(scale q·k), [B, H, T, S], in the dtype of q."""
    score = q @ k.mT * (case.head_dim**-0.5 if case.scale is None else case.scale)
    return score if case.softcap is None else case.softcap * torch.tanh(score / case.softcap)


def plain_attend(case: Case, kind: str, inputs: Tensors) -> tuple[Tensor, Tensor]:
    """The dense definition with every step after the bias in the dtype of q."""
    q, k, v, pi_q, pi_k = inputs
    bias, inside = pairs(case, kind, pi_q, pi_k)
    k, v = (x.repeat_interleave(case.heads_per_kv, dim=1) for x in (k, v))
    empty = ~inside.any(dim=-1, keepdim=True)
    score = (scores(case, q, k) + bias.to(q.dtype)).masked_fill(~inside, -math.inf)
    score = score.masked_fill(empty, 0)
    output = torch.softmax(score, dim=-1).masked_fill(~inside, 0) @ v
    return output, torch.logsumexp(score, dim=-1).masked_fill(empty[..., 0], -math.inf)


def magnitudes(case: Case, kind: str) -> dict[str, float]:
    """The largest entry each result would have if no terms cancelled, times 1 + max|logit|."""
    q, k, v, pi_q, pi_k = differentiable(*(tensor.double() for tensor in case.inputs))
    bias, inside = pairs(case, kind, pi_q, pi_k)
    spread = [x.detach().repeat_interleave(case.heads_per_kv, dim=1) for x in (k, v)]
    logit = (scores(case, q.detach(), spread[0]) + bias.detach()).expand(
        case.batch, case.num_heads, case.num_queries, case.num_keys
    )
    inside = inside.expand(logit.shape)
    if not inside.any():
        return dict.fromkeys(NAMES, 0.0)
    weight = torch.softmax(logit.masked_fill(~inside, -1e300), dim=-1).masked_fill(~inside, 0)
    dout, dlse = (x.abs() for x in upstream(case, q, q[..., 0]))
    q_abs, k_abs, v_abs = q.detach().abs(), spread[0].abs(), spread[1].abs()
    dweight = dout @ v_abs.mT
    dscore = weight * (dweight + (weight * dweight).sum(dim=-1, keepdim=True) + dlse[..., None])
    scale = abs(case.head_dim**-0.5 if case.scale is None else case.scale)
    found = {
        "output": weight @ v_abs,
        "lse": logit[inside].abs(),
        "dq": scale * dscore @ k_abs,
        "dk": (scale * dscore.mT @ q_abs).unflatten(1, (case.kv_heads, -1)).sum(dim=2),
        "dv": (weight.mT @ dout).unflatten(1, (case.kv_heads, -1)).sum(dim=2),
        "dpi_q": torch.zeros(()),
        "dpi_k": torch.zeros(()),
    }
    if kind == "soft":
        total = (dscore * torch.where(inside, bias, 0)).sum()
        found["dpi_q"], found["dpi_k"] = torch.autograd.grad(total, (pi_q, pi_k))
    largest = {name: float(tensor.abs().max()) for name, tensor in found.items()}
    return {name: magnitude * (1 + largest["lse"]) for name, magnitude in largest.items()}


def errors(ours: Tensor, plain: Tensor, true: Tensor) -> tuple[float, float, float]:
    """Largest error of ours and of plain torch, and the largest entry; infinities must match.

    Where plain torch overflows and the exact result does not, it allows nothing.
    """
    assert ours.shape == true.shape
    finite = true.isfinite()
    assert torch.equal(ours.double()[~finite], true[~finite])
    if not finite.any():
        return 0.0, 0.0, 0.0
    true = true[finite]
    error, allowed = ((x.double()[finite] - true).abs() for x in (ours, plain))
    return float(error.max()), float(allowed.nan_to_num(0, 0).max()), float(true.abs().max())


def compare(
    ours: dict[str, Tensor],
    plain: dict[str, Tensor],
    true: dict[str, Tensor],
    eps: float,
    floor: dict[str, float] | None = None,
) -> None:
    missed = []
    for name in NAMES:
        error, allowed, largest = errors(ours[name], plain[name], true[name])
        if floor is not None:
            largest = max(largest, floor[name])
        if not error <= 2 * allowed + 4 * eps * largest:
            missed.append(
                f"{name}: error {error:.3g}, plain torch's {allowed:.3g}, largest {largest:.3g}"
            )
    assert not missed, "; ".join(missed)


def assert_within_budget(case: Case, kind: str, *, impl: str, conditioned: bool = False) -> None:
    """`impl` keeps dtypes, shapes and infinities, and is as right as the budget asks."""
    ours = run(case, kind, impl=impl)
    assert ours["lse"].dtype == (torch.float64 if case.dtype == torch.float64 else torch.float32)
    for name, like in zip(NAMES, (case.q, ours["lse"], *case.inputs), strict=True):
        assert ours[name].dtype == like.dtype, name
    floor = magnitudes(case, kind) if conditioned else None
    eps = torch.finfo(case.dtype).eps
    compare(ours, run_plain(case, kind), run_exact(case, kind), eps, floor)


def assert_padding_does_not_matter(case: Case, kind: str, *, impl: str, poison: float) -> None:
    """What padded slots hold reaches no result, and no gradient reaches them."""
    assert case.key_valid is not None
    padded = ~case.key_valid[:, None, :, None]
    assert padded.any()

    def filled(value: float) -> dict[str, Tensor]:
        q, k, v, pi_q, pi_k = case.inputs
        inputs = (q, k.masked_fill(padded, value), v.masked_fill(padded, value), pi_q, pi_k)
        return run(case, kind, impl=impl, inputs=inputs)

    clean, poisoned = filled(0.0), filled(poison)
    for name in NAMES:
        assert torch.equal(clean[name], poisoned[name]), name
        assert not poisoned[name].isnan().any()
    for name in ("dk", "dv"):
        assert not poisoned[name].masked_fill(~padded, 0).any()


def assert_rows_without_keys_are_zero(case: Case, kind: str, *, impl: str) -> None:
    """Of two rows the first has no valid key; ten queries of the second come before any."""
    queries, keys = case.num_queries, case.num_keys
    valid = torch.ones(2, keys, dtype=torch.bool)
    valid[0] = False
    positions = torch.arange(queries).expand(2, queries)
    placement = {
        "key_valid": valid,
        "key_positions": torch.arange(10, 10 + keys).expand(2, keys),
        "query_positions": positions,
    }
    ours = run(case, kind, impl=impl, **placement)
    empty = positions < 10
    empty[0] = True
    empty = empty[:, None].expand(2, case.num_heads, queries)
    assert not ours["output"][empty].any()
    assert (ours["lse"][empty] == -math.inf).all()
    assert ours["lse"][~empty].isfinite().all()
    assert not ours["dq"][empty].any()
    for name in NAMES[2:]:
        assert ours[name].isfinite().all()
        assert not ours[name][0].any()


def assert_every_output_is_written(case: Case, kind: str, *, impl: str) -> None:
    """With torch's own empty tensors full of NaN nothing changes."""
    expected = run(case, kind, impl=impl)
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(1).isnan().all()
        found = run(case, kind, impl=impl)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(expected[name], found[name]) for name in NAMES)


def transposed(x: Tensor) -> Tensor:
    """As [B, T, H, D] projections arrive."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def strided(x: Tensor) -> Tensor:
    """The last dimension is not contiguous."""
    return torch.stack([x, torch.full_like(x, math.nan)], dim=-1)[..., 0]


def viewed(case: Case, view: Callable[[Tensor], Tensor]) -> tuple[Tensors, Tensors]:
    """The inputs of a case behind a view, and the same numbers laid out plainly."""
    views = tuple(view(x) if x.dim() == 4 else view(x[:, None])[:, 0] for x in case.inputs)
    plain = tuple(x.contiguous() for x in views)
    assert any(a.stride() != b.stride() for a, b in zip(views, plain, strict=True))
    return views, plain


def assert_no_second_derivative(case: Case, kind: str, *, impl: str) -> None:
    leaves = differentiable(*case.inputs)
    output, _ = attend(case, kind, leaves, impl=impl)
    (gradient,) = torch.autograd.grad(output.square().sum(), leaves[:1], create_graph=True)
    with pytest.raises(NotImplementedError, match="second derivatives"):
        gradient.sum().backward()
