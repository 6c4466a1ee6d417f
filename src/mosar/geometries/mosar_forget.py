"""MoSAR with FoX's forget gates: regimes say which pairs exist, gates how attention fades in them.

    bias_ij = log G(i - j) + sum over l = j+1..i of ln f_l,   f_t = sigmoid(w_h·x_t + b_h)

G is the gate of the two tokens' regimes, and a pair beyond the reach does not exist. Without a
rotation, so routers see no positions and do not meet new ones in longer texts. At the start a
quarter of the heads remember about N tokens (b = ln N), so that far links can be learnt; the others
forget half at every token (b = 0), which suits the start of a language model. Gates that do not
read their token, f_t = e^-slope_h with ALiBi's slopes, make it MoSAR over ALiBi. The
variant `mosar-plus` has learned ones.

Shapes: B batch, H query heads, T tokens, S keys, C hidden size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mosar.core.positional import alibi_slopes
from mosar.geometries.config import AttentionConfig
from mosar.geometries.fox import forgotten, log_forget
from mosar.geometries.geometry import HeadShape, ParameterPart, wide_dtype
from mosar.geometries.mosar import MoSAR
from mosar.geometries.own_settings import OwnSettings, setting


class ForgettingMoSAR(MoSAR):
    """Hard regimes, and a forget gate per token and query head from the layer's input."""

    reads_hidden = True
    learns = "routers and forget gates"
    source, checked = "MoSAR, Lin et al. 2025 (FoX)", "its law; fox if all is global"
    of_heads = ("forget_weight", "forget_bias")

    @dataclass(frozen=True, kw_only=True)
    class Own(OwnSettings):
        gates: str = setting("learned", among=("learned", "alibi"))
        """"learned": from the layer's input at each token; "alibi": ALiBi's slope of the head."""

    def __init__(self, attention: AttentionConfig, shape: HeadShape):
        super().__init__(attention, shape)
        if attention.hard_from != 0:
            raise ValueError(
                "hard_from must be 0 where geometry is 'mosar-forget' (soft routing has no forget "
                f"gates), got {attention.hard_from}"
            )
        if self.own.gates == "learned":
            self.forget_weight = nn.Parameter(torch.zeros(shape.num_heads, shape.hidden_size))
            self.forget_bias = nn.Parameter(torch.zeros(shape.num_heads))

    @property
    def kept_notes(self) -> int:
        return self.shape.num_heads

    def note_bytes(self, width: int) -> int:
        # The regime cache keeps running sums, in float64.
        return 8 * self.kept_notes

    def note(self, q: Tensor, k: Tensor, hidden: Tensor | None) -> Tensor:
        """ln f of every token, [B, H, T]."""
        assert hidden is not None
        if self.own.gates == "learned":
            return log_forget(hidden, self.forget_weight, self.forget_bias)
        slopes = alibi_slopes(self.shape.num_heads)[self.own_heads]
        log_f = -torch.tensor(slopes, dtype=wide_dtype(hidden), device=hidden.device)
        return log_f[:, None].expand(hidden.shape[0], -1, hidden.shape[1])

    def key_bias(self, notes: Tensor | None, key_valid: Tensor | None, cache: Any = None) -> Tensor:
        """-c, where c is the running sum of ln f; it goes on from the newest key of a cache."""
        assert notes is not None
        of_key = -forgotten(notes, key_valid)
        before = None if cache is None else cache.last_of_key
        return of_key if before is None else of_key + before[:, :, None]

    def parameter_parts(self) -> list[ParameterPart]:
        if self.own.gates != "learned":
            return super().parameter_parts()
        weights, biases = self.forget_weight.numel(), self.forget_bias.numel()
        gates = ParameterPart("forget gates", weights + biases, weights, "heads")
        return [*super().parameter_parts(), gates]

    def init_parameter(self, name: str, parameter: Tensor, generator: torch.Generator) -> None:
        if name == "forget_bias":
            parameter.zero_()
            parameter[-max(1, len(parameter) // 4) :] = math.log(self.shape.max_length)
        else:
            super().init_parameter(name, parameter, generator)
