"""Learned biases by distance, and no rotation: the buckets of T5 and the kernels of KERPLE.

    T5            bias[h, d] = table[h, bucket(d)]
    KERPLE log    bias[h, d] = -power_h ln(1 + rate_h d)
    KERPLE power  bias[h, d] = -rate_h d^power_h

Shapes: H query heads, S keys, d distance.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mosar.attention import Routing, distance_attention
from mosar.geometries.config import AttentionConfig
from mosar.geometries.geometry import Attended, Geometry, HeadShape, wide_dtype
from mosar.geometries.own_settings import OwnSettings, setting


class T5Bias(Geometry):
    """One number per head and bucket of distances; the last bucket holds all that are farther.

    After Raffel et al., "Exploring the Limits of Transfer Learning" (2020), with a table in each
    layer and the usual scale of the scores.
    """

    family, learns = "distance", "a bias per bucket"
    decay = "learned"
    source, checked = "Raffel et al. 2020 (T5)", "its law; transformers"
    of_heads = ("table",)

    @dataclass(frozen=True, kw_only=True)
    class Own(OwnSettings):
        buckets: int = setting(32, least=2)
        """Distances below half of them have a bucket each, the others share them by logarithm."""
        max_distance: int = setting(128, least=2)
        """From here on all distances share the last bucket."""

    def __init__(self, attention: AttentionConfig, shape: HeadShape):
        super().__init__(attention, shape)
        if self.own.max_distance <= self.own.buckets // 2:
            raise ValueError(
                f"own.max_distance must be above half of own.buckets={self.own.buckets}, "
                f"got {self.own.max_distance}"
            )
        # A vector: biases are not decayed.
        self.table = nn.Parameter(torch.zeros(shape.num_heads * self.own.buckets))

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, *, routing: Routing, **options: Any
    ) -> Attended:
        table_Hb = self.table.to(wide_dtype(q)).unflatten(0, (-1, self.own.buckets))
        distances = torch.arange(self.own.max_distance + 1, device=q.device)
        log_gate = table_Hb[:, t5_bucket(distances, self.own.buckets, self.own.max_distance)]
        return distance_attention(
            q, k, v, log_gate=log_gate, log_gate_extends=True, **options
        ), None

    def init_parameter(self, name: str, parameter: Tensor, generator: torch.Generator) -> None:
        parameter.normal_(std=0.02, generator=generator)


def t5_bucket(distances: Tensor, buckets: int, max_distance: int) -> Tensor:
    """The bucket of each distance >= 0, as a causal T5 counts them.

    The logarithm is in float32, as it is there: in another precision borders would move.
    """
    exact = buckets // 2
    grown = torch.log(distances.float().clamp_min(1) / exact) / math.log(max_distance / exact)
    far = exact + (grown * (buckets - exact)).long()
    return torch.where(distances < exact, distances, far.clamp_max(buckets - 1))


class Kerple(Geometry):
    """Two numbers per head: how fast attention falls with distance, and by which power.

    After Chi et al., "KERPLE: Kernelized Relative Positional Embedding for Length Extrapolation"
    (2022), with numbers of its own in each layer.
    """

    family, learns = "distance", "rate and power per head"
    decay = "learned"
    source, checked = "Chi et al. 2022 (KERPLE)", "its law; ALiBi at power 1"
    of_heads = ("rate", "power")
    smallest = 0.01
    """Both are held at or above it, and the power at or below 2."""

    @dataclass(frozen=True, kw_only=True)
    class Own(OwnSettings):
        kernel: str = setting("log", among=("log", "power"))
        """How the bias grows with distance."""

    def __init__(self, attention: AttentionConfig, shape: HeadShape):
        super().__init__(attention, shape)
        self.rate = nn.Parameter(torch.zeros(shape.num_heads))
        self.power = nn.Parameter(torch.zeros(shape.num_heads))

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, *, routing: Routing, **options: Any
    ) -> Attended:
        dtype = wide_dtype(q)
        rate, power = (
            held_within(x.to(dtype)[:, None], self.smallest, most)
            for x, most in ((self.rate, None), (self.power, 2.0))
        )
        distances = torch.arange(k.shape[2], dtype=dtype, device=q.device)
        if self.own.kernel == "log":
            log_gate = -power * torch.log1p(rate * distances)
        else:
            log_gate = -rate * distances**power
        return distance_attention(q, k, v, log_gate=log_gate, **options), None

    def init_parameter(self, name: str, parameter: Tensor, generator: torch.Generator) -> None:
        parameter.uniform_(0, 2 if name == "power" else 1, generator=generator)


def held_within(x: Tensor, least: float, most: float | None = None) -> Tensor:
    """x clamped, with the gradient of x, so that values outside the range can return."""
    return x + (x.clamp(least, most) - x).detach()
