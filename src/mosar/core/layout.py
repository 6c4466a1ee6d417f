"""Which pairs exist: positions, padding, segments and window, before any geometry.

A pair (i, j) exists iff key j is valid, both are in one segment, and 0 <= pos_i - pos_j <= window.
Positions are integers that do not decrease along the valid keys of each segment.

Shapes: B batch (1 if all rows are alike), T queries, S keys.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from numbers import Real

import torch
import torch.nn.functional as F
from torch import Tensor

_FAR = torch.iinfo(torch.int32).max
_INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)


@dataclass(frozen=True)
class Layout:
    """The positions of queries and keys, and which pairs exist, from the caller's arguments."""

    query_positions: Tensor
    """[B or 1, T] int64."""
    key_positions: Tensor
    """[B or 1, S] int64."""
    key_valid: Tensor | None
    """[B, S] bool; None if every key is valid."""
    query_segments: Tensor | None
    """[B, T]; None if each row is one segment."""
    key_segments: Tensor | None
    """[B, S]."""
    window: int | None
    """The largest distance of an existing pair."""
    default_positions: bool = False
    """Keys are at 0..S-1 and queries at the last T of them, so positions need no checks."""

    @property
    def is_ordinary(self) -> bool:
        """Whether every pair (i, j <= i) within the window exists; follows from the shapes."""
        return self.default_positions and self.key_valid is None and self.key_segments is None

    def distances(self) -> Tensor:
        """pos_i - pos_j, [B or 1, T, S] int64."""
        return self.query_positions[:, :, None] - self.key_positions[:, None, :]

    def exists(self) -> Tensor:
        """[B or 1, T, S] bool."""
        distances_BTS = self.distances()
        exists_BTS = distances_BTS >= 0
        if self.window is not None:
            exists_BTS = exists_BTS & (distances_BTS <= self.window)
        if self.key_valid is not None:
            exists_BTS = exists_BTS & self.key_valid[:, None, :]
        if self.query_segments is not None and self.key_segments is not None:
            same_BTS = self.query_segments[:, :, None] == self.key_segments[:, None, :]
            exists_BTS = exists_BTS & same_BTS
        return exists_BTS

    def of_queries(self, queries: Tensor) -> Layout:
        """The layout of some of the queries [n] and all keys."""
        segments = self.query_segments
        return replace(
            self,
            query_positions=self.query_positions[:, queries],
            query_segments=None if segments is None else segments[:, queries],
            default_positions=False,
        )

    def max_distance(self) -> int:
        """The largest distance of any existing pair, or -1 if no pair exists."""
        if self.is_ordinary:
            farthest = self.key_positions.shape[1] - 1
            return farthest if self.window is None else min(self.window, farthest)
        given = [self.query_positions, self.key_positions, self.key_valid, self.key_segments]
        batch = max(tensor.shape[0] for tensor in given if tensor is not None)
        place_BT = self.query_positions.expand(batch, -1)
        place_BS = self.key_positions.expand(batch, -1)
        if self.key_valid is not None:
            place_BS = place_BS.masked_fill(~self.key_valid, 0)
        span = int(torch.maximum(place_BT.max(), place_BS.max())) + 1
        reach = span if self.window is None else min(self.window, span)
        first_BT = (place_BT - reach).clamp_min(0)
        if self.key_segments is not None:
            # One number sorts by segment first, and by position inside it.
            lane_BS = span * torch.unique(self.key_segments, return_inverse=True)[1]
            lane_BT = lane_BS[:, lane_BS.shape[1] - place_BT.shape[1] :]
            place_BS = place_BS + lane_BS
            place_BT, first_BT = place_BT + lane_BT, first_BT + lane_BT
        far = 2**62
        if self.key_valid is not None:
            place_BS = place_BS.masked_fill(~self.key_valid, far)
        place_BS = F.pad(place_BS.sort(dim=1).values, (0, 1), value=far)
        # The farthest key that a query may see is the first one at or after the window's edge.
        found_BT = place_BS.gather(1, torch.searchsorted(place_BS, first_BT))
        return int(torch.where(found_BT <= place_BT, place_BT - found_BT, -1).max())

    def sinks(self, num_sinks: int) -> Tensor:
        """The first `num_sinks` valid keys of each row (of each segment), [B or 1, S] bool."""
        valid_BS = self.key_valid
        if valid_BS is None:
            valid_BS = torch.ones_like(self.key_positions, dtype=torch.bool)
        if self.key_segments is None:
            return valid_BS & (valid_BS.cumsum(dim=1) <= num_sinks)
        valid_BS = valid_BS.expand(self.key_segments.shape)
        # Sorted by segment, a key's rank within its segment is the number of valid keys before it
        # minus that number at the start of the segment.
        order_BS = torch.argsort(self.key_segments, dim=1, stable=True)
        segments_BS = self.key_segments.gather(1, order_BS)
        sorted_valid_BS = valid_BS.gather(1, order_BS)
        seen_BS = sorted_valid_BS.cumsum(dim=1) - sorted_valid_BS.long()
        starts_BS = torch.searchsorted(segments_BS, segments_BS)
        rank_BS = seen_BS - seen_BS.gather(1, starts_BS)
        sink_BS = sorted_valid_BS & (rank_BS < num_sinks)
        return torch.zeros_like(sink_BS).scatter(1, order_BS, sink_BS)


