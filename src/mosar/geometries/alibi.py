"""ALiBi: a bias that falls linearly with distance, bias = -slope_h d."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mosar.attention import Routing, distance_attention
from mosar.core.positional import alibi_slopes
from mosar.geometries.geometry import Attended, Geometry, wide_dtype


class Alibi(Geometry):
    """A bias of -slope * distance, one slope per head, and no rotation."""

    family, decay = "distance", "fixed"
    source = "Press et al. 2022 (ALiBi)"

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, *, routing: Routing, **options: Any
    ) -> Attended:
        slopes = alibi_slopes(self.shape.num_heads)[self.own_heads]
        slopes = torch.tensor(slopes, dtype=wide_dtype(q), device=q.device)
        return distance_attention(q, k, v, slopes=slopes, **options), None
