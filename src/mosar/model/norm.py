"""RMSNorm as in Gemma 2: x / sqrt(mean(x^2) + eps) * (1 + w), computed in float32."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mosar.kernels.elementwise import rms_norm


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension; a weight of 0 is a factor of 1."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}"
