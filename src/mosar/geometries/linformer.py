"""Linformer, causal: a finished block of keys is read as a few learned mixtures of it.

    finished block b   k'_br = sum_t E_rt k_bt,  v'_br = sum_t F_rt v_bt;  k' turns with its end
    own block          token by token, up to the query
    softmax over both

The authors' projection mixes all tokens of a text and cannot be causal; this is the form that later
block-compressing models use. Without rotation it is theirs for a single query: a projection of the
tokens up to it, whose matrix has E for each finished block and ones for the tokens of its own.

Shapes: B batch, K key/value heads, S keys, D head dim, G blocks, r mixtures of c tokens each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mosar.geometries.chunked import (
    Blocks,
    Call,
    Chunk,
    Chunked,
    capped,
    grouped_product,
    make_blocks,
    weigh,
)
from mosar.geometries.config import AttentionConfig
from mosar.geometries.geometry import HeadShape
from mosar.geometries.own_settings import OwnSettings, setting
from mosar.geometries.rope import Rope


class Linformer(Chunked, Rope):
    """RoPE, own block exactly, and learned mixtures of the blocks before; keys stay unrotated."""

    family, checked = "window", "its law; linformer, query by query"
    learns = "mixtures of a block"
    source = "Wang et al. 2020 (Linformer), in a causal form"

    @dataclass(frozen=True, kw_only=True)
    class Own(OwnSettings):
        block: float = setting(1 / 16, above=0)
        """Tokens of a block, as a share of the training length N."""
        rank: float = setting(1 / 8, above=0, most=1)
        """Mixtures of a block, as a share of its tokens."""

    def __init__(self, attention: AttentionConfig, shape: HeadShape):
        super().__init__(attention, shape)
        self.size = self.tokens(self.own.block)
        self.rank = max(1, round(self.own.rank * self.size))
        self.key_mixture = nn.Parameter(torch.zeros(self.rank, self.size))
        self.value_mixture = nn.Parameter(torch.zeros(self.rank, self.size))

    def init_parameter(self, name: str, parameter: Tensor, generator: torch.Generator) -> None:
        """Each mixture starts near the mean of the block."""
        parameter.normal_(mean=1 / self.size, std=0.5 / self.size, generator=generator)

    def transform(self, q: Tensor, k: Tensor, at_q: Tensor, at_k: Tensor) -> tuple[Tensor, Tensor]:
        return self.turn(q, at_q), k

    def keys_read(self, positions: Tensor, routing: str) -> Tensor | None:
        """Entries: tokens of the query's own block, and mixtures of the blocks before it."""
        return positions % self.size + 1 + positions // self.size * self.rank

    def prepare(self, call: Call) -> tuple[Blocks, Tensor, Tensor, Tensor]:
        """Blocks, rotated keys [B, K, S, D], and mixtures of keys and values [B, K, G r, D]."""
        blocks = make_blocks(call, self.size)
        k_BSKD = call.k.transpose(1, 2)
        turned = self.turn(k_BSKD, call.layout.key_positions).transpose(1, 2)
        keys = self._mixtures(call.k, self.key_mixture, blocks)
        ends = (blocks.index + 1) * self.size - 1
        keys = self.turn(keys.permute(0, 2, 3, 1, 4).flatten(2, 3), ends)
        keys = keys.unflatten(2, (self.rank, -1)).permute(0, 3, 1, 2, 4)
        values = self._mixtures(call.v, self.value_mixture, blocks)
        return blocks, turned, keys.flatten(2, 3), values.flatten(2, 3)

    def _mixtures(self, x_BKSD: Tensor, mixture: Tensor, blocks: Blocks) -> Tensor:
        """[B, K, G, r, D]."""
        weight_BSr = mixture.to(x_BKSD.dtype).T[blocks.place]
        each = (blocks.sum(x_BKSD * weight_BSr[:, None, :, r, None]) for r in range(self.rank))
        return torch.stack(list(each), dim=3)

    def attend_chunk(self, call: Call, chunk: Chunk, state: Any) -> Tensor:
        blocks, turned, keys, values = state
        own = chunk.exists & blocks.to_keys(blocks.is_own(chunk))
        before = blocks.before(chunk).repeat_interleave(self.rank, dim=-1)
        logits = []
        for key, read in ((turned, own), (keys, before)):
            scores = capped(grouped_product(chunk.q, key) * call.scale, call.softcap)
            logits.append(scores.masked_fill(~read, -torch.inf))
        return weigh(torch.cat(logits, dim=-1), torch.cat([call.v, values], dim=2))
