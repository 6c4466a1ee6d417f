"""xPos: rotary positions whose frequencies also fade with distance, the fast ones first.

    q at n: rotated, times zeta_i^(n / B)        zeta_i = (2 i / D + gamma) / (1 + gamma)
    k at m: rotated, times zeta_i^(-m / B)       frequency i of the pair: times zeta_i^((n - m) / B)

It is the logit that fades, not the weight: far keys end at the weight of a logit of 0. After Sun et
al., "A Length-Extrapolatable Transformer" (2022): gamma 0.4, and B 512 for a length of 1,024.

Shapes: B batch, H heads, T tokens, D head dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mosar.core.layout import can_check_values
from mosar.geometries.geometry import wide_dtype
from mosar.geometries.own_settings import OwnSettings, setting
from mosar.geometries.rope import Rope

# The factor of a key must stay a float32: 0.286^-60 is 4e32.
_LARGEST_EXPONENT = 60


class XPos(Rope):
    """Rotation, and a factor per frequency that depends on the distance of a pair."""

    decay = "fixed"
    source, checked = "Sun et al. 2022 (xPos)", "its law; rotary-embedding-torch"

    @dataclass(frozen=True, kw_only=True)
    class Own(OwnSettings):
        base: float = setting(0.5, above=0.0)
        """B, as a multiple of the training length."""
        gamma: float = setting(0.4, above=0.0)
        """How much of the fastest frequency is left at distance B: gamma / (1 + gamma)."""

    def transform(self, q: Tensor, k: Tensor, at_q: Tensor, at_k: Tensor) -> tuple[Tensor, Tensor]:
        rotated_q, rotated_k = super().transform(q, k, at_q, at_k)
        fade_q, fade_k = self._fade(at_q, wide_dtype(q)), self._fade(at_k, wide_dtype(k))
        faded = rotated_q * fade_q, rotated_k / fade_k
        return faded[0].to(q.dtype), faded[1].to(k.dtype)

    def _fade(self, positions: Tensor, dtype: torch.dtype) -> Tensor:
        """zeta^(position / B), [B or 1, T, 1, D]."""
        base, gamma = self.own.base * self.shape.max_length, self.own.gamma
        if can_check_values(positions) and positions.max() > _LARGEST_EXPONENT * base:
            raise ValueError(
                f"xpos computes positions up to {_LARGEST_EXPONENT * base:g} with "
                f"own.base={self.own.base:g}, got {int(positions.max())}"
            )
        half = torch.arange(0, self.shape.head_dim, 2, dtype=dtype, device=positions.device)
        log_zeta = torch.log((half / self.shape.head_dim + gamma) / (1 + gamma))
        exponents = positions[..., None].to(dtype) / base * log_zeta
        return exponents.exp().repeat(1, 1, 2)[:, :, None]
