"""Attention on the GPU: what `mosar.attention` calls."""

from __future__ import annotations

import math

from torch import Tensor

from mosar.core.config import MoSARConfig
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


def sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    labels_q: Tensor,
    labels_k: Tensor,
    config: MoSARConfig,
    layout: Layout,
    *,
    scale: float | None,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:
    """Only the pairs of the support, labels [B, T] or [B, Gr, T]; output and log-sum-exp."""
    return _attend_with_gates(
        q, k, v, labels_q, labels_k, config, layout, scale, softcap, everywhere=False
    )


def top1_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    labels_q: Tensor,
    labels_k: Tensor,
    config: MoSARConfig,
    layout: Layout,
    *,
    scale: float | None,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:
    """All existing pairs with the gate of their labels, at its floor beyond the reach.

    Sorted as the support is, but with boundless runs: no gate is mixed, and none evaluated on a
    plateau.
    """
    return _attend_with_gates(
        q, k, v, labels_q, labels_k, config, layout, scale, softcap, everywhere=True
    )


def _attend_with_gates(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    labels_q: Tensor,
    labels_k: Tensor,
    config: MoSARConfig,
    layout: Layout,
    scale: float | None,
    softcap: float | None,
    everywhere: bool,
) -> tuple[Tensor, Tensor]:
    whole, falls = plateaus(config, q.device)
    return _attend(
        q,
        k,
        v,
        sparse_plan(labels_q, labels_k, config, layout, everywhere=everywhere),
        bias=GEOMETRY,
        groups=labels_q.shape[1] if labels_q.dim() == 3 else 1,
        plateaus=whole,
        falls=falls,
        barrier=config.barrier,
        exponent=config.exponent,
        scale=scale,
        softcap=softcap,
    )


def worth_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pi_q: Tensor,
    pi_k: Tensor,
    config: MoSARConfig,
    layout: Layout,
    *,
    scale: float | None,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:
    """All existing pairs with the mixture of gates, with gradients."""
    pi_q, pi_k = routing_with_sinks(pi_q, pi_k, config, layout)
    table, level = gates(config, q.device)
    whole, falls = plateaus(config, q.device)
    return _attend(
        q,
        k,
        v,
        dense_plan(layout),
        bias=WORTH,
        groups=pi_q.shape[1],
        pi_q=pi_q,
        pi_k=pi_k,
        plateaus=None if table is not None else whole,
        falls=None if table is not None else falls,
        table=table,
        level_until=level,
        barrier=config.barrier,
        exponent=config.exponent,
        epsilon=config.epsilon,
        scale=scale,
        softcap=softcap,
    )


def distance_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: Layout,
    *,
    log_gate: Tensor | None,
    slopes: Tensor | None,
    scale: float | None,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:
    """All existing pairs with a bias by distance; no gradient reaches log_gate or slopes."""
    level = None
    if log_gate is not None:
        log_gate = (log_gate.detach().float() * LOG2E).contiguous()
        level = level_until(log_gate)
    if slopes is not None:
        slopes = (slopes.detach().float() * LOG2E).contiguous()
    return _attend(
        q,
        k,
        v,
        dense_plan(layout),
        bias=NONE if log_gate is None and slopes is None else TABLE,
        groups=1,
        table=log_gate,
        level_until=level,
        slopes=slopes,
        scale=scale,
        softcap=softcap,
    )


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: DevicePlan,
    *,
    bias: int,
    groups: int,
    scale: float | None,
    softcap: float | None,
    pi_q: Tensor | None = None,
    pi_k: Tensor | None = None,
    plateaus: Tensor | None = None,
    falls: Tensor | None = None,
    table: Tensor | None = None,
    level_until: Tensor | None = None,
    slopes: Tensor | None = None,
    barrier: float = 0.0,
    exponent: float = 2.0,
    epsilon: float = 0.0,
) -> tuple[Tensor, Tensor]:
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    out, lse, _ = ops.attend(
        q,
        k,
        v,
        pi_q,
        pi_k,
        plan.query_order,
        plan.key_order,
        plan.query_places,
        plan.key_places,
        plan.query_offsets,
        plan.key_offsets,
        plan.run_lo,
        plan.run_hi,
        plan.run_flat,
        plateaus,
        falls,
        table,
        level_until,
        slopes,
        groups,
        bias,
        1 / math.sqrt(q.shape[-1]) if scale is None else float(scale),
        0.0 if softcap is None else float(softcap),
        barrier,
        exponent,
        epsilon,
    )
    return out, lse
