"""Attention on the GPU: the functions that `mosar.attention` calls."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from mosar.core.bias import Bias, DistanceBias, LabelBias, Scores
from mosar.core.config import Gate
from mosar.core.layout import Layout
from mosar.kernels.autograd import GEOMETRY, NONE, TABLE, WORTH
from mosar.kernels.tables import routing_with_sinks
from mosar.kernels.triton import ops
from mosar.kernels.triton.launches import LOG2E
from mosar.kernels.triton.plan import (
    DevicePlan,
    dense_plan,
    gates,
    level_until,
    plateaus,
    sparse_plan,
)

# The arguments of calls that compute no gate.
_NO_GATE = Gate(0.0, 2.0)


def attend(
    q: Tensor, k: Tensor, v: Tensor, layout: Layout, bias: Bias, scores: Scores
) -> tuple[Tensor, Tensor]:
    """See `mosar.core.bias`; no gradient reaches log_gate or slopes.

    Top-1 routing uses the same sorted plan as sparse routing, but with unlimited runs. No gates are
    mixed, and no gate is evaluated on a plateau.
    """
    run = partial(_run, q, k, v, scale=scores.scale, softcap=scores.softcap or 0.0)
    if isinstance(bias, DistanceBias):
        table, slopes, level = bias.log_gate, bias.slopes, None
        if table is not None:
            table = (table.detach().float() * LOG2E).contiguous()
            level = level_until(table)
        if slopes is not None:
            slopes = (slopes.detach().float() * LOG2E).contiguous()
        kind = NONE if table is None and slopes is None else TABLE
        return run(
            dense_plan(layout),
            kind=kind,
            table=table,
            level_until=level,
            slopes=slopes,
            key_bias=_without_padding(bias.key, layout),
        )
    config = bias.config
    whole, falls = plateaus(config, q.device)
    routed = {"groups": bias.groups, "gate": config.gate}
    if isinstance(bias, LabelBias) and not bias.ends_at_reach and config.floor != 1:
        # The kernel computes only gates whose floor is e^-B; a table holds any.
        bias = bias.mixture(torch.float32)
    if isinstance(bias, LabelBias):
        plan = sparse_plan(bias.query, bias.key, config, layout, everywhere=not bias.ends_at_reach)
        key_bias = _without_padding(bias.of_key, layout)
        return run(plan, kind=GEOMETRY, plateaus=whole, falls=falls, key_bias=key_bias, **routed)
    pi_q, pi_k = routing_with_sinks(bias.query, bias.key, config, layout)
    table, level = gates(config, q.device)
    return run(
        dense_plan(layout),
        kind=WORTH,
        pi_q=pi_q,
        pi_k=pi_k,
        plateaus=None if table is not None else whole,
        falls=None if table is not None else falls,
        table=table,
        level_until=level,
        epsilon=config.epsilon,
        **routed,
    )


def _without_padding(key_bias: Tensor | None, layout: Layout) -> Tensor | None:
    """In float64, and 0 for padding, which may hold anything."""
    if key_bias is None:
        return None
    key_bias = key_bias.double()
    if layout.key_valid is not None:
        key_bias = key_bias.masked_fill(~layout.key_valid[:, None], 0)
    return key_bias.contiguous()


def _run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: DevicePlan,
    *,
    kind: int,
    scale: float,
    softcap: float,
    groups: int = 1,
    pi_q: Tensor | None = None,
    pi_k: Tensor | None = None,
    plateaus: Tensor | None = None,
    falls: Tensor | None = None,
    table: Tensor | None = None,
    level_until: Tensor | None = None,
    slopes: Tensor | None = None,
    key_bias: Tensor | None = None,
    gate: Gate = _NO_GATE,
    epsilon: float = 0.0,
) -> tuple[Tensor, Tensor]:
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    out, lse, _ = ops.attend(
        *(q, k, v, pi_q, pi_k, *plan),
        *(plateaus, falls, table, level_until, slopes, key_bias),
        *(groups, kind, scale, softcap, *gate, epsilon),
    )  # pyright: ignore[reportCallIssue]
    return out, lse
