"""Modes that leave out pairs before any product q·k.

    streaming   the first 4 tokens and the last w = N/4 - 4; positions are those in the cache: the
                first ones stand directly before the window, at distance w + 3 - s
    lex         blocks of N/2: a query reads its own block and the one before, which is everything
                up to the training length
    acp         of `fox`: pairs with c_i - c_j < ln(eps) - 2 U_i - ln(i + 1), where U_i bounds every
                |score| of query i. c falls, so a query keeps its nearest keys, and it loses at most
                eps of its weight

Shapes: B batch, H query heads, K key/value heads, T queries, S keys, D head dim.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from mosar.core.inputs import check_attention_inputs
from mosar.core.reference_attention import dense_attention
from mosar.geometries.alibi import Alibi
from mosar.geometries.chunked import PAIRS, kernels_serve
from mosar.geometries.fox import Forgetting, forgotten
from mosar.geometries.geometry import Attended, Geometry, plain_attention
from mosar.geometries.learned_distance import T5Bias
from mosar.geometries.mode import Mode, TextMode
from mosar.geometries.rope import HighFrequencyRope, Rope
from mosar.geometries.xpos import XPos
from mosar.kernels.native import attend_runs


class Streaming(TextMode):
    """Sinks and a window: a cache of constant size."""

    name, source = "streaming", "Xiao et al. 2024 (StreamingLLM)"
    geometries = (Geometry, Rope, HighFrequencyRope, XPos, Alibi, T5Bias)
    sinks = 4

    @property
    def window(self) -> int:
        """How many of the last tokens are read, including the query's own."""
        return max(1, self.geometry.tokens(1 / 4) - self.sinks)

    def attend_text(self, q: Tensor, k: Tensor, v: Tensor, **scores: Any) -> tuple[Tensor, float]:
        (rows, _, length, _), sinks, window = q.shape, self.sinks, self.window
        at = torch.arange(length, device=q.device)[None]
        in_cache = at.clamp_max(window + sinks - 1)
        # Rotate the query back to its place in the cache: shifts are negative, so no table serves.
        moved = self.geometry.transform(
            *(q.transpose(1, 2), q.transpose(1, 2)[:, :, :0]), *2 * ((in_cache - at).to(q.dtype),)
        )[0]
        options = {"routing": "soft", "return_lse": True, **scores}
        first, _ = self.geometry.attend(
            *(moved.transpose(1, 2), k[:, :, :sinks], v[:, :, :sinks]),
            query_positions=in_cache.expand(rows, -1),
            key_positions=at[:, :sinks].expand(rows, -1),
            **options,
        )
        last, _ = self.geometry.attend(
            *(q, k, v), window=window - 1, key_valid=(at >= sinks).expand(rows, -1), **options
        )
        read = (at + 1).clamp_max(window + sinks).sum().item()
        return merge(*first, *last), rows * read


def merge(first: Tensor, first_lse: Tensor, second: Tensor, second_lse: Tensor) -> Tensor:
    """Attention over two sets of keys, from the outputs and the log-sum-exps of each."""
    lse = torch.logaddexp(first_lse, second_lse)
    weights = ((part - lse).exp()[..., None] for part in (first_lse, second_lse))
    parts = (w * x for w, x in zip(weights, (first, second), strict=True))
    return sum(parts).to(first.dtype)  # pyright: ignore[reportAttributeAccessIssue]


class BlockwiseCausal(TextMode):
    """A window that jumps from block to block."""

    name, source = "lex", "Sun et al. 2022 (LEX)"
    geometries = (XPos,)

    def attend_text(self, q: Tensor, k: Tensor, v: Tensor, **scores: Any) -> tuple[Tensor, float]:
        size, (rows, _, length, _) = self.geometry.tokens(1 / 2), q.shape
        out, read = [], 0
        for start in range(0, length, size):
            keys = slice(max(0, start - size), min(start + size, length))
            part = q[:, :, start : keys.stop]
            out.append(plain_attention(part, k[:, :, keys], v[:, :, keys], **scores))
            queries = part.shape[2]
            read += queries * (start - keys.start) + queries * (queries + 1) // 2
        return torch.cat(out, dim=2), rows * read


