"""Rotary positions: q and k turn by angles that grow with their position.

    (x_i, x_{i + D/2}) turns by position * theta^(-2 i / D)

Shapes: B batch, H query heads, K key/value heads, T queries, S keys, D head dim.
"""

from __future__ import annotations

import math

from torch import Tensor

from mosar.core.positional import rotate, rotation
from mosar.geometries.config import AttentionConfig
from mosar.geometries.geometry import Geometry, HeadShape, wide_dtype


class Rope(Geometry):
    """Rotation of q and k by their positions; below `rope_fraction` 1 the slowest do not turn."""

    settings = frozenset({"rope_theta", "rope_fraction"})
    source, checked = "Su et al. 2021 (RoPE)", "its law; transformers"

    def __init__(self, attention: AttentionConfig, shape: HeadShape):
        super().__init__(attention, shape)
        if shape.head_dim % 2:
            raise ValueError(f"rotation pairs dimensions: head_dim must be even, got {shape}")

    @property
    def fraction(self) -> float:
        """The share of the frequencies that rotate, highest first."""
        return self.attention.rope_fraction

    def transform(self, q: Tensor, k: Tensor, at_q: Tensor, at_k: Tensor) -> tuple[Tensor, Tensor]:
        if self.fraction == 0:
            return q, k
        settings = {
            "theta": self.attention.rope_theta,
            "fraction": self.fraction,
            "dtype": wide_dtype(q),
        }
        turn_q = rotation(at_q, self.shape.head_dim, **settings)
        turn_k = turn_q if at_k is at_q else rotation(at_k, self.shape.head_dim, **settings)
        return rotate(q, *turn_q), rotate(k, *turn_k)

    def turn(self, x: Tensor, at: Tensor) -> Tensor:
        """x [B, T, any heads, D] rotated to the positions [B or 1, T]."""
        return Rope.transform(self, x, x[:, :, :0], at, at)[0]


class HighFrequencyRope(Rope):
    """HoPE-high: only frequencies that turn once within the training length rotate.

    After Chen et al., "HoPE: A Novel Positional Encoding Without Long-Term Decay" (2024).
    """

    settings = frozenset({"rope_theta"})
    source, checked = "Chen et al. 2024 (HoPE)", "its law; p-rope"

    @property
    def fraction(self) -> float:
        """The wavelength of frequency i is 2 pi theta^(2 i / D): those up to N rotate."""
        pairs, turns = self.shape.head_dim // 2, self.shape.max_length / (2 * math.pi)
        wavelengths = (self.attention.rope_theta ** (i / pairs) for i in range(pairs))
        return sum(length <= turns for length in wavelengths) / pairs
