"""MoSAR with FoX's forget gates: regimes say which pairs exist, gates how attention fades in them.

    bias_ij = log G(i - j) + sum over l = j+1..i of ln f_l,   f_t = sigmoid(w_h·x_t + b_h)

G is the gate of the two tokens' regimes, and a pair beyond the reach does not exist. Without a
rotation, so routers see no positions and do not meet new ones in longer texts. At the start a
quarter of the heads remember about N tokens (b = ln N), so that far links can be learnt; the others
forget half at every token (b = 0), which suits the start of a language model.

Shapes: B batch, H query heads, K key/value heads, Gr routing groups, T queries, S keys, D head dim,
C hidden size.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from mosar.attention import Routing, attend
from mosar.geometries.config import AttentionConfig
from mosar.geometries.fox import forgotten, log_forget
from mosar.geometries.geometry import Attended, HeadShape, LayerRouting, ParameterPart
from mosar.geometries.mosar import MoSAR


class ForgettingMoSAR(MoSAR):
    """Hard regimes, and a forget gate per token and query head from the layer's input."""

    reads_hidden = True
    learns = "routers and forget gates"
    source, checked = "MoSAR, Lin et al. 2025 (FoX)", "its law; fox if all is global"

    def __init__(self, attention: AttentionConfig, shape: HeadShape):
        super().__init__(attention, shape)
        if attention.hard_from != 0:
            raise ValueError(
                "hard_from must be 0 where geometry is 'mosar-forget' (soft routing has no forget "
                f"gates), got {attention.hard_from}"
            )
        self.forget_weight = nn.Parameter(torch.zeros(shape.num_heads, shape.hidden_size))
        self.forget_bias = nn.Parameter(torch.zeros(shape.num_heads))

    @property
    def kept_notes(self) -> int:
        # A float64 for each head is two numbers.
        return 2 * self.shape.num_heads

    def note(self, q: Tensor, k: Tensor, hidden: Tensor | None) -> Tensor:
        """ln f of every token, [B, H, T]."""
        assert hidden is not None
        return log_forget(hidden, self.forget_weight, self.forget_bias)

    def route(self, q: Tensor, k: Tensor, hidden: Tensor | None = None) -> LayerRouting:
        return super().route(q, k)

    def attend_routed(self, q: Tensor, k: Tensor, v: Tensor, bias: Any, **options: Any) -> Any:
        bias = replace(bias, of_key=self.key_bias(**options))
        del options["notes"]
        return attend(q, k, v, bias, **options)

    def key_bias(self, *, notes: Tensor, key_valid: Tensor | None = None, **options: Any) -> Tensor:
        """-c: of two tokens, c_i - c_j is what is forgotten between them."""
        return -forgotten(notes, key_valid)

    def attend_cached(
        self, q: Tensor, k: Tensor, v: Tensor, cache: Any, *, notes: Tensor, **options: Any
    ) -> Attended:
        of_key = self._continued(cache, notes, options["key_valid"])
        return super().attend_cached(q, k, v, cache, of_key=of_key, **options)

    def store(
        self,
        k: Tensor,
        v: Tensor,
        cache: Any,
        told: LayerRouting | Tensor | None,
        routing: Routing,
        key_positions: Tensor | None,
        key_valid: Tensor | None,
        notes: Tensor | None = None,
    ) -> None:
        assert isinstance(told, LayerRouting) and notes is not None
        of_key = self._continued(cache, notes, key_valid)
        placement = {"key_positions": key_positions, "key_valid": key_valid}
        cache.update_routed(k, v, told, of_key=of_key, **placement)

    def _continued(self, cache: Any, notes: Tensor, key_valid: Tensor | None) -> Tensor:
        """The running sum of new tokens, from that of the cache on, [B, H, S]."""
        of_key, before = self.key_bias(notes=notes, key_valid=key_valid), cache.last_of_key
        return of_key if before is None else of_key + before[:, :, None]

    def parameter_parts(self) -> list[ParameterPart]:
        count, weights = (self.forget_weight.numel() + len(self.forget_bias)), len(self.forget_bias)
        gates = ParameterPart("forget gates", count, count - weights, "heads")
        return [*super().parameter_parts(), gates]

    def init_parameter(self, name: str, parameter: Tensor, generator: torch.Generator) -> None:
        if name == "forget_bias":
            parameter.zero_()
            parameter[-max(1, len(parameter) // 4) :] = math.log(self.shape.max_length)
        elif name == "forget_weight":
            parameter.normal_(std=0.02, generator=generator)
        else:
            super().init_parameter(name, parameter, generator)
