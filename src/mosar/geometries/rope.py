"""Rotary positions: q and k turn by angles that grow with their position.

    (x_i, x_{i + D/2}) turns by position * theta^(-2 i / D)

Shapes: B batch, H query heads, K key/value heads, T queries, S keys, D head dim.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mosar.core.positional import RESCALINGS, rescaled_frequencies, rotate, rotation
from mosar.geometries.config import AttentionConfig
from mosar.geometries.geometry import Geometry, HeadShape, wide_dtype


class Rope(Geometry):
    """Rotation of q and k by their positions; below `rope_fraction` 1 the slowest do not turn."""

    settings = frozenset({"rope_theta", "rope_fraction"})
    source = "Su et al. 2021 (RoPE)"

    def __init__(self, attention: AttentionConfig, shape: HeadShape):
        super().__init__(attention, shape)
        if shape.head_dim % 2:
            raise ValueError(f"rotation pairs dimensions: head_dim must be even, got {shape}")

    @property
    def fraction(self) -> float:
        """The share of the frequencies that rotate, highest first."""
        return self.attention.rope_fraction

    def transform(self, q: Tensor, k: Tensor, at_q: Tensor, at_k: Tensor) -> tuple[Tensor, Tensor]:
        if self.mode is not None and self.mode[1] > self.shape.max_length:
            turns = [self._rescaled(at, wide_dtype(q)) for at in (at_q, at_k)]
            return rotate(q, *turns[0]), rotate(k, *turns[1])
        settings = {
            "theta": self.attention.rope_theta,
            "fraction": self.fraction,
            "dtype": wide_dtype(q),
        }
        turn_q = rotation(at_q, self.shape.head_dim, **settings)
        turn_k = turn_q if at_k is at_q else rotation(at_k, self.shape.head_dim, **settings)
        return rotate(q, *turn_q), rotate(k, *turn_k)

    @property
    def modes(self) -> tuple[str, ...]:
        """Rescaled rotations, of a model that has nothing else."""
        return RESCALINGS if type(self) is Rope else ()

    def _rescaled(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """As `rotation`, of the mode; its factor is in cos and sin."""
        assert self.mode is not None
        (name, length), shape = self.mode, self.shape
        frequencies, factor = rescaled_frequencies(
            *(name, shape.head_dim, self.attention.rope_theta),
            *(shape.max_length, length / shape.max_length),
        )
        frequencies[math.floor(self.fraction * len(frequencies) + 1e-9) :] = 0
        angles = positions[..., None].to(dtype) * frequencies.to(positions.device, dtype)
        return (factor * angles.cos())[:, :, None], (factor * angles.sin())[:, :, None]

    def turn(self, x: Tensor, at: Tensor) -> Tensor:
        """x [B, T, any heads, D] rotated to the positions [B or 1, T]."""
        return Rope.transform(self, x, x[:, :, :0], at, at)[0]


class HighFrequencyRope(Rope):
    """HoPE-high: only frequencies that turn once within the training length rotate.

    After Chen et al., "HoPE: A Novel Positional Encoding Without Long-Term Decay" (2024).
    """

    settings = frozenset({"rope_theta"})
    source = "Chen et al. 2024 (HoPE)"

    @property
    def fraction(self) -> float:
        """The wavelength of frequency i is 2 pi theta^(2 i / D): those up to N rotate."""
        pairs, turns = self.shape.head_dim // 2, self.shape.max_length / (2 * math.pi)
        wavelengths = (self.attention.rope_theta ** (i / pairs) for i in range(pairs))
        return sum(length <= turns for length in wavelengths) / pairs
