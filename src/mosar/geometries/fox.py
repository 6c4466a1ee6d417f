"""FoX, the Forgetting Transformer: every token says how much of the past is forgotten.

    f_t = sigmoid(w_h·x_t + b_h),   bias(i, j) = sum over l = j+1..i of ln f_l = c_i - c_j

c is the running sum of ln f, and c_i cancels in the softmax: the bias is -c_j, one number per key
and head. No rotation. After Lin et al., "Forgetting Transformer: Softmax Attention with a Forget
Gate" (2025), without the additions of its Pro block.

The mode "acp" (Lin et al., "Adaptive Computation Pruning for the Forgetting Transformer", 2025)
drops pairs before any q·k: those with c_i - c_j < ln(eps) - 2 U_i - ln(i + 1), where U_i bounds
every |score| of query i. c falls, so a query keeps its nearest keys, and it loses at most eps of
its weight.

Shapes: B batch, H query heads, T tokens, S keys, C hidden size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mosar.attention import Routing, distance_attention
from mosar.core.inputs import check_attention_inputs
from mosar.core.reference_attention import dense_attention
from mosar.geometries.chunked import PAIRS
from mosar.geometries.config import AttentionConfig
from mosar.geometries.geometry import Attended, Geometry, HeadShape, wide_dtype
from mosar.geometries.own_settings import OwnSettings, setting

# The most of a query's weight that the mode may drop.
_LOST = math.exp(-10)


class Forgetting(Geometry):
    """A forget gate per token and query head, from the layer's input."""

    family, reads_hidden = "routing", True
    source = "Lin et al. 2025 (FoX)"
    _counted: tuple[float, int] = (0.0, 0)
    checked = "its law; flash-linear-attention"

    @dataclass(frozen=True, kw_only=True)
    class Own(OwnSettings):
        gate_bias: float = setting(0.0)
        """b at the start: 0 forgets half at every token, 5 hardly anything."""

    def __init__(self, attention: AttentionConfig, shape: HeadShape):
        super().__init__(attention, shape)
        self.weight = nn.Parameter(torch.zeros(shape.num_heads, shape.hidden_size))
        self.bias = nn.Parameter(torch.zeros(shape.num_heads))

    @property
    def kept_notes(self) -> int:
        return self.shape.num_heads

    def note(self, q: Tensor, k: Tensor, hidden: Tensor | None) -> Tensor:
        """ln f of every token, [B, H, T]."""
        assert hidden is not None
        dtype = wide_dtype(hidden)
        # Sums of logarithms in lower precision would lose the tail.
        with torch.autocast(hidden.device.type, enabled=False):
            logits = F.linear(hidden.to(dtype), self.weight.to(dtype), self.bias.to(dtype))
            return F.logsigmoid(logits).transpose(1, 2)

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        routing: Routing,
        notes: Tensor,
        hidden: Tensor | None = None,
        **options: Any,
    ) -> Attended:
        log_f = notes.double()
        if options.get("key_valid") is not None:
            log_f = log_f.masked_fill(~options["key_valid"][:, None], 0)
        sum_BHS = log_f.cumsum(dim=-1)
        if self.mode is not None:
            return self._attend_pruned(q, k, v, sum_BHS, **options), None
        return distance_attention(q, k, v, key_bias=-sum_BHS, **options), None

    @property
    def modes(self) -> tuple[str, ...]:
        return ("acp",)

    def _attend_pruned(
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
        """Some queries at a time, by torch operators; counts the pairs that are kept."""
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
        lowest_BHT = math.log(_LOST) - 2 * bound_BHT - keys.log()
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

    def count_pairs(self, shape: tuple[int, int], **options: Any) -> tuple[float, int] | None:
        """In a mode, those of the text that was read last; else all are read."""
        return self._counted if options.get("routing") in self.modes else None

    def init_parameter(self, name: str, parameter: Tensor, generator: torch.Generator) -> None:
        if name == "bias":
            parameter.fill_(self.own.gate_bias)
        else:
            super().init_parameter(name, parameter, generator)
