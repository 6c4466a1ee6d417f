"""Learned spans: how far a head looks, the same for all tokens (adaptive) or by query (dynamic).

    weight of distance d  x  m(d) = clip((R + z - d) / R, 0, 1),   bias = ln m, no pair where m = 0

z is a span up to S, R the length of the ramp behind it; the mean share z / S is the price. After
Sukhbaatar et al., "Adaptive Attention Span in Transformers" (2019), whose z of a head starts at 0
and whose dynamic z_t = S sigmoid(v_h·x_t + b_h); here over RoPE. d = 0 is the token itself; in
their code it is the token before, and no key beyond S is read, not even on the ramp.

Shapes: B batch, H query heads, T queries, S keys, t queries of a chunk, C hidden size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mosar.attention import Routing, distance_attention
from mosar.geometries.chunked import Call, Chunk, Chunked
from mosar.geometries.config import AttentionConfig
from mosar.geometries.geometry import Attended, HeadShape, wide_dtype
from mosar.geometries.learned_distance import held_within
from mosar.geometries.own_settings import OwnSettings, setting
from mosar.geometries.rope import Rope

# The gradient of the logarithm is useless below this.
_SMALLEST = 1e-6


class Span(Rope):
    """RoPE, and a span that has a price."""

    family, settings = "window", Rope.settings | {"cost_weight", "cost_warmup"}
    decay = "learned"
    source = "Sukhbaatar et al. 2019 (Adaptive Attention Span)"
    checked = "its law; facebookresearch/adaptive-span"

    @dataclass(frozen=True, kw_only=True)
    class Own(OwnSettings):
        max_span: float = setting(1.0, above=0.0)
        """S, as a multiple of the training length; no head ever looks farther than S + R."""
        ramp: int = setting(32, least=1)
        """R, in tokens."""

    @property
    def max_span(self) -> int:
        """S in tokens."""
        return math.ceil(self.own.max_span * self.shape.max_length)

    def band(self, routing: str) -> float | None:
        return self.max_span + self.own.ramp - 1

    def log_mask(self, spans: Tensor, distances: Tensor) -> Tensor:
        """ln m, -inf where it is 0."""
        mask = ((self.own.ramp + spans - distances) / self.own.ramp).clamp(0, 1)
        return mask.clamp_min(_SMALLEST).log().masked_fill(mask == 0, -torch.inf)


class AdaptiveSpan(Span):
    """One span per head, learned as a share of S from 0."""

    learns = "a span per head"
    of_heads = ("span",)

    def __init__(self, attention: AttentionConfig, shape: HeadShape):
        super().__init__(attention, shape)
        self.span = nn.Parameter(torch.zeros(shape.num_heads))

    def _log_gate(self, dtype: torch.dtype) -> Tensor:
        """[H, S + R + 1]; the last entry is -inf, and holds for all farther distances."""
        spans = self.max_span * held_within(self.span.to(dtype), 0.0, 1.0)
        distances = torch.arange(self.max_span + self.own.ramp + 1, device=self.span.device)
        return self.log_mask(spans[:, None], distances)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, *, routing: Routing, **options: Any
    ) -> Attended:
        out = distance_attention(
            *(q, k, v),
            log_gate=self._log_gate(wide_dtype(q)),
            log_gate_extends=True,
            window=self.band(routing),
            **options,
        )
        return out, held_within(self.span, 0.0, 1.0).mean()

    def keys_read(self, positions: Tensor, routing: str) -> Tensor | None:
        """The mean over the heads; of a model without numbers, the most that they may read."""
        if self.span.is_meta:
            return super().keys_read(positions, routing)
        reads_H = (self._log_gate(wide_dtype(self.span)) > -torch.inf).sum(dim=1)
        read = (positions[..., None] + 1).minimum(reads_H.to(positions.device))
        return read.double().mean(dim=-1)


class DynamicSpan(Chunked, Span):
    """One span per head and query, from the layer's input."""

    reads_hidden = reads_by_content = True
    learns = "a span per query and head"
    adaptive = True
    of_heads = ("weight", "bias")

    def __init__(self, attention: AttentionConfig, shape: HeadShape):
        super().__init__(attention, shape)
        self.weight = nn.Parameter(torch.zeros(shape.num_heads, shape.hidden_size))
        self.bias = nn.Parameter(torch.zeros(shape.num_heads))

    def prepare(self, call: Call) -> Tensor:
        """The share of S that each query looks back, [B, H, T]."""
        assert call.hidden is not None
        weight, bias = (x.to(call.hidden.dtype) for x in (self.weight, self.bias))
        return torch.sigmoid(F.linear(call.hidden, weight, bias)).transpose(1, 2)

    def logits(self, scores: Tensor, call: Call, chunk: Chunk, state: Tensor) -> Tensor:
        spans_BHt1 = self.max_span * state[:, :, chunk.queries, None]
        return scores + self.log_mask(spans_BHt1, chunk.layout.distances()[:, None])

    def finish(self, state: Tensor) -> Tensor:
        return state.mean()

    def init_parameter(self, name: str, parameter: Tensor, generator: torch.Generator) -> None:
        """Spans start at R, or at half of S where that is shorter."""
        if name == "bias":
            share = min(self.own.ramp / self.max_span, 0.5)
            parameter.fill_(math.log(share / (1 - share)))
        else:
            super().init_parameter(name, parameter, generator)