def resolve_layout(
    batch: int,
    num_queries: int,
    num_keys: int,
    *,
    window: float | None = None,
    query_positions: Tensor | None = None,
    key_positions: Tensor | None = None,
    key_valid: Tensor | None = None,
    segment_ids: Tensor | None = None,
    device: torch.device | str | None = None,
) -> Layout:
    """Checks shapes and values; by default keys are at 0..S-1, queries at the last T of them."""
    keys_shape = (batch, num_keys)
    default = key_positions is None and query_positions is None
    if key_positions is not None:
        key_positions = _integers("key_positions", key_positions, keys_shape, device)
    else:
        key_positions = torch.arange(num_keys, device=device)[None]
    needs_suffix = [
        name
        for name, missing in (
            ("query_positions", query_positions is None),
            ("segment_ids", segment_ids is not None),
        )
        if missing
    ]
    if needs_suffix and num_queries > num_keys:
        raise ValueError(
            f"the queries are the last T of the S keys, but T={num_queries} > S={num_keys}; "
            + (
                "give query_positions"
                if needs_suffix == ["query_positions"]
                else "segment_ids cannot place the queries"
            )
        )
    if query_positions is not None:
        queries_shape = (batch, num_queries)
        query_positions = _integers("query_positions", query_positions, queries_shape, device)
    else:
        query_positions = key_positions[:, num_keys - num_queries :]
    if key_valid is not None:
        _expect_tensor("key_valid", key_valid, keys_shape, device)
        if key_valid.dtype != torch.bool:
            raise ValueError(f"key_valid must be a bool tensor, got {key_valid.dtype}")
    query_segments = None
    if segment_ids is not None:
        segment_ids = _integers("segment_ids", segment_ids, keys_shape, device)
        query_segments = segment_ids[:, num_keys - num_queries :]
    layout = Layout(
        query_positions,
        key_positions,
        key_valid,
        query_segments,
        segment_ids,
        _window(window),
        default_positions=default,
    )
    if default:
        return layout
    _check_key_positions(layout)
    if num_queries and can_check_values(layout.query_positions):
        lowest = int(layout.query_positions.min())
        if lowest < 0:
            raise ValueError(f"query_positions must not be negative, got {lowest}")
        _check_highest("query_positions", int(layout.query_positions.max()))
    return layout


def can_check_values(tensor: Tensor) -> bool:
    """Whether reading the values is free: on the CPU, and not during tracing."""
    return tensor.device.type == "cpu" and not is_traced()


def is_traced() -> bool:
    """Whether tensors have no values that could be read or stored: in a graph, or fake tensors."""
    if torch.compiler.is_compiling():
        return True
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


def _check_key_positions(layout: Layout) -> None:
    key_positions = layout.key_positions
    if not can_check_values(key_positions) or not key_positions.shape[1]:
        return
    valid = layout.key_valid
    if layout.key_segments is not None:
        order = torch.argsort(layout.key_segments, dim=1, stable=True)
        key_positions = key_positions.expand(order.shape).gather(1, order)
        segments = layout.key_segments.gather(1, order)
        valid = None if valid is None else valid.gather(1, order)
    else:
        segments = torch.zeros_like(key_positions)
    if valid is not None:
        key_positions = key_positions.expand(valid.shape)
        segments = segments.expand(valid.shape)
    rows = range(key_positions.shape[0])
    for row in rows:
        chosen = slice(None) if valid is None else valid[row]
        positions, segment = key_positions[row][chosen], segments[row][chosen]
        if positions.numel() and int(positions.min()) < 0:
            raise ValueError(f"key_positions must not be negative, got {int(positions.min())}")
        if positions.numel():
            _check_highest("key_positions", int(positions.max()))
        falls = (positions.diff() < 0) & (segment.diff() == 0)
        if falls.any():
            at = int(falls.nonzero()[0])
            raise ValueError(
                f"key_positions must not decrease along valid keys"
                f"{'' if layout.key_segments is None else ' of a segment'}, got "
                f"{int(positions[at])} before {int(positions[at + 1])} in batch row {row}"
            )


def _check_highest(name: str, highest: int) -> None:
    if highest >= _FAR:
        raise ValueError(f"{name} must stay below 2^31 - 1, got {highest}")


def _window(window: float | None) -> int | None:
    if window is None or window == math.inf:
        return None
    if isinstance(window, bool) or not isinstance(window, Real) or not window >= 0:
        raise ValueError(f"window must be a number >= 0 (the largest distance), got {window!r}")
    return min(math.floor(window), _FAR)


def _integers(
    name: str, tensor: Tensor, shape: tuple[int, int], device: torch.device | str | None
) -> Tensor:
    _expect_tensor(name, tensor, shape, device)
    if tensor.dtype not in _INTEGERS:
        raise ValueError(f"{name} must hold integers, got {tensor.dtype}")
    return tensor.long()


def _expect_tensor(
    name: str, tensor: object, shape: tuple[int, int], device: torch.device | str | None
) -> None:
    if not isinstance(tensor, Tensor):
        raise ValueError(f"{name} must be a tensor, got {type(tensor).__name__}")
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name} must have shape {list(shape)}, got {list(tensor.shape)}")
    if device is not None and tensor.device != torch.device(device):
        raise ValueError(f"{name} must be on device {device}, got {tensor.device}")
