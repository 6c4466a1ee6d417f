"""Biases that follow from the scores themselves, or from what a query says of distances.

    selective   logits - F_ij,  F_ij = sum over earlier queries l < i of ReLU(score_lj of head 0)
    cope        logits + q_i·e[p_ij],  p_ij = sum over l = j..i of sigmoid(score_il), interpolated
    inkling     logits + sum_r (W x_i)_hr P_r(i - j), 0 beyond the extent

Shapes: B batch, H query heads, T queries, S keys, t queries of a chunk, D head dim, C hidden size,
R profiles, P positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mosar.geometries.chunked import PAIRS, Call, Chunk, Chunked, capped
from mosar.geometries.config import AttentionConfig
from mosar.geometries.geometry import HeadShape
from mosar.geometries.own_settings import OwnSettings, setting
from mosar.geometries.rope import Rope


class Selective(Chunked, Rope):
    """RoPE, and each query may lower what later ones see of a key; no parameters.

    Head 0 says so. The first token of a document is spared, and a query does not lower itself.
    """

    family, adaptive = "routing", True
    source, checked = "Leviathan et al. 2025 (Selective Attention)", "its law; x-transformers"

    @property
    def kept_notes(self) -> int:
        return self.shape.head_dim

    def split_obstacle(self, tensor: int) -> str | None:
        return ": in the geometry selective the first head speaks to all others"

    def note(self, q: Tensor, k: Tensor, hidden: Tensor | None) -> Tensor | None:
        """The queries of head 0, [B, D, T]: later calls compute again what they lowered."""
        return q[:, :, 0].transpose(1, 2)

    def prepare(self, call: Call) -> list[Tensor]:
        """[F], [B, S]: what the queries before this call have lowered; chunks add to it."""
        assert call.notes is not None
        lowered = call.k.new_zeros(len(call.k), call.k.shape[2])
        past = call.k.shape[2] - call.q.shape[2]
        for tokens in torch.arange(past, device=call.k.device).split(max(1, PAIRS // (past + 1))):
            product = call.notes[..., tokens].transpose(1, 2) @ call.k[:, 0].transpose(1, 2)
            scores = capped(product * call.scale, call.softcap)
            lowered = lowered + self._lowering(scores, tokens, call).sum(dim=1)
        return [lowered]

    def _lowering(self, scores_BtS: Tensor, tokens: Tensor, call: Call) -> Tensor:
        """What the queries of these tokens (slots of keys) lower, [B, t, S]."""
        layout = call.layout
        places = layout.key_positions
        distances = places[:, tokens, None] - places[:, None]
        lowers = (distances > 0) & (places[:, None] > 0)
        if layout.key_segments is not None:
            documents = layout.key_segments
            lowers = lowers & (documents[:, tokens, None] == documents[:, None])
        if layout.key_valid is not None:
            valid = layout.key_valid
            lowers = lowers & valid[:, tokens, None] & valid[:, None]
        return F.relu(scores_BtS.masked_fill(~lowers, 0))

    def logits(self, scores: Tensor, call: Call, chunk: Chunk, state: list[Tensor]) -> Tensor:
        tokens = chunk.queries + call.k.shape[2] - call.q.shape[2]
        lowering_BtS = self._lowering(scores[:, 0], tokens, call)
        total_BtS = state[0][:, None] + lowering_BtS.cumsum(dim=1)
        state[0] = total_BtS[:, -1]
        return scores - (total_BtS - lowering_BtS)[:, None]


class CoPE(Chunked):
    """Contextual positions: a query counts the keys that it lets through; no rotation."""

    family, learns = "distance", "a vector per count"
    adaptive = True
    source, checked = "Golovneva et al. 2024 (CoPE)", "its law; x-transformers"

    @dataclass(frozen=True, kw_only=True)
    class Own(OwnSettings):
        positions: float = setting(1 / 8, above=0)
        """How many counts have a vector of their own, as a share of N; at least two."""

    def __init__(self, attention: AttentionConfig, shape: HeadShape):
        super().__init__(attention, shape)
        positions = max(2, self.tokens(self.own.positions))
        self.embedding = nn.Parameter(torch.zeros(positions, shape.head_dim))

    def init_parameter(self, name: str, parameter: Tensor, generator: torch.Generator) -> None:
        parameter.zero_()

    def logits(self, scores: Tensor, call: Call, chunk: Chunk, state: Any) -> Tensor:
        known_BHtP = chunk.q @ self.embedding.to(chunk.q.dtype).T
        gates = torch.sigmoid(scores)
        counts = gates.flip(-1).cumsum(dim=-1).flip(-1).clamp_max(len(self.embedding) - 1)
        low = counts.detach().floor().long()
        high = (low + 1).clamp_max(len(self.embedding) - 1)
        below, above = known_BHtP.gather(-1, low), known_BHtP.gather(-1, high)
        return scores + below + (counts - low) * (above - below)


class Inkling(Chunked):
    """Each query mixes learned curves of bias over distance; no rotation."""

    family, reads_hidden, learns = "distance", True, "curves and their mixture"
    adaptive, decay = True, "learned"
    source, checked = "Inkling (Thinking Machines 2026)", "its law; x-transformers"

    @dataclass(frozen=True, kw_only=True)
    class Own(OwnSettings):
        profiles: int = setting(16, least=1)
        extent: float = setting(1.0, above=0)
        """Distances that have a bias, as a share of the training length N."""

    def __init__(self, attention: AttentionConfig, shape: HeadShape):
        super().__init__(attention, shape)
        self.mixture = nn.Linear(shape.hidden_size, shape.num_heads * self.own.profiles, bias=False)
        self.profiles = nn.Parameter(torch.zeros(self.own.profiles, self.tokens(self.own.extent)))

    def logits(self, scores: Tensor, call: Call, chunk: Chunk, state: Any) -> Tensor:
        assert call.hidden is not None
        hidden = call.hidden[:, chunk.queries]
        mixture = F.linear(hidden, self.mixture.weight.to(hidden.dtype))
        mixture_BHtR = mixture.unflatten(-1, (-1, self.own.profiles)).transpose(1, 2)
        table_BHtE = mixture_BHtR @ self.profiles.to(hidden.dtype)
        extent = self.profiles.shape[1]
        distances = chunk.layout.distances()[:, None]
        index = distances.clamp(0, extent - 1).expand(scores.shape)
        return scores + table_BHtE.gather(-1, index).masked_fill(distances >= extent, 0)
