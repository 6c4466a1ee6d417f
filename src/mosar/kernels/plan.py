"""Sort by regime: a plan that says which keys each query reads, without any n x n tensor.

Keys are sorted by (class, position) and queries by (label, position), stably. Then the keys of one
class that a query may read are one run [lo, hi) of the sorted keys, and R runs per query are the
whole support. A tile of neighbouring queries of one label reads, for each class, the keys from its
first lo to its last hi.

A class is a regime; sinks are one more class. A plan of one label and one class is dense causal
attention. Padding is left out of the sort, segments are placed end to end, and a window shortens
every reach. So only the runs decide which pairs exist, and nothing downstream masks by position.

Shapes: P plan rows (1, B, or B x Gr), T queries, S keys, R labels, C classes; all int32.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from mosar.core.config import MoSARConfig
from mosar.core.hard_domain import class_reach, key_classes
from mosar.core.layout import Layout, can_check_values
from mosar.kernels.tables import cached_table, on_device

_FAR = torch.iinfo(torch.int32).max


@dataclass(frozen=True)
class Plan:
    """Sorted orders and the run of sorted keys that each query reads of each class."""

    query_order: Tensor
    """[P, T]: index in sorted order -> query."""
    key_order: Tensor
    """[P, S]: index in sorted order -> key; -1 after the valid keys."""
    query_offsets: Tensor
    """[P, R + 1]: where each label starts among the sorted queries."""
    key_offsets: Tensor
    """[P, C + 1]: where each class starts among the sorted keys."""
    run_lo: Tensor
    """[P, T, C], by sorted query: first key of the run."""
    run_hi: Tensor
    """[P, T, C]: one past the last key of the run; equal to run_lo if the run is empty."""
    source: PlanInput
    """The input that the plan was made from."""

    @property
    def query_places(self) -> Tensor:
        """[P, T]: positions, with segments placed end to end; differences are distances."""
        return self.source.places_q

    @property
    def key_places(self) -> Tensor:
        """[P, S]."""
        return self.source.places_k

    @property
    def row_pair_counts(self) -> Tensor:
        """The exact number of pairs per plan row, [P] int64."""
        return (self.run_hi - self.run_lo).sum(dim=(1, 2), dtype=torch.int64)

    @property
    def pair_count(self) -> int:
        """The exact number of pairs in all plan rows."""
        return int(self.row_pair_counts.sum())

    def padded_pair_count(self, tile: int) -> int:
        """The number of pairs evaluated if `tile` neighbouring queries of a label share runs."""
        if tile < 1:
            raise ValueError(f"tile must be >= 1, got {tile}")
        total = 0
        for row in range(self.query_offsets.shape[0]):
            offsets = self.query_offsets[row].tolist()
            for begin, end in pairwise(offsets):
                if begin == end:
                    continue
                first = torch.arange(begin, end, tile, device=self.run_lo.device)
                last = torch.clamp_max(first + tile, end) - 1
                widths = self.run_hi[row, last] - self.run_lo[row, first]
                total += int((widths.clamp_min(0) * (last - first + 1)[:, None]).sum())
        return total

    @property
    def density(self) -> float:
        """rho: pairs of the plan divided by all pairs that exist."""
        source = self.source
        everything = PlanInput(
            labels_q=torch.zeros_like(source.labels_q),
            classes_k=torch.zeros_like(source.classes_k),
            places_q=source.places_q,
            places_k=source.places_k,
            floor_q=source.floor_q,
            valid_k=source.valid_k,
            reach=torch.full_like(source.reach[:1, :1], source.window),
            window=source.window,
        )
        return self.pair_count / max(build_plan(everything).pair_count, 1)


@dataclass(frozen=True)
class PlanInput:
    """The input of every planner, as int32 on one device."""

    labels_q: Tensor
    """[P, T]."""
    classes_k: Tensor
    """[P, S]."""
    places_q: Tensor
    """[P, T]."""
    places_k: Tensor
    """[P, S]."""
    floor_q: Tensor | None
    """[P, T]: the start of the query's segment; None: 0."""
    valid_k: Tensor | None
    """[P, S] bool; None: every key."""
    reach: Tensor
    """[R, C]: the largest distance per (label, class)."""
    window: int
    """The largest distance of any pair."""


