"""Modes that estimate which pairs matter from a few queries, and read no others.

    minference    columns and diagonals, blocks, or sinks and a window: per head, whichever of the
                  three holds most of the estimate's weight; blocks also read the chunk itself
    flexprefill   blocks, where pooled keys predict the weights well, else columns and diagonals: as
                  many as hold `share` of the estimate's weight

The authors estimate from the last queries of a text, so that earlier ones would read what later
ones chose. Here a text is read in chunks of N/8 queries, and what a chunk reads follows from the
last queries of the chunk before: later tokens change nothing. The first chunk reads all its pairs.
MInference chooses the pattern of a head once, on sample texts; here it is chosen with the estimate.

Shapes: B batch, H query heads, K key/value heads, T tokens, D head dim, e queries of the estimate,
E keys before the chunk, t queries of the chunk, G blocks of keys.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from mosar.geometries.chunked import capped, grouped_product, row_weights, weigh
from mosar.geometries.geometry import Geometry, wide_dtype
from mosar.geometries.mode import TextMode
from mosar.geometries.rope import HighFrequencyRope, Rope
from mosar.geometries.xpos import XPos


class Estimated(TextMode):
    """Reads chunks of queries; the chunk before decides which pairs a chunk reads."""

    geometries = (Geometry, Rope, HighFrequencyRope, XPos)
    chunk: ClassVar[float] = 1 / 8
    """Queries of a chunk, as a share of the training length N."""
    block: ClassVar[float] = 1 / 32
    """Queries of an estimate, and keys of a block, as a share of N."""

    def attend_text(self, q: Tensor, k: Tensor, v: Tensor, **scores: Any) -> tuple[Tensor, float]:
        dtype, given = wide_dtype(q), q.dtype
        q, k, v = (x.to(dtype) for x in (q, k, v))
        size, length = self.geometry.tokens(self.chunk), q.shape[2]
        at = torch.arange(length, device=q.device)
        out, read = [], 0.0
        for start in range(0, length, size):
            end = min(start + size, length)
            distances = at[start:end, None] - at[:end]
            exists = distances >= 0
            if start:
                first = max(0, start - self.geometry.tokens(self.block))
                estimate = _scores(q[:, :, first:start], k[:, :, :start], **scores)
                exists = exists & self.chosen(
                    row_weights(estimate), q, k, distances, scores["scale"]
                )
            logits = _scores(q[:, :, start:end], k[:, :, :end], **scores)
            exists = exists.expand(logits.shape)
            read += exists.sum().item() / logits.shape[1]
            out.append(weigh(logits.masked_fill(~exists, -torch.inf), v[:, :, :end]))
        return torch.cat(out, dim=2).to(given), read

    def chosen(
        self, weights_BHeE: Tensor, q: Tensor, k: Tensor, distances: Tensor, scale: float
    ) -> Tensor:
        """Which pairs the chunk reads, [B, H, t, E + t]; the caller removes later keys.

        weights: of the last queries before the chunk. distances [t, E + t]: of its queries.
        """
        raise NotImplementedError


def _scores(q: Tensor, k: Tensor, *, scale: float, softcap: float | None) -> Tensor:
    """[B, H, t, S] of the last t of S tokens, -inf for later keys."""
    at = torch.arange(k.shape[2], device=k.device)
    later = at > at[k.shape[2] - q.shape[2] :, None]
    return capped(grouped_product(q, k) * scale, softcap).masked_fill(later, -torch.inf)


def by_distance(weights_BHeE: Tensor) -> Tensor:
    """The weight of each distance, [B, H, E], of the last e of E queries."""
    queries, keys = weights_BHeE.shape[2:]
    distances = keys - queries + torch.arange(queries)[:, None] - torch.arange(keys)
    distances = distances.clamp_min(0).to(weights_BHeE.device).expand(weights_BHeE.shape)
    total = torch.zeros_like(weights_BHeE[:, :, 0])
    return total.scatter_add(2, distances.flatten(2), weights_BHeE.flatten(2))


def lines(columns_BHE: Tensor, diagonals_BHE: Tensor, distances: Tensor) -> Tensor:
    """Pairs of the chosen keys or distances, [B, H, t, E + t]."""
    keys = distances.shape[1]
    column = F.pad(columns_BHE, (0, keys - columns_BHE.shape[2]))[:, :, None]
    diagonal = F.pad(diagonals_BHE, (0, keys - diagonals_BHE.shape[2]))
    return column | diagonal[:, :, distances.clamp_min(0)]


def block_pairs(blocks_BHG: Tensor, size: int, distances: Tensor) -> Tensor:
    """Pairs of the chosen blocks and of the chunk itself, [B, H, t or 1, E + t]."""
    queries, keys = distances.shape
    at = torch.arange(keys, device=distances.device)
    blocks = F.pad(blocks_BHG, (0, keys // size + 1 - blocks_BHG.shape[2]))
    return (blocks[:, :, at // size] | (at >= keys - queries))[:, :, None]


def pooled_match(q: Tensor, k: Tensor, size: int, scale: float) -> Tensor:
    """softmax over the blocks of mean(q)·mean(k of a block) for queries [B, H, e, D], [B, H, G]."""
    pad = -k.shape[2] % size
    counts = F.pad(torch.ones_like(k[0, 0, :, 0]), (0, pad)).unflatten(0, (-1, size)).sum(dim=1)
    means = F.pad(k, (0, 0, 0, pad)).unflatten(2, (-1, size)).sum(dim=3) / counts[:, None]
    return torch.softmax(grouped_product(q.mean(dim=2, keepdim=True), means)[:, :, 0] * scale, -1)


def largest_with(weights: Tensor, count: int, always: slice) -> Tensor:
    """A mask of the `count` largest entries along the last axis, `always` among them."""
    ranked = weights.clone()
    ranked[..., always] = torch.inf
    order = ranked.topk(min(count, ranked.shape[-1]), dim=-1).indices
    return torch.zeros_like(weights, dtype=torch.bool).scatter(-1, order, True)


def covering(weights: Tensor, share: float, least: int) -> Tensor:
    """A mask of the fewest entries that hold `share` of the sum, but at least `least`."""
    ordered, order = weights.sort(dim=-1, descending=True)
    before = ordered.cumsum(dim=-1) - ordered
    # All of them for a share of 1: sums are rounded.
    kept = (before < share * weights.sum(dim=-1, keepdim=True)) | (share >= 1)
    kept = kept | (torch.arange(weights.shape[-1], device=weights.device) < least)
    return torch.zeros_like(kept).scatter(-1, order, kept)


class MInference(Estimated):
    """Three patterns of fixed size; sizes in tokens as shares of N, or blocks."""

    name, source = "minference", "Jiang et al. 2024 (MInference)"
    columns, first_columns = 1 / 16, 4
    diagonals, last_diagonals = 1 / 8, 1 / 32
    blocks = 8
    window = 1 / 4
    """Tokens of the pattern with sinks, including these."""

    def chosen(
        self, weights_BHeE: Tensor, q: Tensor, k: Tensor, distances: Tensor, scale: float
    ) -> Tensor:
        tokens, (queries, keys) = self.geometry.tokens, weights_BHeE.shape[2:]
        columns = largest_with(
            weights_BHeE.sum(dim=2), tokens(self.columns), slice(0, self.first_columns)
        )
        diagonals = largest_with(
            by_distance(weights_BHeE), tokens(self.diagonals), slice(0, tokens(self.last_diagonals))
        )
        size, last = tokens(self.block), slice(keys - queries, keys)
        match = pooled_match(q[:, :, last], k[:, :, :keys], size, scale)
        blocks = largest_with(match, self.blocks, slice(0, 0))
        at = torch.arange(keys, device=q.device)
        estimated = at[last, None] - at

        def patterns(distances: Tensor) -> list[Tensor]:
            place = torch.arange(distances.shape[1], device=distances.device)
            sinks = place < self.first_columns
            window = sinks | (distances < tokens(self.window) - self.first_columns)
            of_lines = lines(columns, diagonals, distances)
            of_blocks = block_pairs(blocks, size, distances)
            return [of_lines, of_blocks, window.expand(of_lines.shape)]

        held = [(weights_BHeE * pairs).sum(dim=(2, 3)) for pairs in patterns(estimated)]
        best = torch.stack(held).argmax(dim=0)[..., None, None]
        of_lines, of_blocks, window = patterns(distances)
        return torch.where(best == 0, of_lines, torch.where(best == 1, of_blocks, window))


class FlexPrefill(Estimated):
    """As many blocks, or columns and diagonals, as hold a share of the weight."""

    name, source = "flexprefill", "Lai et al. 2025 (FlexPrefill)"
    share = 0.9
    """gamma."""
    threshold = 0.1
    """tau: a head reads blocks where the root of the Jensen-Shannon divergence is below it."""
    least = 1 / 8
    """The fewest tokens that are read, as a share of N."""

    def chosen(
        self, weights_BHeE: Tensor, q: Tensor, k: Tensor, distances: Tensor, scale: float
    ) -> Tensor:
        least, size = self.geometry.tokens(self.least), self.geometry.tokens(self.block)
        queries, keys = weights_BHeE.shape[2:]
        match = pooled_match(q[:, :, keys - queries : keys], k[:, :, :keys], size, scale)
        column_BHE = weights_BHeE.mean(dim=2)
        of_blocks = F.pad(column_BHE, (0, -keys % size)).unflatten(2, (-1, size)).sum(dim=3)
        fits = divergence(match, of_blocks).sqrt() < self.threshold
        columns = covering(column_BHE, self.share, least)
        diagonals = covering(by_distance(weights_BHeE), self.share, least)
        columns[..., 0] = diagonals[..., 0] = True
        blocks = covering(match, self.share, -(-least // size))
        blocks[..., 0] = True
        return torch.where(
            fits[..., None, None],
            block_pairs(blocks, size, distances),
            lines(columns, diagonals, distances),
        )


def divergence(p: Tensor, q: Tensor) -> Tensor:
    """Jensen-Shannon divergence of distributions along the last axis, >= 0."""
    middle = (p + q) / 2
    entropies = [torch.special.entr(x).sum(dim=-1) for x in (middle, p, q)]
    return (entropies[0] - (entropies[1] + entropies[2]) / 2).clamp_min(0)
