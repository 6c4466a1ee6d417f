"""The support Omega of sparse routing, from labels and distances alone, without any q·k.

    Omega = {(i, j) that exist: i - j <= delta_mn or (m, n) = (G, G) or j is a sink}

The mask takes T x S memory. The counts do not: sort the keys of each regime by position; then the
keys that a query may read are one run of them, found by binary search.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mosar.core.config import MoSARConfig
from mosar.core.layout import Layout, can_check_values, resolve_layout
from mosar.core.outputs import HardDomain
from mosar.core.regimes import support_reach


def build_hard_domain(
    labels_q: Tensor,
    labels_k: Tensor,
    config: MoSARConfig,
    *,
    materialize: bool = True,
    **placement: Any,
) -> HardDomain:
    """The support of labels_q [B, T] and labels_k [B, S] (with groups [B, Gr, T], [B, Gr, S]).

    With `materialize=False` only counts and density are computed, in O(n log n). placement:
    window, positions, key_valid and segment_ids as `resolve_layout` takes them.
    """
    if not isinstance(config, MoSARConfig):
        raise ValueError(f"config must be a MoSARConfig, got {type(config).__name__}")
    _check_labels("labels_q", labels_q, config)
    _check_labels("labels_k", labels_k, config)
    if labels_q.shape[:-1] != labels_k.shape[:-1]:
        raise ValueError(
            "labels_q and labels_k must agree in batch and groups, "
            f"got {list(labels_q.shape)} and {list(labels_k.shape)}"
        )
    if labels_q.device.type == "meta":
        raise ValueError("labels_q must have values to count, got a tensor on the meta device")
    if labels_q.device != labels_k.device:
        raise ValueError(
            "labels_q and labels_k must be on one device, "
            f"got {labels_q.device} and {labels_k.device}"
        )
    lengths = labels_q.shape[-1], labels_k.shape[-1]
    layout = resolve_layout(len(labels_q), *lengths, device=labels_q.device, **placement)
    mask = support_mask(labels_q, labels_k, config, layout) if materialize else None
    zeros_q, zeros_k = torch.zeros_like(labels_q), torch.zeros_like(labels_k)
    everything = torch.full((1, 1), torch.inf, dtype=torch.float64)
    return HardDomain(
        mask=mask,
        row_counts=count_pairs(
            labels_q, key_classes(labels_k, config, layout), class_reach(config), layout
        ),
        row_causal_counts=count_pairs(zeros_q, zeros_k, everything, layout),
    )


def key_classes(labels_k: Tensor, config: MoSARConfig, layout: Layout) -> Tensor:
    """The labels of keys, with sinks as one more class of index R; shape as labels_k."""
    if not config.num_sinks:
        return labels_k
    sinks_BS = layout.sinks(config.num_sinks)
    if labels_k.dim() == 3:
        sinks_BS = sinks_BS[:, None]
    return labels_k.masked_fill(sinks_BS, config.num_regimes)


def class_reach(config: MoSARConfig, device: torch.device | None = None) -> Tensor:
    """Reach per (query regime, key class), [R, R] or [R, R + 1] with sinks; inf where boundless."""
    reach_RR = support_reach(config, device)
    if not config.num_sinks:
        return reach_RR
    sink_R1 = reach_RR.new_full((config.num_regimes, 1), torch.inf)
    return torch.cat([reach_RR, sink_R1], dim=1)


def support_mask(labels_q: Tensor, labels_k: Tensor, config: MoSARConfig, layout: Layout) -> Tensor:
    """Omega as a bool tensor [B, T, S] or [B, Gr, T, S]."""
    reach = class_reach(config).to(labels_q.device)
    classes_k = key_classes(labels_k, config, layout)
    reach_BTS = reach[labels_q[..., :, None].long(), classes_k[..., None, :].long()]
    distances_BTS, exists_BTS = layout.distances(), layout.exists()
    if labels_q.dim() == 3:
        distances_BTS, exists_BTS = distances_BTS[:, None], exists_BTS[:, None]
    return exists_BTS & (distances_BTS <= reach_BTS)


def count_pairs(labels_q: Tensor, classes_k: Tensor, reach: Tensor, layout: Layout) -> Tensor:
    """The number of existing pairs within reach[label, class] for each row (and group), int64."""
    groups = labels_q.shape[1] if labels_q.dim() == 3 else 1
    leading, num_queries = labels_q.shape[:-1], labels_q.shape[-1]
    rows = leading.numel()
    num_keys = classes_k.shape[-1]

    def per_row(tensor: Tensor | None, length: int) -> Tensor | None:
        if tensor is None:
            return None
        tensor = tensor.expand(labels_q.shape[0], length)
        return tensor.repeat_interleave(groups, dim=0)

    query_positions = _present(per_row(layout.query_positions, num_queries))
    key_positions = _present(per_row(layout.key_positions, num_keys))
    query_segments = per_row(layout.query_segments, num_queries)
    key_segments = per_row(layout.key_segments, num_keys)
    key_valid = per_row(layout.key_valid, num_keys)
    labels_q, classes_k = labels_q.reshape(rows, -1), classes_k.reshape(rows, -1)

    if key_valid is not None:
        key_positions = key_positions.masked_fill(~key_valid, 0)
    # One number sorts by lane (row and segment) first, and by position inside it.
    span = 1 + max(int(t.max()) if t.numel() else 0 for t in (query_positions, key_positions))
    device = labels_q.device
    lane_q = torch.arange(rows, device=device)[:, None].expand(rows, num_queries)
    lane_k = torch.arange(rows, device=device)[:, None].expand(rows, num_keys)
    if query_segments is not None and key_segments is not None:
        names, rank = torch.unique(
            torch.cat([query_segments, key_segments], dim=1), return_inverse=True
        )
        lane_q = lane_q * len(names) + rank[:, :num_queries]
        lane_k = lane_k * len(names) + rank[:, num_queries:]
    place_q, place_k = lane_q * span + query_positions, lane_k * span + key_positions

    counts = torch.zeros(rows, dtype=torch.int64, device=device)
    row_of_q = torch.arange(rows, device=device)[:, None].expand(rows, num_queries)
    for n in range(reach.shape[1]):
        chosen_k = classes_k == n
        if key_valid is not None:
            chosen_k = chosen_k & key_valid
        places_k = place_k[chosen_k].sort().values
        for m in range(reach.shape[0]):
            chosen_q = labels_q == m
            limit = min(float(reach[m, n]), span, span if layout.window is None else layout.window)
            first = (query_positions[chosen_q] - int(limit)).clamp_min(0)
            first = first + lane_q[chosen_q] * span
            found = torch.searchsorted(places_k, place_q[chosen_q], right=True)
            found = found - torch.searchsorted(places_k, first)
            counts.index_add_(0, row_of_q[chosen_q], found)
    return counts.reshape(leading)


def _present(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor


def _check_labels(name: str, labels: Tensor, config: MoSARConfig) -> None:
    if not isinstance(labels, Tensor):
        raise ValueError(f"{name} must be a tensor, got {type(labels).__name__}")
    if labels.dim() not in (2, 3):
        raise ValueError(f"{name} must be [B, length] or [B, Gr, length], got {list(labels.shape)}")
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise ValueError(f"{name} must hold integer regime labels, got {labels.dtype}")
    if labels.numel() and can_check_values(labels):
        low, high = int(labels.min()), int(labels.max())
        if low < 0 or high >= config.num_regimes:
            raise ValueError(
                f"{name} must lie in 0..{config.num_regimes - 1}, got values {low}..{high}"
            )
