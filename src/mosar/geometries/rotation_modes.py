"""Modes of a trained `rope`: its rotations rescaled for texts that are longer than in training.

    pi, ntk, yarn   one set of frequencies for the whole text, by its length L = s N
    dynamic-ntk     ntk with s of the text so far, keys and query alike; s grows by steps of 1/8

Dynamic NTK is what decoding computes that keeps unrotated keys, with lengths rounded up to
multiples of N/8. transformers rescales a whole text by its own length instead: that is `ntk`.

Shapes: B batch, H query heads, K key/value heads, T tokens, D head dim.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from mosar.core.positional import rescaled_frequencies, rotate
from mosar.geometries.geometry import plain_attention, wide_dtype
from mosar.geometries.mode import Mode, TextMode
from mosar.geometries.rope import Rope


class Rescaled(Mode):
    """Frequencies that follow from the length of the text; up to N those of the training."""

    geometries = (Rope,)
    prefix_invariant = False

    def transform(self, q: Tensor, k: Tensor, at_q: Tensor, at_k: Tensor) -> tuple[Tensor, Tensor]:
        stretch = self.length / self.geometry.shape.max_length
        if stretch <= 1:
            return super().transform(q, k, at_q, at_k)
        turned = (
            rescaled(self.name, self.geometry, x, at, stretch) for x, at in ((q, at_q), (k, at_k))
        )
        return next(turned), next(turned)


class PositionInterpolation(Rescaled):
    name, source = "pi", "Chen et al. 2023 (position interpolation)"


class NTK(Rescaled):
    name, source = "ntk", "NTK-aware scaling (2023)"


class YaRN(Rescaled):
    name, source = "yarn", "Peng et al. 2023 (YaRN)"


class DynamicNTK(TextMode):
    """Each query turns itself and the keys before it by the length that has been read."""

    name, source = "dynamic-ntk", "dynamic NTK scaling (2023)"
    geometries = (Rope,)
    steps = 8
    """How often the scale grows within a training length."""

    def transform(self, q: Tensor, k: Tensor, at_q: Tensor, at_k: Tensor) -> tuple[Tensor, Tensor]:
        """Not yet: the angle of a key depends on the query."""
        return q, k

    def attend_text(self, q: Tensor, k: Tensor, v: Tensor, **scores: Any) -> tuple[Tensor, float]:
        trained, (rows, _, length, _) = self.geometry.shape.max_length, q.shape
        step = max(1, trained // self.steps)
        out, start, end = [], 0, trained
        while start < length:
            keys = slice(0, min(end, length))
            parts = q[:, :, start:end], k[:, :, keys]
            turned = self._turned(*parts, end / trained)
            out.append(plain_attention(*turned, v[:, :, keys], **scores))
            start, end = end, end + step
        return torch.cat(out, dim=2), rows * length * (length + 1) / 2

    def _turned(self, q: Tensor, k: Tensor, stretch: float) -> tuple[Tensor, Tensor]:
        """The last queries and all keys up to them, [B, H, T, D] and [B, K, S, D]."""
        at_k = torch.arange(k.shape[2], device=k.device)[None]
        at_q = at_k[:, k.shape[2] - q.shape[2] :]
        q, k = q.transpose(1, 2), k.transpose(1, 2)
        if stretch <= 1:
            q, k = self.geometry.transform(q, k, at_q, at_k)
        else:
            q, k = (
                rescaled("ntk", self.geometry, x, at, stretch) for x, at in ((q, at_q), (k, at_k))
            )
        return q.transpose(1, 2), k.transpose(1, 2)


def rescaled(name: str, geometry: Any, x: Tensor, at: Tensor, stretch: float) -> Tensor:
    """x [B, T, any heads, D] of a `Rope` turned as in a text `stretch` times as long as N."""
    shape, dtype = geometry.shape, wide_dtype(x)
    frequencies, factor = rescaled_frequencies(
        *(name, shape.head_dim, geometry.attention.rope_theta, shape.max_length, stretch)
    )
    frequencies[math.floor(geometry.fraction * len(frequencies) + 1e-9) :] = 0
    angles = at[..., None].to(dtype) * frequencies.to(at.device, dtype)
    return rotate(x, (factor * angles.cos())[:, :, None], (factor * angles.sin())[:, :, None])
