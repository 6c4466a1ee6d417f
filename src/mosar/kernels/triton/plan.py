"""The plan, made on the device without waiting for it.

Tokens at default positions are sorted by counting, in seven launches (`planning.py`). Given
positions and segments use torch's sorts and binary searches (`mosar.kernels.plan`).

The grid needs no count from the device: a plan of R labels has at most ceil(T / tile) + R - 1
tiles, and programs beyond the last tile end at once.

Shapes: P plan rows, T queries, S keys, R labels, C classes; all int32.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache, partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.library import triton_op, wrap_triton

from mosar.core.config import MoSARConfig
from mosar.core.hard_domain import class_reach, key_classes
from mosar.core.layout import Layout
from mosar.core.regimes import pair_geometry
from mosar.kernels.plan import (
    Plan,
    PlanInput,
    build_plan,
    dense_plan_input,
    sparse_plan_input,
    whole_reach,
)
from mosar.kernels.tables import cached_table, gate_table, has_table, on_device
from mosar.kernels.triton.launches import keep_whole, launching_on
from mosar.kernels.triton.planning import (
    count_kernel,
    place_kernel,
    readers_kernel,
    runs_kernel,
    scan_kernel,
)

_FAR = torch.iinfo(torch.int32).max
# Tokens per planning program, and the number of blocks whose counts one step sums.
BLOCK = 1024
_BLOCKS = 64


class DevicePlan(NamedTuple):
    """A plan as the kernels read it; `mosar.kernels.plan.Plan` explains its parts."""

    query_order: Tensor | None
    """[P, T]; None: as they come."""
    key_order: Tensor | None
    """[P, S]; None: as they come."""
    query_places: Tensor | None
    """[P, T], sorted; None: consecutive positions that end at the last key's."""
    key_places: Tensor | None
    """[P, S], sorted; None: 0, 1, 2, ..."""
    query_offsets: Tensor
    """[P, R + 1]."""
    key_offsets: Tensor
    """[P, C + 1]."""
    run_lo: Tensor
    """[P, T, C]."""
    run_hi: Tensor
    """[P, T, C]."""
    run_flat: Tensor | None
    """[P, T, C]: the first key on the query's plateau; None if no gate is evaluated."""


def sparse_plan(
    labels_q: Tensor,
    labels_k: Tensor,
    config: MoSARConfig,
    layout: Layout,
    *,
    everywhere: bool = False,
) -> DevicePlan:
    """The plan of top-1 labels: the pairs of the support, or all existing pairs."""
    plateau, _ = plateaus(config, labels_q.device)
    if layout.default_positions and layout.key_segments is None:
        classes = key_classes(labels_k, config, layout)
        if layout.key_valid is not None:
            valid = layout.key_valid[:, None] if classes.dim() == 3 else layout.key_valid
            classes = classes.masked_fill(~valid, plateau.shape[1])
        reach = on_device(
            labels_q.device, _boundless_reach if everywhere else whole_reach, config, layout.window
        )
        return DevicePlan(
            *torch.ops.mosar.triton_plan(
                labels_q.flatten(0, -2).contiguous(),
                classes.flatten(0, -2).contiguous(),
                reach,
                plateau,
                layout.key_valid is not None,
            )
        )
    given = sparse_plan_input(labels_q, labels_k, config, layout)
    if everywhere:
        given = replace(given, reach=torch.full_like(given.reach, given.window))
    return _device_plan(given, plateau)


@cached_table
def _boundless_reach(
    config: MoSARConfig, window: int | None, device: torch.device | None = None
) -> Tensor:
    """The reach of top-1 routing, [R, C]: all existing pairs."""
    reach = whole_reach(config, window, device=device)
    return torch.full_like(reach, _FAR if window is None else window)


