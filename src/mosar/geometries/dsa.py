"""DeepSeek sparse attention: a small indexer chooses the keys of each query, for all heads.

    I_ij = sum_h w_ih ReLU(q'_ih · k'_j),  q', k', w linear in the layer's input, which is detached
    half of the dims of q' and k' rotate, as q and k do
    query i reads the keys with the `top` largest I_ij, the latest of equal ones
    price = KL(attention, mean over the heads || softmax I), over the keys that are read

At first, for `warmup` of the training, all keys are read and weighed. The indexer learns from the
price alone.

Shapes: B batch, H query heads, T queries, S keys, t queries of a chunk, E index dims, h index
heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mosar.core.positional import rotate, rotation
from mosar.geometries.chunked import Call, Chunk, Chunked, row_weights
from mosar.geometries.config import AttentionConfig
from mosar.geometries.geometry import HeadShape
from mosar.geometries.own_settings import OwnSettings, setting
from mosar.geometries.rope import Rope


class DSA(Chunked, Rope):
    """RoPE, and the keys that a learned indexer chooses."""

    family, reads_hidden, learns = "window", True, "an indexer"
    adaptive = True
    source, checked = "DeepSeek-V3.2 (2025)", "its law; flash-linear-attention"
    settings = Rope.settings | {"cost_weight", "cost_warmup"}
    progress: float = 1.0
    """How much of the training is done, from 0 to 1."""

    @dataclass(frozen=True, kw_only=True)
    class Own(OwnSettings):
        top: float = setting(1 / 4, above=0)
        """Keys that a query reads, as a share of the training length N."""
        index_heads: int = setting(2, least=1)
        index_dim: int = setting(32, least=4)
        warmup: float = setting(1 / 8, least=0, most=1)
        """The share of the training in which all keys are read."""

    def __init__(self, attention: AttentionConfig, shape: HeadShape):
        super().__init__(attention, shape)
        heads, dim = self.own.index_heads, self.own.index_dim
        self.index_query = nn.Linear(shape.hidden_size, heads * dim, bias=False)
        self.index_key = nn.Linear(shape.hidden_size, dim, bias=False)
        self.index_weight = nn.Linear(shape.hidden_size, heads, bias=False)

    def begin_step(self, step: int, steps: int) -> None:
        self.progress = step / steps

    @property
    def reads_all(self) -> bool:
        return self.progress < self.own.warmup

    def keys_read(self, positions: Tensor, routing: str) -> Tensor | None:
        return None if self.reads_all else (positions + 1).clamp_max(self.tokens(self.own.top))

    def products(self, position: int) -> float | None:
        """Plus those of the indexer, which are shorter and shared by all heads."""
        read, own = super().products(position), self.own
        index = own.index_heads * own.index_dim / self.shape.num_heads / self.shape.head_dim
        return None if read is None else read + (position + 1) * index

    @property
    def kept_notes(self) -> int:
        return self.own.index_dim

    def note(self, q: Tensor, k: Tensor, hidden: Tensor | None) -> Tensor | None:
        """The index keys, [B, E, S]."""
        assert hidden is not None
        return self.index_key(hidden.detach()).transpose(1, 2)

    def prepare(self, call: Call) -> Any:
        """Queries [B, h, T, E] and keys [B, 1, E, S] of the indexer, weights [B, h, T], prices."""
        assert call.hidden is not None
        hidden = call.hidden.detach()
        query, weight = (
            F.linear(hidden, linear.weight.to(hidden.dtype))
            for linear in (self.index_query, self.index_weight)
        )
        query = query.unflatten(-1, (-1, self.own.index_dim))
        query = self._turned(query, call.layout.query_positions).transpose(1, 2)
        assert call.notes is not None
        key = call.notes.transpose(1, 2)[:, :, None]
        key = self._turned(key, call.layout.key_positions).permute(0, 2, 3, 1)
        return query, key, weight.transpose(1, 2), []

    def _turned(self, x: Tensor, at: Tensor) -> Tensor:
        """x [B, T, any heads, E] with half of its dims rotated to the positions [B or 1, T]."""
        dims = self.own.index_dim // 4 * 2
        turn = rotation(at, dims, theta=self.attention.rope_theta, dtype=x.dtype)
        return torch.cat([rotate(x[..., :dims], *turn), x[..., dims:]], dim=-1)

    def logits(self, scores: Tensor, call: Call, chunk: Chunk, state: Any) -> Tensor:
        query_BhTE, key_B1ES, weight_BhT, prices = state
        match_BhtS = F.relu(query_BhTE[:, :, chunk.queries] @ key_B1ES)
        index_BtS = (weight_BhT[:, :, chunk.queries, None] * match_BhtS).sum(dim=1)
        read_BtS = chunk.exists[:, 0].expand(index_BtS.shape)
        if not self.reads_all:
            read_BtS = latest_largest(index_BtS, read_BtS, self.tokens(self.own.top))
        logits = scores.masked_fill(~read_BtS[:, None], -torch.inf)
        if torch.is_grad_enabled():
            target_BtS = row_weights(logits.detach()).mean(dim=1)
            log_index = torch.log_softmax(index_BtS.masked_fill(~read_BtS, -1e30), dim=-1)
            entropy = torch.special.entr(target_BtS).sum(dim=-1)
            prices.append(-entropy - (target_BtS * log_index).sum(dim=-1))
        return logits

    def finish(self, state: Any) -> Tensor | None:
        prices = state[-1]
        return torch.cat(prices, dim=1).mean() if prices else None


def latest_largest(scores: Tensor, eligible: Tensor, count: int) -> Tensor:
    """A mask of the `count` largest eligible entries along the last axis; ties go to the later."""
    ranked = scores.detach().masked_fill(~eligible, -torch.inf).flip(-1)
    order = ranked.sort(dim=-1, descending=True, stable=True).indices[..., :count]
    chosen = torch.zeros_like(eligible).scatter(-1, order, True).flip(-1)
    return chosen & eligible
