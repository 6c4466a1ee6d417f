"""FoX, the Forgetting Transformer: every token says how much of the past is forgotten.

    f_t = sigmoid(w_h·x_t + b_h),   bias(i, j) = sum over l = j+1..i of ln f_l = c_i - c_j

c is the running sum of ln f, and c_i cancels in the softmax: the bias is -c_j, one number per key
and head. No rotation. After Lin et al., "Forgetting Transformer: Softmax Attention with a Forget
Gate" (2025), without the additions of its Pro block.

Shapes: B batch, H query heads, T tokens, S keys, C hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mosar.attention import Routing, distance_attention
from mosar.geometries.config import AttentionConfig
from mosar.geometries.geometry import Attended, Geometry, HeadShape, wide_dtype
from mosar.geometries.own_settings import OwnSettings, setting


class Forgetting(Geometry):
    """A forget gate per token and query head, from the layer's input."""

    family, reads_hidden, learns = "routing", True, "a forget gate per head"
    adaptive, decay = True, "learned"
    source = "Lin et al. 2025 (FoX)"
    checked = "its law; flash-linear-attention"
    of_heads = ("weight", "bias")

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

    def note_bytes(self, width: int) -> int:
        # Sums of logarithms are not kept in half precision.
        return max(4, width) * self.kept_notes

    def note(self, q: Tensor, k: Tensor, hidden: Tensor | None) -> Tensor:
        """ln f of every token, [B, H, T]."""
        assert hidden is not None
        return log_forget(hidden, self.weight, self.bias)

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
        key_bias = -forgotten(notes, options.get("key_valid"))
        return distance_attention(q, k, v, key_bias=key_bias, **options), None

    def init_parameter(self, name: str, parameter: Tensor, generator: torch.Generator) -> None:
        if name == "bias":
            parameter.fill_(self.own.gate_bias)
        else:
            super().init_parameter(name, parameter, generator)


def log_forget(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """ln f [B, H, T] of hidden [B, T, C], with weight [H, C] and bias [H]."""
    dtype = wide_dtype(hidden)
    # Sums of logarithms in lower precision would lose the tail.
    with torch.autocast(hidden.device.type, enabled=False):
        logits = F.linear(hidden.to(dtype), weight.to(dtype), bias.to(dtype))
        return F.logsigmoid(logits).transpose(1, 2)


def forgotten(notes: Tensor, key_valid: Tensor | None) -> Tensor:
    """c, the running sum of ln f over the valid tokens, [B, H, S] float64."""
    log_f = notes.double()
    if key_valid is not None:
        log_f = log_f.masked_fill(~key_valid[:, None], 0)
    return log_f.cumsum(dim=-1)