@triton_op("mosar::triton_plan", mutates_args={})
def plan_by_counting(
    labels_q: Tensor, classes_k: Tensor, reach: Tensor, plateau: Tensor, padded: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The parts of a `DevicePlan` for labels [P, T] and classes [P, S] at default positions.

    With `padded`, class C means padding.
    """
    rows, queries = labels_q.shape
    keys = classes_k.shape[1]
    labels, classes = reach.shape
    new = partial(labels_q.new_empty, dtype=torch.int32)
    before = new((rows, keys + 1, classes))
    with launching_on(labels_q):
        sorted_q = _sort_by_counting(labels_q, labels, labels, keys - queries, None)
        sorted_k = _sort_by_counting(classes_k, classes + padded, classes, 0, before)
        run_lo, run_hi, run_flat = (new((rows, queries, classes)) for _ in range(3))
        num_blocks = -(-queries // BLOCK)
        wrap_triton(runs_kernel)[(rows * num_blocks,)](
            labels=labels_q,
            order=sorted_q[0],
            before=before,
            reach=reach,
            plateaus=plateau,
            run_lo=run_lo,
            run_hi=run_hi,
            run_flat=run_flat,
            num_queries=queries,
            num_keys=keys,
            shift=keys - queries,
            num_blocks=num_blocks,
            CLASSES=classes,
            BLOCK=BLOCK,
        )
    orders = (sorted_q[0], sorted_k[0], sorted_q[1], sorted_k[1], sorted_q[2], sorted_k[2])
    return *orders, run_lo, run_hi, run_flat


def _sort_by_counting(
    parts: Tensor, num_parts: int, listed: int, shift: int, before: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Order and positions [P, L] of tokens sorted by their part, and offsets [P, listed + 1]."""
    rows, length = parts.shape
    num_blocks = -(-length // BLOCK)
    new = partial(parts.new_empty, dtype=torch.int32)
    counts, starts = new((rows, num_blocks, num_parts)), new((rows, num_blocks, num_parts))
    order, places, offsets = new((rows, length)), new((rows, length)), new((rows, listed + 1))
    shape = {"num_blocks": num_blocks, "PARTS": num_parts}
    wrap_triton(count_kernel)[(rows * num_blocks,)](
        parts=parts, counts=counts, length=length, BLOCK=BLOCK, **shape
    )
    wrap_triton(scan_kernel)[(rows,)](
        counts=counts, starts=starts, offsets=offsets, LISTED=listed, BLOCK=_BLOCKS, **shape
    )
    wrap_triton(place_kernel)[(rows * num_blocks,)](
        parts=parts,
        starts=starts,
        order=order,
        places=places,
        before=before,
        length=length,
        shift=shift,
        LISTED=listed,
        BLOCK=BLOCK,
        **shape,
    )
    return order, places, offsets


def _fake_plan(labels_q, classes_k, reach, plateau, padded):
    (rows, queries), keys = labels_q.shape, classes_k.shape[1]
    labels, classes = reach.shape
    runs = (rows, queries, classes)
    shapes = [(rows, queries), (rows, keys)] * 2 + [(rows, labels + 1), (rows, classes + 1)]
    return tuple(labels_q.new_empty(shape, dtype=torch.int32) for shape in [*shapes, *[runs] * 3])


# Only shapes, because the interpreter cannot run a kernel on tensors without data.
plan_by_counting.register_fake(_fake_plan)
keep_whole("triton_plan")


def dense_plan(layout: Layout) -> DevicePlan:
    """The plan of all existing pairs; the ordinary one is cached for other layers and steps."""
    if not layout.is_ordinary:
        return _device_plan(dense_plan_input(layout), None)
    queries, keys = layout.query_positions.shape[1], layout.key_positions.shape[1]
    # A graph of launches gets its own copy, which must live as long as the graph.
    in_graph = torch.compiler.is_compiling() or _is_capturing()
    make = _ordinary_plan.__wrapped__ if in_graph else _ordinary_plan
    return make(queries, keys, layout.window, layout.query_positions.device)


def _is_capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


@lru_cache(maxsize=8)
def _ordinary_plan(queries: int, keys: int, window: int | None, device: torch.device) -> DevicePlan:
    with torch.inference_mode(False):
        last = torch.arange(keys - queries, keys, dtype=torch.int32, device=device)[None, :, None]
        first = torch.zeros_like(last) if window is None else (last - window).clamp_min(0)
        return DevicePlan(
            query_order=None,
            key_order=None,
            query_places=None,
            key_places=None,
            query_offsets=torch.arange(2, dtype=torch.int32, device=device)[None] * queries,
            key_offsets=torch.arange(2, dtype=torch.int32, device=device)[None] * keys,
            run_lo=first,
            run_hi=last + 1,
            run_flat=None,
        )


def _device_plan(given: PlanInput, plateau: Tensor | None) -> DevicePlan:
    plan = build_plan(given)
    query_order, key_order = plan.query_order.long(), plan.key_order.long()
    query_places = given.places_q.gather(1, query_order)
    key_places = given.places_k.gather(1, key_order.clamp_min(0))
    flat = None
    if plateau is not None:
        labels = given.labels_q.gather(1, query_order)
        flat = _first_on_plateau(plan, query_places, key_places, labels, plateau)
    return DevicePlan(
        query_order=plan.query_order,
        key_order=plan.key_order,
        query_places=query_places,
        key_places=key_places,
        query_offsets=plan.query_offsets,
        key_offsets=plan.key_offsets,
        run_lo=plan.run_lo,
        run_hi=plan.run_hi,
        run_flat=flat,
    )


def _first_on_plateau(
    plan: Plan, query_places: Tensor, key_places: Tensor, labels: Tensor, plateau: Tensor
) -> Tensor:
    """For each sorted query and class, the first key within the plateau, [P, T, C]."""
    classes = plateau.shape[1]
    span = torch.maximum(query_places.max(), key_places.max()).long() + 1
    # One number sorts by class first, as in the plan; padding comes last.
    sequence = _part_of(plan.key_offsets, key_places.shape[1]) * span + key_places
    sequence = torch.where(plan.key_order < 0, (classes + 1) * span, sequence)
    first = (query_places.long()[:, :, None] - plateau.long()[labels.long()]).clamp_min(0)
    first = first + torch.arange(classes, device=span.device) * span
    return torch.searchsorted(sequence, first.flatten(1)).view_as(first).int()


def _part_of(offsets: Tensor, length: int) -> Tensor:
    """The part (label or class) of each sorted token, [P, length]; the last part after the end."""
    places = torch.arange(length, dtype=offsets.dtype, device=offsets.device)
    places = places.expand(offsets.shape[0], -1).contiguous()
    return torch.searchsorted(offsets[:, 1:-1].contiguous(), places, right=True)


class ReaderRuns(NamedTuple):
    """The transposed plan: runs of the sorted queries for each sorted key and label; [P, S, R]."""

    first: Tensor
    """The first query that reads the key."""
    end: Tensor
    """One past the last query that may read the key."""
    flat_end: Tensor | None
    """One past the last query whose plateau contains the key."""


def reader_runs(
    query_offsets: Tensor,
    key_offsets: Tensor,
    run_lo: Tensor,
    run_hi: Tensor,
    run_flat: Tensor | None,
    num_keys: int,
) -> ReaderRuns:
    """Transposes the plan: which queries read a key. Call it only within an operator."""
    rows, queries, classes = run_lo.shape
    labels = query_offsets.shape[1] - 1
    shape = (rows, num_keys, labels)
    runs = ReaderRuns(
        first=run_lo.new_empty(shape),
        end=run_lo.new_empty(shape),
        flat_end=None if run_flat is None else run_lo.new_empty(shape),
    )
    num_blocks = -(-num_keys // BLOCK)
    wrap_triton(readers_kernel)[(rows * num_blocks,)](
        query_offsets=query_offsets,
        key_offsets=key_offsets,
        run_lo=run_lo,
        run_hi=run_hi,
        run_flat=run_flat,
        read_from=runs.first,
        read_to=runs.end,
        flat_to=runs.flat_end,
        num_queries=queries,
        num_keys=num_keys,
        num_blocks=num_blocks,
        # The number of steps of a binary search.
        steps=queries.bit_length(),
        LABELS=labels,
        CLASSES=classes,
        BLOCK=BLOCK,
    )
    return runs


@cached_table
def _plateaus(config: MoSARConfig, device: torch.device | None = None) -> Tensor:
    """The plateau of each (label, class) as an integer, [R, C] int32; the largest if unlimited."""
    plateau = pair_geometry(config, device).plateau.clamp_max(_FAR - 1)
    if config.num_sinks:
        plateau = torch.cat([plateau, plateau.new_zeros(config.num_regimes, 1)], dim=1)
    return torch.where(_boundless(config, device), _FAR, plateau.floor()).int()


@cached_table
def _falls(config: MoSARConfig, device: torch.device | None = None) -> Tensor:
    """The fraction of the plateau beyond its integer distance, and 1 / transition, [R, C, 2].

    A step (transition 0) falls half-way between its last distance and the next.
    """
    pairs = pair_geometry(config, device)
    step = pairs.transition == 0
    inverse = torch.where(step, 1e30, 1 / pairs.transition.clamp_min(1e-30))
    fraction = torch.where(step, 0.5, pairs.plateau - pairs.plateau.floor())
    falls = torch.stack([fraction, inverse], dim=-1)
    if config.num_sinks:
        falls = torch.cat([falls, falls.new_zeros(config.num_regimes, 1, 2)], dim=1)
    return falls.masked_fill(_boundless(config, device)[:, :, None], 0.0).float()


def _boundless(config: MoSARConfig, device: torch.device | None) -> Tensor:
    return class_reach(config, device) == math.inf


@cached_table
def _gates(config: MoSARConfig, device: torch.device | None = None) -> Tensor:
    return gate_table(config, device=device).flatten(0, 1)


@cached_table
def _gates_level_until(config: MoSARConfig, device: torch.device | None = None) -> Tensor:
    return level_until(_gates(config, device=device))


@cached_table
def _shortest_plateau(config: MoSARConfig, device: torch.device | None = None) -> Tensor:
    """The distance up to which every gate is 1, [1] int32."""
    return _plateaus(config, device=device).min()[None]


def level_until(table: Tensor) -> Tensor:
    """For each distance, the last one up to which no row of a table [.., length] changes, int32."""
    distances = torch.arange(table.shape[1] - 1, dtype=torch.int32, device=table.device)
    changes = (table[:, 1:] != table[:, :-1]).any(dim=0)
    last = F.pad(torch.where(changes, distances, _FAR), (0, 1), value=_FAR)
    return last.flip(0).cummin(dim=0).values.flip(0)


def plateaus(config: MoSARConfig, device: torch.device) -> tuple[Tensor, Tensor]:
    """(integer plateaus [R, C] int32, (fraction, 1 / transition) [R, C, 2])."""
    return on_device(device, _plateaus, config), on_device(device, _falls, config)


def gates(config: MoSARConfig, device: torch.device) -> tuple[Tensor | None, Tensor]:
    """(gates by distance [R * C, length], up to which distance they stay equal [length] int32).

    Without a table (`has_table`), the kernels compute gates from `plateaus`.
    """
    if not has_table(config):
        return None, on_device(device, _shortest_plateau, config)
    return on_device(device, _gates, config), on_device(device, _gates_level_until, config)