def sparse_plan_input(
    labels_q: Tensor, labels_k: Tensor, config: MoSARConfig, layout: Layout
) -> PlanInput:
    """The plan of sparse routing; labels [B, T] and [B, S], or [B, Gr, T] and [B, Gr, S]."""
    classes_k = key_classes(labels_k, config, layout)
    groups = labels_q.shape[1] if labels_q.dim() == 3 else 1
    return _plan_input(
        labels_q.reshape(-1, labels_q.shape[-1]),
        classes_k.reshape(-1, classes_k.shape[-1]),
        config,
        layout,
        groups,
    )


def dense_plan_input(layout: Layout) -> PlanInput:
    """The plan of all pairs that exist: one label, one class."""
    tensors = (layout.query_positions, layout.key_positions, layout.key_valid, layout.key_segments)
    rows = max(tensor.shape[0] for tensor in tensors if tensor is not None)
    queries, keys = layout.query_positions.shape[1], layout.key_positions.shape[1]
    device = layout.query_positions.device
    labels_q = torch.zeros(rows, queries, dtype=torch.int32, device=device)
    classes_k = torch.zeros(rows, keys, dtype=torch.int32, device=device)
    return _plan_input(labels_q, classes_k, None, layout, 1)


@cached_table
def whole_reach(
    config: MoSARConfig | None, window: int | None, device: torch.device | None = None
) -> Tensor:
    """The largest integer distance per (label, class), [R, C] int32; one entry without config."""
    if config is None:
        reach = torch.full((1, 1), torch.inf, device=device)
    else:
        reach = class_reach(config, device)
    limit = _FAR if window is None else min(window, _FAR)
    # float64 represents the limit exactly; float32 would round it up and overflow.
    return reach.double().floor().clamp_max(limit).to(torch.int32)


