"""Blocks of keys that a query reads whole: drawn before q·k (BigBird) or by their mean key (MoBA).

    BigBird   own block, the two before it, the first two, and three drawn from those between
    MoBA      own block, and the top - 1 finished ones with the largest q·mean(k), head by head

Torch operators choose the blocks, and the kernels read them as runs of keys; where these do not
serve (float64, padding, a GPU) torch operators mask the pairs of a chunk.

Shapes: B batch, H query heads, K key/value heads, t queries of a chunk, S keys, G blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mosar.geometries.chunked import (
    Blocks,
    Call,
    Chunk,
    Chunked,
    grouped_product,
    largest,
    make_blocks,
    reads_runs,
)
from mosar.geometries.own_settings import OwnSettings, setting
from mosar.geometries.rope import Rope
from mosar.kernels.native import attend_runs


class BlockSelection(Chunked, Rope):
    """RoPE, and whole blocks of keys; a query always reads its own block up to itself."""

    family, native = "window", True

    @dataclass(frozen=True, kw_only=True)
    class Own(OwnSettings):
        block: float = setting(1 / 16, above=0)
        """Tokens of a block, as a share of the training length N."""

    def prepare(self, call: Call) -> Any:
        return make_blocks(call, self.tokens(self.own.block))

    def chosen(self, call: Call, chunk: Chunk, blocks: Blocks) -> Tensor:
        """The blocks that are read besides the query's own, [B, K or H, t, G]."""
        raise NotImplementedError

    def blocks_read(self, own: Tensor) -> Tensor:
        """How many blocks `chosen` returns for a query whose own block has this index."""
        raise NotImplementedError

    def attend_chunk(self, call: Call, chunk: Chunk, state: Blocks) -> Tensor:
        if not reads_runs(call):
            return super().attend_chunk(call, chunk, state)
        read = self.chosen(call, chunk, state) | state.is_own(chunk)
        runs = state.runs(read, chunk.queries + call.k.shape[2] - call.q.shape[2])
        scores = {"scale": call.scale, "softcap": call.softcap}
        return attend_runs(chunk.q, call.k, call.v, *runs, **scores)

    def logits(self, scores: Tensor, call: Call, chunk: Chunk, state: Blocks) -> Tensor:
        read = self.chosen(call, chunk, state) | state.is_own(chunk)
        read = read.repeat_interleave(scores.shape[1] // read.shape[1], dim=1)
        return scores.masked_fill(~state.to_keys(read), -torch.inf)

    def keys_read(self, positions: Tensor, routing: str) -> Tensor | None:
        size = self.tokens(self.own.block)
        own = positions // size
        return positions % size + 1 + size * self.blocks_read(own)


class BigBird(BlockSelection):
    """A window of blocks, the first blocks and random ones; unlike the authors' form it is causal.

    Theirs has a window on both sides and the first and the last block. A causal mask leaves of it
    `window=2` and `first=1`; here the other two also lie before the query, so that as many blocks
    are read. What is drawn for a block depends on the layer, the key head and the block alone, so
    that a longer text changes nothing.
    """

    source, checked = "Zaheer et al. 2020 (BigBird)", "its law; transformers, made causal"

    @dataclass(frozen=True, kw_only=True)
    class Own(OwnSettings):
        block: float = setting(1 / 32, above=0)
        """Tokens of a block, as a share of the training length N."""
        window: int = setting(3, least=1)
        """Blocks up to and including the query's own."""
        first: int = setting(2)
        """Blocks at the start of a document."""
        random: int = setting(3)
        """Blocks drawn at random from the rest."""

    def split_obstacle(self, tensor: int) -> str | None:
        return ": in the geometry bigbird key heads draw their blocks by their number"

    def chosen(self, call: Call, chunk: Chunk, blocks: Blocks) -> Tensor:
        own_Bt1, _ = blocks.own(chunk)
        index_B1G = blocks.index[:, None]
        near = index_B1G > own_Bt1 - self.own.window
        between = (index_B1G >= self.own.first) & ~near
        heads = torch.arange(call.k.shape[1], device=call.k.device)[:, None, None]
        drawn = draw(self.shape.layer, heads, own_Bt1[:, None], index_B1G[:, None])
        before = blocks.before(chunk)
        random = largest(drawn, before & between[:, None], self.own.random)
        return before & ((near | (index_B1G < self.own.first))[:, None] | random)

    def blocks_read(self, own: Tensor) -> Tensor:
        near = own.clamp_max(self.own.window - 1)
        first = (own - near).clamp_max(self.own.first)
        return near + first + (own - near - first).clamp_max(self.own.random)


def draw(*numbers: Any) -> Tensor:
    """A number in [0, 1) that looks random, float64, the same for the same integers anywhere."""
    state = torch.zeros((), dtype=torch.int64)
    for number in numbers:
        state = (state + number + 1) * 0x2545F491 % 0x7FFFFFFF
        state = (state ^ (state >> 13)) * 0x5BD1E995 % 0x7FFFFFFF
        state = state ^ (state >> 15)
    return state.double() / 0x80000000


class MoBA(BlockSelection):
    """The blocks whose mean key fits the query best; the choice has no gradient."""

    adaptive = True
    source, checked = "Lu et al. 2025 (MoBA)", "its law; MoonshotAI/MoBA"

    @dataclass(frozen=True, kw_only=True)
    class Own(OwnSettings):
        block: float = setting(1 / 16, above=0)
        """Tokens of a block, as a share of the training length N."""
        top: int = setting(3, least=1)
        """Blocks that a query reads, including its own."""

    def chosen(self, call: Call, chunk: Chunk, blocks: Blocks) -> Tensor:
        mean_BKGD = blocks.sum(call.k) / blocks.counts.clamp_min(1)[:, None, :, None]
        gate_BHtG = grouped_product(chunk.q, mean_BKGD)
        return largest(gate_BHtG, blocks.before(chunk), self.own.top - 1)

    def blocks_read(self, own: Tensor) -> Tensor:
        return own.clamp_max(self.own.top - 1)

    def products(self, position: int) -> float | None:
        """Plus one for each past block."""
        read = super().products(position)
        return None if read is None else read + position // self.tokens(self.own.block)
