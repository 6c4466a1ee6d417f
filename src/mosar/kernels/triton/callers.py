"""Attention on the GPU: what `mosar.attention` calls."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mosar.core.config import MoSARConfig
from mosar.core.layout import Layout
from mosar.kernels.tables import table_length
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
    plan = sparse_plan(labels_q, labels_k, config, layout)
    groups = labels_q.shape[1] if labels_q.dim() == 3 else 1
    return _attend_with_gates(q, k, v, plan, groups, config, scale, softcap)


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
    plan = sparse_plan(labels_q, labels_k, config, layout, everywhere=True)
    groups = labels_q.shape[1] if labels_q.dim() == 3 else 1
    return _attend_with_gates(q, k, v, plan, groups, config, scale, softcap)


def _attend_with_gates(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: DevicePlan,
    groups: int,
    config: MoSARConfig,
    scale: float | None,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:
    whole, falls = plateaus(config, q.device)
    return _attend(
        q,
        k,
        v,
        plan,
        bias=ops.GEOMETRY,
        groups=groups,
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
    if pi_q.dim() == 3:
        pi_q, pi_k = pi_q[:, None], pi_k[:, None]
    pi_q, pi_k = pi_q.float(), pi_k.float()
    if config.num_sinks:
        sinks = layout.sinks(config.num_sinks)[:, None, :, None].expand(*pi_k.shape[:-1], 1)
        pi_k = torch.cat([pi_k.masked_fill(sinks, 0), sinks.to(pi_k.dtype)], dim=-1)
    table, level = gates(config, table_length(config, layout), q.device)
    return _attend(
        q,
        k,
        v,
        dense_plan(layout),
        bias=ops.WORTH,
        groups=pi_q.shape[1],
        pi_q=pi_q.contiguous(),
        pi_k=pi_k.contiguous(),
        table=table.flatten(0, 1),
        level_until=level,
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
        bias=ops.NONE if log_gate is None and slopes is None else ops.TABLE,
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
    out, lse, _ = torch.ops.mosar.triton_attend(
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
