"""Attention on the CPU in C++: the operators `torch.ops.mosar.*`, their autograd, their callers.

The sources in csrc/ are compiled on first use for this CPU and this torch (see `build.py`). The
kernels compute in float32; bfloat16 and float16 inputs are converted to it, and outputs back. The
plan alone decides which pairs exist.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from mosar.core.bias import Bias, DistanceBias, LabelBias, Scores
from mosar.core.choice_gradient import choice_gradient as core_choice_gradient
from mosar.core.config import Gate, MoSARConfig
from mosar.core.hard_domain import class_reach, key_classes
from mosar.core.layout import Layout, is_traced, resolve_layout
from mosar.core.regimes import pair_geometry
from mosar.kernels.autograd import GEOMETRY, NONE, TABLE, WORTH, register_attention
from mosar.kernels.build import NativeBuildError, load_library
from mosar.kernels.plan import Plan, PlanInput, dense_plan_input, sparse_plan_input
from mosar.kernels.tables import cached_table, gate_table, has_table, routing_with_sinks

# As in csrc/attention.h: padding before and after each table row, so that vector loads stay inside.
_TABLE_PAD = 32
# Used in tables instead of -inf: exp2 of it is 0, and sums of it stay finite.
_NEVER = -1e30
# A plateau longer than any distance.
_BOUNDLESS = float(torch.iinfo(torch.int32).max)
# The arguments of calls that compute no gate.
_NO_GATE = Gate(0.0, 2.0)
# The inputs of `attend` for a table, slopes and biases of keys; as bits: 1, 2 and 4.
_BIAS_INPUTS = (14, 15, 16)
# Up to this many keys, sparse routing uses the dense pass with hard gates (measured in
# docs/log.md).
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
    """The plan of all existing pairs; the ordinary one is cached for all layers and steps."""
    if not layout.is_ordinary or is_traced():
        return build_native_plan(dense_plan_input(layout))
    queries, keys = layout.query_positions.shape[1], layout.key_positions.shape[1]
    return _ordinary_plan(queries, keys, layout.window)


@lru_cache(maxsize=8)
def _ordinary_plan(queries: int, keys: int, window: int | None) -> Plan:
    with torch.inference_mode(False), torch.device("cpu"):
        layout = resolve_layout(1, queries, keys, window=window)
        return build_native_plan(dense_plan_input(layout))


def attend(
    q: Tensor, k: Tensor, v: Tensor, layout: Layout, bias: Bias, scores: Scores
) -> tuple[Tensor, Tensor]:
    """See `mosar.core.bias`."""
    run = partial(_run, q, k, v, scale=scores.scale, softcap=scores.softcap or 0.0)
    if isinstance(bias, DistanceBias):
        table, slopes, keys = bias.log_gate, bias.slopes, bias.key
        if table is not None:
            table = _padded(table.float() * math.log2(math.e)).clamp_min(_NEVER)
        if slopes is not None:
            slopes = (slopes.float() * math.log2(math.e)).contiguous()
        kind = NONE if table is None and slopes is None and keys is None else TABLE
        return run(_dense_plan(layout), kind=kind, table=table, slopes=slopes, key_bias=keys)
    config, groups, tabled = bias.config, bias.groups, has_table(bias.config)
    gates, epsilon = _gates, config.epsilon
    if isinstance(bias, LabelBias):
        if bias.ends_at_reach:
            # The support of such a short context is nearly full, so one dense pass with gates that
            # end at the reach is faster; it knows no bias of keys.
            if bias.of_key is not None or not (tabled and _is_short(k.shape[2])):
                plan = build_native_plan(sparse_plan_input(bias.query, bias.key, config, layout))
                table = _log_gates(config) if config.exponent != 2 and tabled else None
                options = {"geometry": _geometry(config), "table": table, "key_bias": bias.of_key}
                return run(plan, kind=GEOMETRY, groups=groups, gate=config.gate, **options)
            gates, epsilon = _hard_gates, 0.0
        one_hot = _identity(config.num_regimes)
        pi_q, pi_k = one_hot[bias.query], one_hot[bias.key]
    else:
        pi_q, pi_k = bias.query, bias.key
    pi_q, pi_k = routing_with_sinks(pi_q, pi_k, config, layout)
    gate = config.gate
    if config.floor != 1:
        # Gates are in a table, and the barrier only says how small a worth can be.
        gate = gate._replace(barrier=config.depth)
    return run(
        _dense_plan(layout),
        kind=WORTH,
        groups=groups,
        pi_q=pi_q,
        pi_k=pi_k,
        table=gates(config) if tabled else None,
        geometry=None if tabled else _geometry(config),
        gate=gate,
        epsilon=epsilon,
    )


def attend_runs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    first: Tensor,
    end: Tensor,
    *,
    scale: float,
    softcap: float | None,
    key_bias: Tensor | None = None,
) -> Tensor:
    """Attention in which each query reads only some runs of keys, [B, H, T, D].

    first, end [B, K or H, T, C]: run c of a query is the keys [first, end) of the row; it is empty
    if they are equal. Runs of a query must not overlap. Neighbouring queries should have run c in
    about the same place, because a tile reads from its first key to its last. key_bias [B, H, S] is
    added to every pair of a key.
    """
    load_operators()
    batch, groups, queries, classes = first.shape
    if groups != k.shape[1]:
        k, v = (x.repeat_interleave(groups // x.shape[1], dim=1) for x in (k, v))
    rows, keys = batch * groups, k.shape[2]

    def row_of(values: Tensor) -> Tensor:
        return values.to(torch.int32).expand(rows, -1).contiguous()

    order_q, order_k = (row_of(torch.arange(count)) for count in (queries, keys))
    offsets = torch.zeros(classes + 1, dtype=torch.int32)
    offsets[-1] = keys
    source = PlanInput(
        labels_q=torch.zeros_like(order_q),
        classes_k=torch.zeros_like(order_k),
        places_q=order_q,
        places_k=order_k,
        floor_q=None,
        valid_k=None,
        reach=torch.zeros(1, classes, dtype=torch.int32),
        window=0,
    )
    plan = Plan(
        query_order=order_q,
        key_order=order_k,
        query_offsets=row_of(torch.tensor([0, queries])),
        key_offsets=row_of(offsets),
        run_lo=first.to(torch.int32).reshape(rows, queries, classes).contiguous(),
        run_hi=end.to(torch.int32).reshape(rows, queries, classes).contiguous(),
        source=source,
    )
    options = {"scale": scale, "softcap": softcap or 0.0, "groups": groups, "key_bias": key_bias}
    return _run(q, k, v, plan, kind=NONE if key_bias is None else TABLE, **options)[0]


def attend_alike(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    labels_q: Tensor,
    labels_k: Tensor,
    num_labels: int,
    *,
    scale: float,
    softcap: float | None,
) -> tuple[Tensor, int]:
    """Attention to the earlier keys of a query's own label, or to its own key if there are none.

    The queries belong to the last T keys; labels_q [B, H, T] and labels_k [B, H, S] < num_labels,
    and k, v have as many heads. Returns [B, H, T, D] and the number of pairs, own keys included.
    """
    load_operators()
    batch, heads, queries = labels_q.shape
    rows, keys = batch * heads, k.shape[2]
    places = torch.arange(keys, dtype=torch.int32).expand(rows, -1).contiguous()
    own = torch.eye(num_labels, dtype=torch.bool)
    plan = build_native_plan(
        PlanInput(
            labels_q=labels_q.reshape(rows, queries).to(torch.int32).contiguous(),
            classes_k=labels_k.reshape(rows, keys).to(torch.int32).contiguous(),
            places_q=places[:, keys - queries :].contiguous(),
            places_k=places,
            floor_q=None,
            valid_k=None,
            reach=torch.where(own, keys, -1).to(torch.int32),
            window=keys,
        )
    )
    label = plan.source.labels_q.long().gather(1, plan.query_order.long())
    lo, hi = (x.masked_fill(~own[label], 0) for x in (plan.run_lo, plan.run_hi))
    # A query's own key is the last one of its run.
    earlier = torch.where(hi - lo > 1, hi - 1, hi)
    plan = replace(plan, run_lo=lo, run_hi=earlier)
    options = {"scale": scale, "softcap": softcap or 0.0, "groups": heads}
    return _run(q, k, v, plan, kind=NONE, **options)[0], int((hi - lo).sum())


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
    """The same as `mosar.core.choice_gradient`, in one pass over the keys."""
    config, batch = bias.config, len(q)
    if not has_table(config):
        return core_choice_gradient(
            *(q, k, v, dout, lse, delta, layout, bias), scale=scale, softcap=softcap
        )

    def rows(x: Tensor | None) -> Tensor | None:
        return None if x is None else x.expand(batch, -1).contiguous()

    def as_float(x: Tensor) -> Tensor:
        x = x.float()
        return x if x.stride(-1) == 1 else x.contiguous()

    return torch.ops.mosar.choice_gradient(
        *(as_float(x) for x in (q, k, v, dout)),
        lse.float().contiguous(),
        delta.float().contiguous(),
        bias.query.contiguous(),
        key_classes(bias.key, config, layout).contiguous(),
        rows(layout.query_positions),
        rows(layout.key_positions),
        rows(layout.query_segments),
        rows(layout.key_segments),
        rows(layout.key_valid),
        None if bias.of_key is None else bias.of_key.double().contiguous(),
        _gates_by_distance(config),
        torch.iinfo(torch.int32).max if layout.window is None else layout.window,
        scale,
        softcap or 0.0,
    )


@cached_table
def _gates_by_distance(config: MoSARConfig) -> Tensor:
    """Hard gates, [length, R, C]: all gates of one distance are next to each other."""
    gate_RCd = gate_table(config)
    beyond = torch.arange(gate_RCd.shape[2]) > class_reach(config)[..., None]
    return gate_RCd.masked_fill(beyond, 0.0).permute(2, 0, 1).contiguous()


def _is_short(num_keys: int) -> bool:
    """Whether a length is short; False for a symbolic length, so that no graph depends on it."""
    if not torch.compiler.is_compiling():
        return num_keys <= _FEW_KEYS
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(num_keys <= _FEW_KEYS)


def _run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: Plan,
    *,
    kind: int,
    scale: float,
    softcap: float,
    groups: int = 1,
    pi_q: Tensor | None = None,
    pi_k: Tensor | None = None,
    geometry: Tensor | None = None,
    table: Tensor | None = None,
    slopes: Tensor | None = None,
    key_bias: Tensor | None = None,
    gate: Gate = _NO_GATE,
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
        None if key_bias is None else key_bias.double().contiguous(),
        groups,
        kind,
        scale,
        softcap,
        *gate,
        epsilon,
    )
    trains = torch.is_grad_enabled() and any(
        x is not None and x.requires_grad for x in (q, k, v, pi_q, pi_k, table, slopes, key_bias)
    )
    if trains or is_traced():
        out, lse, _ = torch.ops.mosar.attend(*arguments)
    else:
        # Call the kernel directly: the autograd layer alone takes as long as a hundred tokens.
        with torch._C._AutoDispatchBelowAutograd():
            out, lse, _ = torch.ops.mosar.attend(*arguments)
    return out.to(q.dtype), lse


@cached_table
def _identity(num_regimes: int) -> Tensor:
    return torch.eye(num_regimes)


@cached_table
def _geometry(config: MoSARConfig) -> Tensor:
    """(plateau, 1 / transition) per (label, class), [R, C, 2] float64.

    Pairs without a limit are all plateau; a step (transition 0) falls after its last integer
    distance.
    """
    pairs = pair_geometry(config)
    plateau = torch.where(pairs.transition == 0, pairs.plateau.floor(), pairs.plateau)
    # The kernels multiply by it in float32, where 1e30 acts like infinity.
    inverse = 1 / pairs.transition.clamp_min(1e-30)
    table = torch.stack([plateau.clamp_max(_BOUNDLESS), inverse], dim=-1)
    boundless = torch.tensor([_BOUNDLESS, 0.0], dtype=table.dtype)
    table[-1, -1] = boundless
    if config.num_sinks:
        table = torch.cat([table, boundless.expand(config.num_regimes, 1, 2)], dim=1)
    return table.contiguous()


@cached_table
def _gates(config: MoSARConfig) -> Tensor:
    """Gates by distance per (regime, column), padded, [R * C, length]; constant past the end."""
    return _padded(gate_table(config).flatten(0, 1))


@cached_table
def _hard_gates(config: MoSARConfig) -> Tensor:
    """The gates with 0 beyond the reach; a pair of worth 0 does not exist."""
    gates = _gates(config)
    distances = torch.arange(gates.shape[1]) - _TABLE_PAD
    return gates.masked_fill(distances > class_reach(config).reshape(-1, 1), 0.0)


@cached_table
def _log_gates(config: MoSARConfig) -> Tensor:
    """log2 of the gates per (label, class), for exponents other than 2."""
    return _gates(config).double().log2().clamp_min(_NEVER).float()


def _padded(rows: Tensor) -> Tensor:
    front = rows[:, :1].expand(-1, _TABLE_PAD)
    back = rows[:, -1:].expand(-1, _TABLE_PAD)
    return torch.cat([front, rows, back], dim=1).contiguous()


def _fake_choice_gradient(q, k, v, dout, lse, delta, labels_q, classes_k, *inputs):
    regimes = inputs[-4].shape[1]
    return tuple(lse.new_empty((*labels.shape, regimes)) for labels in (labels_q, classes_k))


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


def _constant_in_graphs(function: Any) -> Any:
    """A function that torch.compile calls without tracing it.

    Like torch.compiler.assume_constant_result, but without the import of torch._dynamo, which takes
    as long as that of torch itself.
    """
    function._dynamo_marked_constant = True
    return function


@_constant_in_graphs
def native_obstacle() -> str | None:
    """Why the native kernels are not available on this machine, or None; it warns once."""
    return _native_obstacle()


@lru_cache(maxsize=1)
def _native_obstacle() -> str | None:
    try:
        load_operators()
    except (NativeBuildError, OSError) as error:
        warnings.warn(f"mosar uses only torch operators, which is slower: {error}", stacklevel=2)
        return str(error)
    return None


@_constant_in_graphs
def load_operators() -> None:
    """Builds and loads the library once per process, and registers shapes and gradients."""
    _load_operators()


@lru_cache(maxsize=1)
def _load_operators() -> None:
    torch.ops.load_library(str(load_library()))
    torch.library.register_fake("mosar::plan")(_fake_plan)
    torch.library.register_fake("mosar::choice_gradient")(_fake_choice_gradient)
    register_attention("attend", impl="native", bias_inputs=_BIAS_INPUTS)
