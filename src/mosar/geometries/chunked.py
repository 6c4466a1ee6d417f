"""Rules that need the scores or the contents of tokens: torch operators, some queries at a time.

    score = cap(scale q·k), -inf where no pair exists  ->  logits (the rule)  ->  softmax  ->  v

A chunk holds at most `PAIRS` pairs per head, so that no n x n tensor exists while a long text is
evaluated; gradients are torch's. Positions count from 0 in each document, and so do blocks of
tokens: a document is the same wherever it stands.

Shapes: B batch, H query heads, K key/value heads, T queries, S keys, D head dim, t queries of a
chunk, G blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from mosar.attention import Routing
from mosar.core.inputs import check_attention_inputs
from mosar.core.layout import Layout, is_traced
from mosar.core.positional import positions_in_segments
from mosar.geometries.geometry import Attended, Geometry, wide_dtype
from mosar.kernels.native import native_obstacle

PAIRS = 512 * 512


class Call(NamedTuple):
    """The arguments of `attend`, with padding cleared."""

    q: Tensor
    """[B, H, T, D]."""
    k: Tensor
    """[B, K, S, D]."""
    v: Tensor
    layout: Layout
    """Its positions count from 0 in each document."""
    given: Layout
    """Its positions ascend along the whole row, unless they were given."""
    scale: float
    softcap: float | None
    hidden: Tensor | None
    """[B, T, C]."""
    notes: Tensor | None
    """[B, E, S]."""


class Chunk(NamedTuple):
    """Some of the queries, and all keys."""

    queries: Tensor
    """[t], their places among the queries of the call."""
    q: Tensor
    """[B, H, t, D]."""
    layout: Layout
    exists: Tensor
    """[B or 1, 1, t, S] bool."""


class Chunked(Geometry):
    """A geometry whose `logits` follow from the scores; mixed with `Rope` where it rotates."""

    native = False
    longest_chunk: int = PAIRS
    """The most queries in a chunk."""
    reads_by_content: ClassVar[bool] = False
    """Whether the contents decide which pairs are read; then pairs are counted during reading."""
    _counted: tuple[float, int] = (0.0, 0)

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        routing: Routing,
        scale: float,
        softcap: float | None,
        hidden: Tensor | None = None,
        notes: Tensor | None = None,
        **placement: Any,
    ) -> Attended:
        given = check_attention_inputs(q, k, v, scale, softcap, **placement)
        layout = _in_documents(given)
        if layout.key_valid is not None:
            # Neither the contents nor the position of a padded slot may matter.
            padding = ~layout.key_valid[:, None, :, None]
            k, v = k.masked_fill(padding, 0), v.masked_fill(padding, 0)
            places = layout.key_positions.masked_fill(~layout.key_valid, 0)
            layout = replace(layout, key_positions=places)
        dtype = wide_dtype(q)
        with torch.autocast(q.device.type, enabled=False):
            hidden, notes = (None if x is None else x.to(dtype) for x in (hidden, notes))
            call = Call(
                *(q.to(dtype), k.to(dtype), v.to(dtype)),
                *(layout, given, scale, softcap, hidden, notes),
            )
            if q.shape[2] == k.shape[2]:
                # A new text. With a cache, further queries add to the count.
                self._counted = (0.0, 0)
            state, chunks = self.prepare(call), _chunks(call, self.longest_chunk)
            out = [self.attend_chunk(call, chunk, state) for chunk in chunks]
            return torch.cat(out, dim=2).to(q.dtype), self.finish(state)

    def prepare(self, call: Call) -> Any:
        """What all chunks of a call share."""
        return None

    def finish(self, state: Any) -> Tensor | None:
        """The price of the layer, if it has one."""
        return None

    def attend_chunk(self, call: Call, chunk: Chunk, state: Any) -> Tensor:
        """[B, H, t, D]."""
        score_BHtS = self.scores(call, chunk, state).masked_fill(~chunk.exists, -torch.inf)
        logits_BHtS = self.logits(score_BHtS, call, chunk, state)
        if self.reads_by_content and not torch.is_grad_enabled():
            pairs, causal = self._counted
            pairs += int((logits_BHtS > -torch.inf).sum()) / logits_BHtS.shape[1]
            exists = chunk.exists.expand(len(call.q), *chunk.exists.shape[1:])
            self._counted = pairs, causal + int(exists.sum())
        return weigh(logits_BHtS, call.v)

    def products(self, position: int) -> float | None:
        return None if self.reads_by_content else super().products(position)

    def count_pairs(self, shape: tuple[int, int], **options: Any) -> tuple[float, int] | None:
        """Where the contents decide, those of the last text that was read without gradients."""
        if self.reads_by_content and self._counted[1]:
            return self._counted
        return super().count_pairs(shape, **options)

    def scores(self, call: Call, chunk: Chunk, state: Any) -> Tensor:
        """[B, H, t, S], scaled and soft-capped."""
        return capped(grouped_product(chunk.q, call.k) * call.scale, call.softcap)

    def logits(self, scores: Tensor, call: Call, chunk: Chunk, state: Any) -> Tensor:
        """[B, H, t, S]; -inf for pairs that do not exist (as in scores) or are not read."""
        return scores


def reads_runs(call: Call) -> bool:
    """Whether kernels can read this call as runs of keys: no padding, default positions."""
    layout = call.given
    return layout.default_positions and layout.key_valid is None and kernels_serve(call.q)


def kernels_serve(q: Tensor) -> bool:
    """Whether the native kernels can take q: float32 on the CPU."""
    is_theirs = q.device.type == "cpu" and q.dtype == torch.float32 and not is_traced()
    return is_theirs and native_obstacle() is None


def capped(scores: Tensor, softcap: float | None) -> Tensor:
    return scores if softcap is None else softcap * torch.tanh(scores / softcap)


def grouped_product(x_BHtD: Tensor, y_BKSD: Tensor) -> Tensor:
    """x·y of each query head and its key head, [B, H, t, S]."""
    heads, length = x_BHtD.shape[1:3]
    grouped = x_BHtD.reshape(x_BHtD.shape[0], y_BKSD.shape[1], -1, x_BHtD.shape[3])
    return (grouped @ y_BKSD.transpose(-1, -2)).reshape(-1, heads, length, y_BKSD.shape[2])


def row_weights(logits: Tensor) -> Tensor:
    """softmax over the last axis; a row without a key gives zeros and no gradient."""
    empty = (logits == -torch.inf).all(dim=-1, keepdim=True)
    return torch.softmax(logits.masked_fill(empty, 0), dim=-1).masked_fill(empty, 0)


def weigh(logits_BHtS: Tensor, v_BKSD: Tensor) -> Tensor:
    """softmax(logits) v, [B, H, t, D]."""
    batch, heads, length, keys = logits_BHtS.shape
    weights = row_weights(logits_BHtS).reshape(batch, v_BKSD.shape[1], -1, keys)
    return (weights @ v_BKSD).reshape(batch, heads, length, v_BKSD.shape[3])


def _chunks(call: Call, longest: int) -> Iterator[Chunk]:
    size = max(1, min(longest, PAIRS // call.k.shape[2]))
    for queries in torch.arange(call.q.shape[2], device=call.q.device).split(size):
        layout = call.layout.of_queries(queries)
        first, last = int(queries[0]), int(queries[-1]) + 1
        yield Chunk(queries, call.q[:, :, first:last], layout, layout.exists()[:, None])


def _in_documents(layout: Layout) -> Layout:
    """The layout with documents numbered from 0 in each row, and positions that restart in each."""
    segments = layout.key_segments
    if segments is None:
        return layout
    changes = torch.zeros_like(segments)
    changes[:, 1:] = (segments[:, 1:] != segments[:, :-1]).long()
    documents = changes.cumsum(dim=1)
    first = segments.shape[1] - layout.query_positions.shape[1]
    layout = replace(layout, key_segments=documents, query_segments=documents[:, first:])
    if not layout.default_positions:
        return layout
    places = positions_in_segments(documents)
    return replace(
        layout, key_positions=places, query_positions=places[:, first:], default_positions=False
    )


@dataclass(frozen=True)
class Blocks:
    """The tokens of each document in blocks of `size`, numbered over the row."""

    size: int
    of_key: Tensor
    """[B, S], the block of each key."""
    index: Tensor
    """[B, G], its index within its document."""
    document: Tensor
    """[B, G]; -1 for blocks that a row does not have."""
    counts: Tensor
    """[B, G], the number of valid tokens in it so far."""
    valid: Tensor
    """[B, S] bool."""
    place: Tensor
    """[B, S], the place of each key in its block."""

    def sum(self, x_BKSD: Tensor) -> Tensor:
        """Sums over the tokens of each block, [B, K, G, D]."""
        batch, heads, keys, dim = x_BKSD.shape
        index = self.of_key[:, None, :, None].expand(batch, heads, keys, dim)
        weighted = x_BKSD * self.valid[:, None, :, None]
        blocks = self.index.shape[1]
        return x_BKSD.new_zeros(batch, heads, blocks, dim).scatter_add(2, index, weighted)

    def own(self, chunk: Chunk) -> tuple[Tensor, Tensor]:
        """Index and document of each query's own block, [B, t, 1] each."""
        index = chunk.layout.query_positions.expand(len(self.of_key), -1)[..., None] // self.size
        document = chunk.layout.query_segments
        return index, torch.zeros_like(index) if document is None else document[..., None]

    def before(self, chunk: Chunk) -> Tensor:
        """Blocks that precede the query's own in its document, [B, 1, t, G]; all are complete."""
        index, document = self.own(chunk)
        same = self.document[:, None] == document
        return (same & (self.index[:, None] < index))[:, None]

    def until(self, chunk: Chunk, count: int) -> Tensor:
        """Blocks that begin `count` blocks that are complete at the query, [B, 1, t, G]."""
        finished = (chunk.layout.query_positions[..., None] + 1) // self.size
        _, document = self.own(chunk)
        same = self.document[:, None] == document
        return (same & (self.index[:, None] + count <= finished))[:, None]

    def is_own(self, chunk: Chunk) -> Tensor:
        """[B, 1, t, G]."""
        index, document = self.own(chunk)
        return ((self.document[:, None] == document) & (self.index[:, None] == index))[:, None]

    def runs(self, read_BHtG: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        """The blocks that are read as runs [first, end) of keys, up to the queries' slots [t]."""
        of_key = self.of_key.contiguous()
        blocks = torch.arange(read_BHtG.shape[3], device=of_key.device)
        blocks = blocks.expand(len(of_key), -1).contiguous()
        first, last = (torch.searchsorted(of_key, blocks, right=right) for right in (False, True))
        first = first[:, None, None].expand(read_BHtG.shape)
        end = torch.minimum(last[:, None, None], slots[:, None] + 1)
        return first, torch.where(read_BHtG, end, first)

    def to_keys(self, chosen_BHtG: Tensor) -> Tensor:
        """The keys of the chosen blocks, [B, H, t, S]."""
        batch, heads, length, _ = chosen_BHtG.shape
        index = self.of_key[:, None, None].expand(batch, heads, length, -1)
        return chosen_BHtG.gather(3, index)


def make_blocks(call: Call, size: int) -> Blocks:
    """The blocks of a call's keys; holes between keys belong to the block before them."""
    layout, (batch, _, keys, _) = call.layout, call.k.shape
    places = layout.key_positions.expand(batch, keys)
    valid = torch.ones_like(places, dtype=torch.bool)
    if layout.key_valid is not None:
        valid = layout.key_valid
    runs = torch.zeros_like(places) if layout.key_segments is None else layout.key_segments
    span = keys // size + int(places.max()) // size + 2
    named = torch.where(valid, runs * span + places // size, -1).cummax(dim=1).values
    starts = torch.ones_like(named)
    starts[:, 1:] = (named[:, 1:] != named[:, :-1]).long()
    of_key = starts.cumsum(dim=1) - 1
    blocks = int(of_key.max()) + 1
    names = named.new_full((batch, blocks), -1).scatter(1, of_key, named)
    counts = torch.zeros_like(names).scatter_add(1, of_key, valid.long())
    document = torch.where(names < 0, -1, names // span)
    index = torch.where(names < 0, 0, names % span)
    return Blocks(size, of_key, index, document, counts, valid, places % size)


def largest(scores: Tensor, eligible: Tensor, count: int) -> Tensor:
    """The `count` largest of the eligible entries along the last axis, as a mask."""
    eligible = eligible.expand(scores.shape)
    if count <= 0:
        return torch.zeros_like(eligible)
    ranked = scores.detach().masked_fill(~eligible, -torch.inf)
    chosen = ranked.topk(min(count, scores.shape[-1]), dim=-1).indices
    return torch.zeros_like(eligible).scatter(-1, chosen, True) & eligible
