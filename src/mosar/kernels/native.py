"""Attention on the CPU in C++: the operators `torch.ops.mosar.*`, their autograd, their callers.

The sources in csrc/ are compiled on first use for this CPU and this torch (see `build.py`). All
arithmetic is float32; bfloat16 and float16 inputs are widened on the way in and narrowed on the way
out. Everything that decides which pairs exist is in the plan.
"""

from __future__ import annotations

import math
import warnings
from functools import lru_cache

import torch
from torch import Tensor

from mosar.core.config import MoSARConfig
from mosar.core.hard_domain import class_reach
from mosar.core.layout import Layout, is_traced, resolve_layout
from mosar.core.regimes import pair_geometry
from mosar.kernels.autograd import GEOMETRY, NONE, TABLE, WORTH, register_attention
from mosar.kernels.build import NativeBuildError, load_library
from mosar.kernels.plan import Plan, PlanInput, dense_plan_input, sparse_plan_input
from mosar.kernels.tables import cached_table, gate_table, has_table, routing_with_sinks

# As in csrc/attention.h: entries before and after each table row, so that vector loads stay inside.
_TABLE_PAD = 32
# Stands for -inf in tables: exp2 of it is 0, and sums of it stay finite.
_NEVER = -1e30
# A plateau that no distance leaves.
_BOUNDLESS = float(torch.iinfo(torch.int32).max)
# Up to this many keys sparse routing takes the dense pass with hard gates (docs/log.md has the
# measurement).
_FEW_KEYS = 384


def build_native_plan(plan_input: PlanInput) -> Plan:
    """The plan by counting sort and one sweep per regime pair; equal to `plan.build_plan`."""
    load_operators()
    given = plan_input
    orders_and_runs = torch.ops.mosar.plan(
        given.labels_q,
        given.classes_k,
        given.places_q,
        given.places_k,
        given.floor_q,
        given.valid_k,
        given.reach,
    )
    return Plan(*orders_and_runs, source=given)


def _dense_plan(layout: Layout) -> Plan:
    """The plan of all existing pairs; the ordinary one is the same for every layer and step."""
    if not layout.is_ordinary or is_traced():
        return build_native_plan(dense_plan_input(layout))
    queries, keys = layout.query_positions.shape[1], layout.key_positions.shape[1]
    return _ordinary_plan(queries, keys, layout.window)


@lru_cache(maxsize=8)
def _ordinary_plan(queries: int, keys: int, window: int | None) -> Plan:
    with torch.inference_mode(False), torch.device("cpu"):
        layout = resolve_layout(1, queries, keys, window=window)
        return build_native_plan(dense_plan_input(layout))


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
    if has_table(config) and _is_short(labels_k.shape[-1]):
        # So short a context is nearly full: one dense pass whose gates end at the reach is quicker.
        one_hot = _identity(config.num_regimes)
        pi_q, pi_k = one_hot[labels_q], one_hot[labels_k]
        return _worth_attention(q, k, v, pi_q, pi_k, config, layout, scale, softcap, hard=True)
    plan = build_native_plan(sparse_plan_input(labels_q, labels_k, config, layout))
    groups = labels_q.shape[1] if labels_q.dim() == 3 else 1
    return _attend(
        q,
        k,
        v,
        plan,
        bias=GEOMETRY,
        groups=groups,
        geometry=_geometry(config),
        table=_log_gates(config) if config.exponent != 2 and has_table(config) else None,
        barrier=config.barrier,
        exponent=config.exponent,
        scale=scale,
        softcap=softcap,
    )


def _is_short(num_keys: int) -> bool:
    """Not of a length that torch.compile or torch.export leaves open: no graph is bound by it."""
    if not torch.compiler.is_compiling():
        return num_keys <= _FEW_KEYS
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(num_keys <= _FEW_KEYS)


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
    """All existing pairs with the mixture of gates; one-hot routing gives top-1. With gradients."""
    return _worth_attention(q, k, v, pi_q, pi_k, config, layout, scale, softcap, hard=False)


