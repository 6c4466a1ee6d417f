"""The gradient of hard routing: how each other choice of a token would have changed the loss.

    query i takes regime m    dpi_q[i, m] = dO_i (O_i|m - O_i) = sum_j g e a / sum_j g e
    key j takes regime n      dpi_k[j, n] = sum_i a x / (1 + x),   x = (g' - g_ij) e

with e = exp(s_ij - lse_i) and a = dO_i (v_j - O_i). g is the hard gate of the pair if the query
chose m, g' the one if the key chose n, and g_ij the present one. Both are exact to first order in
the loss: the change of the output if only that token chose otherwise, times the gradient of the
output. They are bounded; the gradient of the mixture at a one-hot point is not. They also include
gates of 0: a pair outside the support counts with what it would contribute, not with its present
weight of 0.

A query's own key, at distance 0, must be among the keys, so that every query always has a key.

A sample of the queries is enough: scaled by T / n, its expectation is the gradient of all queries.

Shapes: B batch, H query heads, Gr routing groups, h heads of a group, n sampled queries, S keys,
D head dim, R regimes.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mosar.core.bias import LabelBias
from mosar.core.hard_domain import key_classes
from mosar.core.inputs import without_autocast
from mosar.core.layout import Layout
from mosar.core.regimes import pair_gates, pair_geometry, support_reach

# exp of these (2^80, 2^-98) leaves room in float32 for a sum over any number of keys, and is not 0.
_HIGHEST, _LOWEST = 80 * math.log(2), -98 * math.log(2)
# The number of gates computed at a time.
_CHUNK = 1 << 22


def sample_queries(number: int | None, num_queries: int, *, step: int, layer: int) -> Tensor | None:
    """[number] queries in order, drawn from step and layer alone; None: all of them."""
    if number is None or number >= num_queries:
        return None
    generator = torch.Generator().manual_seed(step * 1_000_003 + layer)
    return torch.randperm(num_queries, generator=generator)[:number].sort().values


def choice_gradient(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    lse: Tensor,
    delta: Tensor,
    layout: Layout,
    bias: LabelBias,
    *,
    scale: float,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:
    """dpi_q [B, Gr, n, R] and dpi_k [B, Gr, S, R] of the given queries, in plain torch.

    q, dout [B, H, n, D]; lse and delta = dO·O [B, H, n]; k, v [B, K, S, D]. `layout` and `bias`
    belong to the same queries.
    """
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    if layout.key_valid is not None:
        # Padded slots may contain anything.
        k, v = (x.masked_fill(~layout.key_valid[:, None, :, None], 0) for x in (k, v))
    repeats = q.shape[1] // k.shape[1]
    k_BHSD, v_BHSD = (x.to(wide).repeat_interleave(repeats, dim=1) for x in (k, v))
    classes_k = key_classes(bias.key, bias.config, layout)
    num_regimes = bias.config.num_regimes
    dpi_k = torch.zeros(*bias.key.shape, num_regimes, dtype=wide, device=q.device)
    # If one key holds nearly all of the attention, the rest without it is only rounding error.
    least = math.sqrt(torch.finfo(wide).eps)
    dpi_q = []
    for some in torch.arange(q.shape[2], device=q.device).split(_queries_at_once(bias)):
        part = layout.of_queries(some)
        gate_q, gate_k, now = _gates(bias.query[:, :, some], classes_k, part, bias, wide)
        group = (bias.groups, q.shape[1] // bias.groups)
        score = torch.einsum("bhtd,bhsd->bhts", q[:, :, some].to(wide), k_BHSD) * scale
        if softcap is not None:
            score = softcap * torch.tanh(score / softcap)
        if bias.of_key is not None:
            score = score + bias.of_key[:, :, None]
        above = (score - lse[:, :, some, None].to(score.dtype)).clamp(_LOWEST, _HIGHEST).to(wide)
        e = above.exp().unflatten(1, group)
        dprob = torch.einsum("bhtd,bhsd->bhts", dout[:, :, some].to(wide), v_BHSD)
        rest = delta[:, :, some].to(wide)
        a = (dprob - rest[..., None]).unflatten(1, group)
        numerator = torch.einsum("bghts,bgtsr->bghtr", e * a, gate_q)
        denominator = torch.einsum("bghts,bgtsr->bghtr", e, gate_q)
        # If a query had no key, its output would be 0.
        empty = -rest.unflatten(1, group)[..., None]
        change = torch.where(denominator > 0, numerator / denominator.clamp_min(1e-300), empty)
        dpi_q.append(change.sum(dim=2))
        for regime in range(num_regimes):
            x = (gate_k[..., regime] - now)[:, :, None] * e
            dpi_k[..., regime] += (a * x / (1 + x).clamp_min(least)).sum(dim=(2, 3))
    return torch.cat(dpi_q, dim=2), dpi_k


class LearnChoices(torch.autograd.Function):
    """Returns the output unchanged; its gradient also reaches both routings."""

    @staticmethod
    def forward(ctx, out, lse, q, k, v, pi_q, pi_k, layout, bias, compute):
        ctx.save_for_backward(out, lse, q, k, v)
        ctx.layout, ctx.bias, ctx.compute = layout, bias, compute
        return out.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx, dout: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        out, lse, q, k, v = ctx.saved_tensors
        layout, bias = ctx.layout, ctx.bias
        queries, total = bias.learned.queries, q.shape[2]
        delta = (dout.to(lse.dtype) * out).sum(dim=-1)
        chosen = (q, dout, lse, delta, bias.query)
        if queries is not None:
            chosen = tuple(x.index_select(2, queries) for x in chosen)
            layout = layout.of_queries(queries)
        q, some_dout, lse, delta, labels_q = chosen
        with without_autocast(q):
            dpi_q, dpi_k = ctx.compute(
                q, k, v, some_dout, lse, delta, layout, replace(bias, query=labels_q)
            )
        if queries is not None:
            factor = total / len(queries)
            whole = dpi_q.new_zeros(*bias.query.shape, dpi_q.shape[-1])
            dpi_q, dpi_k = whole.index_copy_(2, queries, dpi_q * factor), dpi_k * factor
        learned = bias.learned
        dpi_q, dpi_k = dpi_q.to(learned.query.dtype), dpi_k.to(learned.key.dtype)
        return dout, *[None] * 4, dpi_q, dpi_k, *[None] * 3


def _queries_at_once(bias: LabelBias) -> int:
    gates = bias.key.numel() * bias.config.num_regimes * (bias.config.num_regimes + 1)
    return max(1, _CHUNK // max(gates, 1))


def _gates(
    labels_q: Tensor, classes_k: Tensor, layout: Layout, bias: LabelBias, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Hard gates for each choice of the queries, for each choice of the keys, and at present.

    The first two are [B, Gr, n, S, R], the last one [B, Gr, n, S].
    """
    config, num_regimes = bias.config, bias.config.num_regimes
    distances_BTS = layout.distances()
    gate = pair_gates(distances_BTS, pair_geometry(config, labels_q.device), config, dtype)
    inside = distances_BTS[..., None, None] <= support_reach(config, labels_q.device)
    exists = layout.exists()[..., None, None]
    gate_BTSRC = torch.where(inside & exists, gate, 0.0)
    if config.num_sinks:
        sink = exists.to(dtype).expand(*gate_BTSRC.shape[:-1], 1)
        gate_BTSRC = torch.cat([gate_BTSRC, sink], dim=-1)
    batch, groups, _ = labels_q.shape
    gate_BGTSRC = gate_BTSRC.expand(batch, *gate_BTSRC.shape[1:])[:, None].expand(
        -1, groups, *[-1] * 4
    )
    column = classes_k[:, :, None, :, None, None].expand(*gate_BGTSRC.shape[:-1], 1)
    gate_q = gate_BGTSRC.gather(-1, column)[..., 0]
    row = labels_q[:, :, :, None, None]
    now = gate_q.gather(-1, row.expand(*gate_q.shape[:-1], 1))[..., 0]
    rows = row[..., None].expand(*gate_BGTSRC.shape[:-2], 1, num_regimes)
    gate_k = gate_BGTSRC[..., :num_regimes].gather(-2, rows)[..., 0, :]
    # A sink does not choose.
    is_sink = (classes_k == num_regimes)[:, :, None, :, None]
    return gate_q, torch.where(is_sink, now[..., None], gate_k), now
