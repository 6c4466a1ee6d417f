"""Native sparse attention: compressed blocks, selected blocks and a window, mixed by gates.

    compression   entry w = W (sum_t a_t x_(w d + t)), t < l, of keys and values; read once past
    selection     p = softmax over the entries; a block's score is the sum of the p that overlap it,
                  over the heads of a group; the best `selected` blocks are read token by token, the
                  first, the own and the one before it always
    window        the last tokens
    out = sum of the three, each times sigmoid(a gate of the layer's input)

Keys are compressed after rotation. All branches share one projection of keys and of values.

Shapes: B batch, H query heads, K key/value heads, t queries of a chunk, S keys, D head dim,
G strides (entries start with one), J blocks of selection.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mosar.geometries.chunked import (
    Blocks,
    Call,
    Chunk,
    Chunked,
    capped,
    grouped_product,
    largest,
    make_blocks,
    reads_runs,
    row_weights,
    weigh,
)
from mosar.geometries.config import AttentionConfig
from mosar.geometries.geometry import HeadShape
from mosar.geometries.own_settings import OwnSettings, setting
from mosar.geometries.rope import Rope
from mosar.kernels.native import attend_runs


class _State(NamedTuple):
    strides: Blocks
    blocks: Blocks
    keys: Tensor
    """[B, K, G, D]: the entry that begins with each stride."""
    values: Tensor
    gates: Tensor
    """[B, 3, H, T]."""


class NSA(Chunked, Rope):
    """RoPE, and three branches of attention."""

    family, reads_hidden, learns = "window", True, "compression and gates"
    adaptive = True
    source, checked = "Yuan et al. 2025 (NSA)", "its law; flash-linear-attention"

    @dataclass(frozen=True, kw_only=True)
    class Own(OwnSettings):
        stride: float = setting(1 / 64, above=0)
        """Tokens from one compressed entry to the next, as a share of the training length N."""
        overlap: int = setting(2, least=1)
        """Strides that an entry covers."""
        block: int = setting(2, least=1)
        """Strides of a block of selection."""
        selected: int = setting(6, least=3)
        """Blocks that are read, including the first, the query's own and the one before it."""
        window: float = setting(1 / 16, above=0)
        """Tokens of the window, as a share of N."""

    def __init__(self, attention: AttentionConfig, shape: HeadShape):
        super().__init__(attention, shape)
        self.stride = self.tokens(self.own.stride)
        size = self.stride * self.own.overlap
        self.key_weights, self.value_weights = (nn.Parameter(torch.zeros(size)) for _ in range(2))
        self.key_map, self.value_map = (
            nn.Parameter(torch.zeros(shape.head_dim, shape.head_dim)) for _ in range(2)
        )
        self.gate = nn.Linear(shape.hidden_size, 3 * shape.num_heads, bias=False)

    def init_parameter(self, name: str, parameter: Tensor, generator: torch.Generator) -> None:
        """Compression starts as the mean."""
        if name.endswith("_map"):
            nn.init.eye_(parameter)
        elif name.endswith("_weights"):
            parameter.fill_(1 / len(parameter))
        else:
            super().init_parameter(name, parameter, generator)

    def keys_read(self, positions: Tensor, routing: str) -> Tensor | None:
        """Entries, tokens of selected blocks and tokens of the window, together."""
        own, stride = self.own, self.stride
        entries = (positions + 1) // stride - own.overlap + 1
        size = stride * own.block
        blocks = (positions // size).clamp_max(own.selected - 1)
        window = (positions + 1).clamp_max(self.tokens(own.window))
        return entries.clamp_min(0) + positions % size + 1 + size * blocks + window

    def prepare(self, call: Call) -> _State:
        assert call.hidden is not None
        strides = make_blocks(call, self.stride)
        blocks = make_blocks(call, self.stride * self.own.block)
        keys = self._entries(call.k, self.key_weights, self.key_map, strides)
        values = self._entries(call.v, self.value_weights, self.value_map, strides)
        gates = torch.sigmoid(F.linear(call.hidden, self.gate.weight.to(call.hidden.dtype)))
        return _State(
            strides, blocks, keys, values, gates.unflatten(-1, (3, -1)).permute(0, 2, 3, 1)
        )

    def _entries(self, x: Tensor, weights: Tensor, linear: Tensor, strides: Blocks) -> Tensor:
        """[B, K, G, D]; unfinished entries are incomplete sums."""
        total = torch.zeros((), dtype=x.dtype, device=x.device)
        for part in range(self.own.overlap):
            weight_BS = weights.to(x.dtype)[strides.place + part * self.stride]
            sums = strides.sum(x * weight_BS[:, None, :, None])
            # The stride `part` further on belongs to this entry.
            total = total + F.pad(sums, (0, 0, 0, part))[:, :, part:]
        return total @ linear.to(x.dtype).T

    def attend_chunk(self, call: Call, chunk: Chunk, state: _State) -> Tensor:
        strides, own = state.strides, self.own
        read = strides.until(chunk, own.overlap)
        entries = capped(grouped_product(chunk.q, state.keys) * call.scale, call.softcap)
        entries = entries.masked_fill(~read, -torch.inf)
        selected = self._selected(entries, call, chunk, state)
        tokens = self._tokens_by_runs if reads_runs(call) else self._tokens_by_scores
        branches = [weigh(entries, state.values), *tokens(selected, call, chunk, state)]
        gates = state.gates[..., chunk.queries].unbind(dim=1)
        return sum(gate[..., None] * out for gate, out in zip(gates, branches, strict=True))  # pyright: ignore[reportReturnType]

    def _tokens_by_runs(
        self, selected: Tensor, call: Call, chunk: Chunk, state: _State
    ) -> list[Tensor]:
        """Outputs of the selected blocks and of the window, by the kernels."""
        slots = chunk.queries + call.k.shape[2] - call.q.shape[2]
        nearest = chunk.layout.query_positions.clamp_max(self.tokens(self.own.window) - 1)
        shape = (len(call.k), call.k.shape[1], len(slots), 1)
        window = ((slots - nearest)[:, None, :, None], (slots + 1)[:, None])
        runs = (state.blocks.runs(selected, slots), (x.expand(shape) for x in window))
        scores = {"scale": call.scale, "softcap": call.softcap}
        return [attend_runs(chunk.q, call.k, call.v, *each, **scores) for each in runs]

    def _tokens_by_scores(
        self, selected: Tensor, call: Call, chunk: Chunk, state: _State
    ) -> list[Tensor]:
        """The same by torch operators."""
        scores = self.scores(call, chunk, state)
        selected = state.blocks.to_keys(selected)
        selected = selected.repeat_interleave(scores.shape[1] // selected.shape[1], dim=1)
        near = chunk.layout.distances()[:, None] < self.tokens(self.own.window)
        read = (chunk.exists & selected, chunk.exists & near)
        return [weigh(scores.masked_fill(~pairs, -torch.inf), call.v) for pairs in read]

    def _selected(self, entries: Tensor, call: Call, chunk: Chunk, state: _State) -> Tensor:
        """The blocks that each group of heads reads, [B, K, t, J]."""
        blocks, groups = state.blocks, call.k.shape[1]
        weights = row_weights(entries.detach()).unflatten(1, (groups, -1)).sum(dim=2)
        block_of_stride = torch.zeros_like(state.strides.index).scatter(
            1, state.strides.of_key, blocks.of_key
        )
        score = weights.new_zeros(*weights.shape[:3], blocks.index.shape[1])
        for part in range(self.own.overlap):
            # A finished entry's strides follow each other in its document.
            target = F.pad(block_of_stride, (0, part), value=0)[:, part:]
            score = score.scatter_add(3, target[:, None, None].expand(weights.shape), weights)
        own_Bt1, _ = blocks.own(chunk)
        index_B1J = blocks.index[:, None]
        before = blocks.before(chunk)
        forced = before & ((index_B1J == 0) | (index_B1J == own_Bt1 - 1))[:, None]
        # Scores are sums of probabilities: forced blocks come first.
        score = score.masked_fill(forced, torch.inf)
        return largest(score, before, self.own.selected - 1) | blocks.is_own(chunk)