def _worth_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pi_q: Tensor,
    pi_k: Tensor,
    config: MoSARConfig,
    layout: Layout,
    scale: float | None,
    softcap: float | None,
    hard: bool,
) -> tuple[Tensor, Tensor]:
    pi_q, pi_k = routing_with_sinks(pi_q, pi_k, config, layout)
    return _attend(
        q,
        k,
        v,
        _dense_plan(layout),
        bias=WORTH,
        groups=pi_q.shape[1],
        pi_q=pi_q,
        pi_k=pi_k,
        table=(_hard_gates if hard else _gates)(config) if has_table(config) else None,
        geometry=None if has_table(config) else _geometry(config),
        barrier=config.barrier,
        exponent=config.exponent,
        epsilon=0.0 if hard else config.epsilon,
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
    table = None
    if log_gate is not None:
        table = _padded(log_gate.detach().float() * math.log2(math.e)).clamp_min(_NEVER)
    if slopes is not None:
        slopes = (slopes.detach().float() * math.log2(math.e)).contiguous()
    return _attend(
        q,
        k,
        v,
        _dense_plan(layout),
        bias=NONE if table is None and slopes is None else TABLE,
        groups=1,
        table=table,
        slopes=slopes,
        scale=scale,
        softcap=softcap,
    )


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: Plan,
    *,
    bias: int,
    groups: int,
    scale: float | None,
    softcap: float | None,
    pi_q: Tensor | None = None,
    pi_k: Tensor | None = None,
    geometry: Tensor | None = None,
    table: Tensor | None = None,
    slopes: Tensor | None = None,
    barrier: float = 0.0,
    exponent: float = 2.0,
    epsilon: float = 0.0,
) -> tuple[Tensor, Tensor]:
    def as_float(x: Tensor) -> Tensor:
        x = x.float()
        return x if x.stride(-1) == 1 else x.contiguous()

    arguments = (
        as_float(q),
        as_float(k),
        as_float(v),
        pi_q,
        pi_k,
        plan.query_places,
        plan.key_places,
        plan.query_order,
        plan.key_order,
        plan.query_offsets,
        plan.key_offsets,
        plan.run_lo,
        plan.run_hi,
        geometry,
        table,
        slopes,
        groups,
        bias,
        1 / math.sqrt(q.shape[-1]) if scale is None else float(scale),
        0.0 if softcap is None else float(softcap),
        barrier,
        exponent,
        epsilon,
    )
    trains = torch.is_grad_enabled() and any(
        x is not None and x.requires_grad for x in (q, k, v, pi_q, pi_k)
    )
    if trains or is_traced():
        out, lse, _ = torch.ops.mosar.attend(*arguments)
    else:
        # Straight to the kernel: the autograd layer alone takes as long as a hundred tokens.
        with torch._C._AutoDispatchBelowAutograd():
            out, lse, _ = torch.ops.mosar.attend(*arguments)
    return out.to(q.dtype), lse


@cached_table
def _identity(num_regimes: int) -> Tensor:
    return torch.eye(num_regimes)


@cached_table
def _geometry(config: MoSARConfig) -> Tensor:
    """(plateau, 1 / transition) per (label, class), [R, C, 2] float64.

    Boundless pairs are all plateau; a step (transition 0) falls after its last whole distance.
    """
    pairs = pair_geometry(config)
    plateau = torch.where(pairs.transition == 0, pairs.plateau.floor(), pairs.plateau)
    # The kernels multiply by it in float32, where 1e30 is as good as infinite.
    inverse = 1 / pairs.transition.clamp_min(1e-30)
    table = torch.stack([plateau.clamp_max(_BOUNDLESS), inverse], dim=-1)
    boundless = torch.tensor([_BOUNDLESS, 0.0], dtype=table.dtype)
    table[-1, -1] = boundless
    if config.num_sinks:
        table = torch.cat([table, boundless.expand(config.num_regimes, 1, 2)], dim=1)
    return table.contiguous()


@cached_table
def _gates(config: MoSARConfig) -> Tensor:
    """Gates by distance per (regime, column), padded, [R * C, length]; constant past its end."""
    return _padded(gate_table(config).flatten(0, 1))


@cached_table
def _hard_gates(config: MoSARConfig) -> Tensor:
    """The gates with 0 beyond the reach: worth 0 means that the pair does not exist."""
    gates = _gates(config)
    distances = torch.arange(gates.shape[1]) - _TABLE_PAD
    return gates.masked_fill(distances > class_reach(config).reshape(-1, 1), 0.0)


@cached_table
def _log_gates(config: MoSARConfig) -> Tensor:
    """log2 of the gates per (label, class), for exponents other than 2."""
    return _gates(config).double().log2().float()


def _padded(rows: Tensor) -> Tensor:
    front = rows[:, :1].expand(-1, _TABLE_PAD)
    back = rows[:, -1:].expand(-1, _TABLE_PAD)
    return torch.cat([front, rows, back], dim=1).contiguous()


def _fake_plan(labels_q, classes_k, pos_q, pos_k, floor_q, valid_k, reach):
    rows, queries, keys = *labels_q.shape, classes_k.shape[1]
    labels, classes = reach.shape
    shapes = [
        (rows, queries),
        (rows, keys),
        (rows, labels + 1),
        (rows, classes + 1),
        (rows, queries, classes),
        (rows, queries, classes),
    ]
    return tuple(labels_q.new_empty(shape, dtype=torch.int32) for shape in shapes)


# To torch.compile it is a constant: nothing in it is to be traced.
@torch.compiler.assume_constant_result
def native_obstacle() -> str | None:
    """Why the native kernels cannot be had on this machine, said once; None where they can."""
    return _native_obstacle()


@lru_cache(maxsize=1)
def _native_obstacle() -> str | None:
    try:
        load_operators()
    except (NativeBuildError, OSError) as error:
        warnings.warn(
            f"mosar runs on torch operators alone, which is slower: {error}", stacklevel=2
        )
        return str(error)
    return None


@torch.compiler.assume_constant_result
def load_operators() -> None:
    """Builds and loads the library once per process and registers what torch must know of it."""
    _load_operators()


@lru_cache(maxsize=1)
def _load_operators() -> None:
    torch.ops.load_library(str(load_library()))
    torch.library.register_fake("mosar::plan")(_fake_plan)
    register_attention("attend", impl="native")