class AdaptivePruning(Mode):
    """Pairs whose forget gates leave nothing of them; a window per query and head."""

    name, source = "acp", "Lin et al. 2025 (ACP)"
    geometries = (Forgetting,)
    lost = math.exp(-10)
    """eps, the most of a query's weight that may be dropped."""
    _counted: tuple[float, int] | None = None

    def attend(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Attended:
        """As `Geometry.attend`; counts the pairs that are kept."""
        sum_BHS = forgotten(options.pop("notes"), options.get("key_valid"))
        for name in ("hidden", "routing"):
            options.pop(name, None)
        return self._attend(q, k, v, sum_BHS, **options), None

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sum_BHS: Tensor,
        *,
        scale: float,
        softcap: float | None,
        **placement: Any,
    ) -> Tensor:
        """By the kernels where they serve, else by torch operators, some queries at a time."""
        layout = check_attention_inputs(q, k, v, scale, softcap, **placement)
        past = k.shape[2] - q.shape[2]
        norm_BKS = k.norm(dim=-1)
        if layout.key_valid is not None:
            norm_BKS = norm_BKS.masked_fill(~layout.key_valid[:, None], 0)
        norm_BHS = norm_BKS.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
        largest_BHT = norm_BHS.cummax(dim=-1).values[..., past:]
        bound_BHT = abs(scale) * q.norm(dim=-1) * largest_BHT
        if softcap is not None:
            bound_BHT = bound_BHT.clamp_max(softcap)
        keys = torch.arange(past + 1, k.shape[2] + 1, device=q.device, dtype=q.dtype)
        lowest_BHT = math.log(self.lost) - 2 * bound_BHT - keys.log()
        if layout.is_ordinary and past == 0 and kernels_serve(q):
            return self._attend_runs(q, k, v, sum_BHS, lowest_BHT, scale, softcap)
        kept, existing, parts = 0, 0, []
        size = max(1, PAIRS // k.shape[2])
        for queries in torch.arange(q.shape[2], device=q.device).split(size):
            part, at = layout.of_queries(queries), queries + past
            bias_BHtS = sum_BHS[..., at, None] - sum_BHS[:, :, None]
            exists = part.exists()[:, None].expand(bias_BHtS.shape)
            admissible = exists & (bias_BHtS >= lowest_BHT[..., queries, None])
            kept, existing = kept + int(admissible.sum()), existing + int(exists.sum())
            out, _, _ = dense_attention(
                *(q[:, :, queries], k, v),
                bias=bias_BHtS,
                admissible=admissible,
                key_valid=part.key_valid,
                scale=scale,
                softcap=softcap,
            )
            parts.append(out)
        self._counted = kept / q.shape[1], existing // q.shape[1]
        return torch.cat(parts, dim=2)

    def _attend_runs(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sum_BHS: Tensor,
        lowest_BHT: Tensor,
        scale: float,
        softcap: float | None,
    ) -> Tensor:
        """The same by the kernels: c falls, so what a query keeps is one run up to itself."""
        first = torch.searchsorted(-sum_BHS, lowest_BHT - sum_BHS)
        end = torch.arange(1, q.shape[2] + 1).expand(first.shape)
        batch, heads, length = first.shape
        kept = (end - first).sum().item() / heads
        self._counted = kept, batch * length * (length + 1) // 2
        runs, scores = (first[..., None], end[..., None]), {"scale": scale, "softcap": softcap}
        return attend_runs(q, k, v, *runs, key_bias=-sum_BHS, **scores)

    def count_pairs(self, shape: tuple[int, int], **options: Any) -> tuple[float, int] | None:
        return self._counted
