"""One regime for every pair, over RoPE: as a smooth gate (`fixed`) or as a hard window."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mosar.attention import Routing, distance_attention, mosar_attention
from mosar.core.config import MoSARConfig
from mosar.core.regimes import RegimeKernel, gate_extent
from mosar.core.routers import forced_routing
from mosar.geometries.config import AttentionConfig
from mosar.geometries.geometry import Attended, HeadShape, wide_dtype
from mosar.geometries.rope import Rope
from mosar.kernels.tables import cached_table, has_table


class OneRegime(Rope):
    """RoPE, and the regime that `attention.regime` names."""

    settings = Rope.settings | {"regime", "regimes"}
    source, checked = "MoSAR", "its law"

    def __init__(self, attention: AttentionConfig, shape: HeadShape):
        super().__init__(attention, shape)
        self.config = attention.mosar_config(shape.max_length)
        if attention.regime is None:
            names = [regime.name for regime in self.config.regimes]
            raise ValueError(f"geometry {attention.geometry!r} needs a regime, one of {names}")
        self.regime = self.config.regime_index(attention.regime)

    @property
    def reach(self) -> float:
        return self.config.regimes[self.regime].reach

    def reaches(self) -> dict[str, float]:
        return {self.config.regimes[self.regime].name: self.reach}


class Fixed(OneRegime):
    """The gate of one regime for every pair; under "sparse" routing it ends at the reach."""

    settings, family = OneRegime.settings | {"barrier", "exponent"}, "distance"
    decay = "fixed"

    def __init__(self, attention: AttentionConfig, shape: HeadShape):
        super().__init__(attention, shape)
        if attention.num_sinks:
            raise ValueError(
                "num_sinks must be 0 where geometry is 'fixed': its bias is by distance"
            )

    def band(self, routing: str) -> float | None:
        everywhere = routing != "sparse" or self.regime == self.config.global_index
        return None if everywhere else self.reach

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, *, routing: Routing, **options: Any
    ) -> Attended:
        if not has_table(self.config):
            # For so long a reach, the operator that computes gates serves.
            pi_q, pi_k = (
                forced_routing(
                    self.config, self.regime, *x.shape[:3:2], dtype=wide_dtype(q), device=q.device
                )
                for x in (q, k)
            )
            routing = "sparse" if routing == "sparse" else "top1"
            return mosar_attention(
                q, k, v, pi_q, pi_k, self.config, routing=routing, **options
            ), None
        log_gate = _log_gate(self.config, self.regime).to(q.device, wide_dtype(q))
        out = distance_attention(
            q, k, v, log_gate=log_gate, log_gate_extends=True, window=self.band(routing), **options
        )
        return out, None


class RopeMask(OneRegime):
    """A hard window: pairs farther than the regime's reach do not exist."""

    family = "window"

    def band(self, routing: str) -> float | None:
        return self.reach

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, *, routing: Routing, **options: Any
    ) -> Attended:
        return distance_attention(q, k, v, window=self.reach, **options), None


@cached_table
def _log_gate(config: MoSARConfig, regime: int) -> Tensor:
    """log g_mm(d) by distance, [1, length] float64; constant past its end."""
    distances = torch.arange(gate_extent(config))
    return RegimeKernel(config)(distances, torch.float64)[:, regime, regime].log()[None]