def _plan_input(
    labels_q: Tensor, classes_k: Tensor, config: MoSARConfig | None, layout: Layout, groups: int
) -> PlanInput:
    places_q, places_k, floor_q = _lay_out(layout)

    def rows(tensor: Tensor, dtype: torch.dtype) -> Tensor:
        tensor = tensor.expand(labels_q.shape[0] // groups, -1)
        if groups > 1:
            tensor = tensor.repeat_interleave(groups, dim=0)
        return tensor.to(dtype).contiguous()

    return PlanInput(
        labels_q=labels_q.to(torch.int32).contiguous(),
        classes_k=classes_k.to(torch.int32).contiguous(),
        places_q=rows(places_q, torch.int32),
        places_k=rows(places_k, torch.int32),
        floor_q=None if floor_q is None else rows(floor_q, torch.int32),
        valid_k=None if layout.key_valid is None else rows(layout.key_valid, torch.bool),
        reach=on_device(labels_q.device, whole_reach, config, layout.window),
        window=_FAR if layout.window is None else layout.window,
    )


def _lay_out(layout: Layout) -> tuple[Tensor, Tensor, Tensor | None]:
    """Positions with segments placed end to end, and the start of each query's segment."""
    places_q, places_k, floor_q = layout.query_positions, layout.key_positions, None
    if layout.key_segments is not None and layout.query_segments is not None:
        batch, num_keys = layout.key_segments.shape
        num_queries = layout.query_segments.shape[1]
        positions = torch.cat(
            [places_k.expand(batch, num_keys), places_q.expand(batch, num_queries)], dim=1
        )
        segments = torch.cat([layout.key_segments, layout.query_segments], dim=1)
        counted = torch.ones_like(positions, dtype=torch.bool)
        if layout.key_valid is not None:
            counted[:, :num_keys] = layout.key_valid
        # Ranks come from sorting, because torch.unique would have to wait for a GPU.
        ordered, order = segments.sort(dim=1, stable=True)
        rank = F.pad(ordered.diff(dim=1) != 0, (1, 0)).cumsum(dim=1)
        rank = torch.empty_like(rank).scatter_(1, order, rank)
        spread = segments.shape
        high = positions.masked_fill(~counted, -1)
        low = positions.masked_fill(~counted, _FAR)
        last = high.new_full(spread, -1).scatter_reduce(1, rank, high, "amax")
        first = low.new_full(spread, _FAR).scatter_reduce(1, rank, low, "amin")
        span = (last - first + 1).clamp_min(0)
        start = span.cumsum(dim=1) - span
        placed = positions - first.gather(1, rank) + start.gather(1, rank)
        placed = placed.masked_fill(~counted, 0)
        places_k, places_q = placed[:, :num_keys], placed[:, num_keys:]
        floor_q = start.gather(1, rank[:, num_keys:])
    elif layout.key_valid is not None:
        places_k = places_k.masked_fill(~layout.key_valid, 0)
    if floor_q is not None and can_check_values(places_q):
        highest = max(int(places_q.max()), int(places_k.max()))
        if highest >= _FAR:
            raise ValueError(
                f"the positions of all segments together must span less than 2^31 - 1, "
                f"got {highest}"
            )
    return places_q, places_k, floor_q


def build_plan(plan_input: PlanInput) -> Plan:
    """The plan with torch operators, on any device: two sorts and two binary searches per class."""
    labels_q, classes_k = plan_input.labels_q.long(), plan_input.classes_k.long()
    places_q, places_k = plan_input.places_q.long(), plan_input.places_k.long()
    num_labels, num_classes = plan_input.reach.shape
    if plan_input.valid_k is not None:
        classes_k = classes_k.masked_fill(~plan_input.valid_k, num_classes)
    # One number sorts by class (or label) first, and by position inside it.
    span = torch.maximum(places_q.max(), places_k.max()) + 1
    sorted_k, key_order = torch.sort(classes_k * span + places_k, dim=1, stable=True)
    sorted_q, query_order = torch.sort(labels_q * span + places_q, dim=1, stable=True)
    bounds_k = torch.arange(num_classes + 1, device=span.device) * span
    bounds_q = torch.arange(num_labels + 1, device=span.device) * span
    rows = labels_q.shape[0]
    key_offsets = torch.searchsorted(sorted_k, bounds_k.expand(rows, -1).contiguous())
    query_offsets = torch.searchsorted(sorted_q, bounds_q.expand(rows, -1).contiguous())

    place_PT = places_q.gather(1, query_order)
    label_PT = labels_q.gather(1, query_order)
    first_PTC = place_PT[:, :, None] - plan_input.reach.long()[label_PT]
    if plan_input.floor_q is None:
        first_PTC = first_PTC.clamp_min(0)
    else:
        floor_PT = plan_input.floor_q.long().gather(1, query_order)
        first_PTC = torch.maximum(first_PTC, floor_PT[:, :, None])
    class_start_C = bounds_k[:-1]
    shape = first_PTC.shape
    lo = torch.searchsorted(sorted_k, (first_PTC + class_start_C).reshape(rows, -1))
    here = (place_PT[:, :, None] + class_start_C).reshape(rows, -1)
    hi = torch.maximum(torch.searchsorted(sorted_k, here, right=True), lo)
    behind = torch.arange(key_order.shape[1], device=span.device) >= key_offsets[:, -1:]
    return Plan(
        query_order=query_order.int(),
        key_order=key_order.masked_fill(behind, -1).int(),
        query_offsets=query_offsets.int(),
        key_offsets=key_offsets.int(),
        run_lo=lo.reshape(shape).int(),
        run_hi=hi.reshape(shape).int(),
        source=plan_input,
    )
