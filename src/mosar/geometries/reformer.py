"""Reformer, causal: a query reads the keys of its own hash bucket.

    key_j = q_j / |q_j| (no projection of its own), bucket(x) = argmax [x R; -x R] before rotation
    pair (i, j) exists iff j < i and their buckets agree, and (i, i) at -5e4: only if nothing else

Chunks of sorted tokens, by which the authors bound the cost, let later tokens in; without them the
softmax over the union of all rounds is their formula. One round of hashing is a plan of the
kernels, sorted by bucket; for more rounds, documents, float64 or a GPU torch operators mask pairs.

Shapes: B batch, H heads, T queries, S keys, D head dim, r rounds.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mosar.geometries.chunked import (
    Call,
    Chunk,
    Chunked,
    capped,
    grouped_product,
    reads_runs,
)
from mosar.geometries.geometry import Attended
from mosar.geometries.own_settings import OwnSettings, setting
from mosar.geometries.rope import Rope
from mosar.kernels.native import attend_alike

_ITSELF = -5e4


class Reformer(Chunked, Rope):
    """RoPE after hashing; keys are made of queries, so `k_proj` is unused."""

    family = "window"
    reads_by_content = adaptive = native = True
    source, checked = "Kitaev et al. 2020 (Reformer)", "its law; reformer-pytorch"

    @dataclass(frozen=True, kw_only=True)
    class Own(OwnSettings):
        buckets: int = setting(16, least=2)
        """An even number; it does not grow with the length."""
        rounds: int = setting(1, least=1)
        """Number of hashes; a pair is read if one of them agrees."""

    @property
    def kept_notes(self) -> int:
        """Keys and values of every query head, not of the key heads alone."""
        return 2 * (self.shape.num_heads - self.shape.num_kv_heads) * self.shape.head_dim

    def forward(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Attended:
        if q.shape[1] != k.shape[1]:
            raise ValueError(
                "keys are made of queries where geometry is 'reformer': give as many, got "
                f"{q.shape[1]} queries and {k.shape[1]} keys"
            )
        v = v.repeat_interleave(q.shape[2] // v.shape[2], dim=2)
        return super().forward(q, F.normalize(q, dim=-1), v, **options)

    def transform(self, q: Tensor, k: Tensor, at_q: Tensor, at_k: Tensor) -> tuple[Tensor, Tensor]:
        """Not yet: tokens are hashed first."""
        return q, k

    def prepare(self, call: Call) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Rotated q and k, and the buckets of both, [B, H, r, T] and [B, H, r, S]."""
        rotations = hash_rotations(
            self.shape.layer, self.own.rounds, self.own.buckets // 2, self.shape.head_dim
        ).to(call.q)
        turned = [
            self.turn(x.transpose(1, 2), at).transpose(1, 2)
            for x, at in (
                (call.q, call.layout.query_positions),
                (call.k, call.layout.key_positions),
            )
        ]
        labels = []
        for x in (call.q, call.k):
            angles = torch.einsum("bhtd,rnd->bhrtn", x, rotations)
            labels.append(torch.cat([angles, -angles], dim=-1).argmax(dim=-1))
        return turned[0], turned[1], labels[0], labels[1]

    def attend_chunk(self, call: Call, chunk: Chunk, state: Any) -> Tensor:
        if not reads_runs(call) or call.given.key_segments is not None or self.own.rounds > 1:
            return super().attend_chunk(call, chunk, state)
        q, k, labels_q, labels_k = state
        first, last = int(chunk.queries[0]), int(chunk.queries[-1]) + 1
        seen = call.k.shape[2] - call.q.shape[2] + last
        out, pairs = attend_alike(
            *(q[:, :, first:last], k[:, :, :seen], call.v[:, :, :seen]),
            *(labels_q[:, :, 0, first:last], labels_k[:, :, 0, :seen], self.own.buckets),
            scale=call.scale,
            softcap=call.softcap,
        )
        if not torch.is_grad_enabled():
            existing = len(q) * int((seen - torch.arange(last - first)).sum())
            self._counted = self._counted[0] + pairs / q.shape[1], self._counted[1] + existing
        return out

    def scores(self, call: Call, chunk: Chunk, state: Any) -> Tensor:
        q, k, _, _ = state
        return capped(grouped_product(q[:, :, chunk.queries], k) * call.scale, call.softcap)

    def logits(self, scores: Tensor, call: Call, chunk: Chunk, state: Any) -> Tensor:
        _, _, labels_q, labels_k = state
        same = labels_q[..., chunk.queries, None] == labels_k[..., None, :]
        itself = (chunk.layout.distances() == 0)[:, None]
        read = chunk.exists & (same.any(dim=2) | itself)
        return scores.masked_fill(itself, _ITSELF).masked_fill(~read, -torch.inf)


@lru_cache(maxsize=64)
def hash_rotations(layer: int, rounds: int, half: int, head_dim: int) -> Tensor:
    """[rounds, half, D], random but the same in every run, so that runs can be resumed."""
    generator = torch.Generator().manual_seed(1_000_003 * (layer + 1))
    with torch.inference_mode(False), torch.device("cpu"):
        return torch.randn(rounds, half, head_dim, generator=generator, dtype=torch.float64)
