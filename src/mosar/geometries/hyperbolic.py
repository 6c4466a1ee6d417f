"""HoPE with hyperbolic rotations: every frequency decays, and none turns.

    score(d) = sum_i q+_i k+_i e^(-(t - w_i) r d) + q-_i k-_i e^(-(t + w_i) r d)
    x+- = (x_i +- x_(i + D/2)) / sqrt 2,   w_i = theta^(-2 i / D),   t = `damping` > 1

which is the Lorentz boost of Dai et al. 2025 in its eigenbasis. With r = 1, as published, every
score beyond about 40 tokens is 0; here r gives the slowest term the half-life `half_life`.

Shapes: B batch, H query heads, t queries of a chunk, S keys, D head dim.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mosar.geometries.chunked import Call, Chunk, Chunked, capped, grouped_product
from mosar.geometries.own_settings import OwnSettings, setting

# e to this power is far below the largest float32.
_LARGEST_EXPONENT = 40.0


class Hyperbolic(Chunked):
    """No rotation; scores (not weights) decay with distance, each pair of dims at two rates."""

    family, decay = "distance", "fixed"
    source = "Dai et al. 2025 (HoPE)"
    settings = frozenset({"rope_theta"})

    @dataclass(frozen=True, kw_only=True)
    class Own(OwnSettings):
        damping: float = setting(1.1, above=1)
        half_life: float = setting(1 / 4, above=0)
        """Half-life of the slowest term, as a share of the training length N."""

    def rates(self) -> Tensor:
        """Decay rates [D] float64: of x+, then of x-."""
        half = self.shape.head_dim // 2
        frequencies = self.attention.rope_theta ** (-torch.arange(half).double() / half)
        damping = self.own.damping
        rates = torch.cat([damping - frequencies, damping + frequencies])
        return rates * math.log(2) / (self.own.half_life * self.shape.max_length) / rates.min()

    @property
    def longest_chunk(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The most tokens for which no factor overflows."""
        return max(1, int(_LARGEST_EXPONENT / float(self.rates().max())))

    def scores(self, call: Call, chunk: Chunk, state: Any) -> Tensor:
        # From the first query of the chunk: factors of past keys vanish only where scores do.
        at_q = call.given.query_positions[:, chunk.queries]
        first, last = at_q.amin(dim=1, keepdim=True), at_q.amax(dim=1, keepdim=True)
        may_jump = len(chunk.queries) > 1 and not call.layout.is_ordinary
        if may_jump and int((last - first).max()) >= self.longest_chunk:
            # Across a gap in the positions factors would overflow: one query at a time.
            one_by_one = zip(chunk.queries.split(1), chunk.q.split(1, dim=2), strict=True)
            alone = (chunk._replace(queries=i, q=q) for i, q in one_by_one)
            rows = [self.scores(call, each, state) for each in alone]
            return torch.cat(rows, dim=2)
        at_k = torch.minimum(call.given.key_positions, last) - first
        if call.layout.key_valid is not None:
            at_k = at_k.masked_fill(~call.layout.key_valid, 0)
        rates = self.rates().to(call.q)
        q = _eigenbasis(chunk.q) * torch.exp(-rates * (at_q - first)[:, None, :, None])
        k = _eigenbasis(call.k) * torch.exp(rates * at_k[:, None, :, None])
        return capped(grouped_product(q, k) * call.scale, call.softcap)


def _eigenbasis(x: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first + second, first - second], dim=-1) * math.sqrt(0.5)
