"""Cross-entropy of every token, and its means over windows and over positions.

Shapes: B windows, T inputs each, C hidden size, V vocabulary.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from mosar.model.decoder import Decoder

# Logits that exist at a time, and rows that are worth a matrix product.
_CHUNK_LOGITS, _MIN_ROWS = 1 << 21, 64
_BUCKETS = 8


def token_losses(decoder: Decoder, hidden_BTC: Tensor, targets_BT: Tensor) -> Tensor:
    """Cross-entropy [B, T] in float32, without all logits at once."""
    rows = max(_MIN_ROWS, _CHUNK_LOGITS // decoder.model_config.vocab_size)
    parts = zip(hidden_BTC.flatten(0, 1).split(rows), targets_BT.flatten().split(rows), strict=True)
    losses = [
        F.cross_entropy(decoder.logits(hidden).float(), targets, reduction="none")
        for hidden, targets in parts
    ]
    return torch.cat(losses).view(targets_BT.shape)


def bucket_bounds(length: int, train_length: int) -> list[int]:
    """Eighths of the length, and the training length where it lies inside."""
    bounds = {length * eighth // _BUCKETS for eighth in range(_BUCKETS + 1)}
    if train_length < length:
        bounds.add(train_length)
    return sorted(bounds)


class LossTally:
    """Sums over the windows of one length."""

    def __init__(self, length: int, train_length: int):
        self.bounds = bucket_bounds(length, train_length)
        self._by_position_T = torch.zeros(length, dtype=torch.float64)
        self._windows: list[float] = []

    def add(self, losses_BT: Tensor) -> None:
        wide_BT = losses_BT.double().cpu()
        self._by_position_T += wide_BT.sum(dim=0)
        self._windows += wide_BT.mean(dim=1).tolist()

    @property
    def windows(self) -> int:
        return len(self._windows)

    @property
    def mean(self) -> float:
        return math.fsum(self._windows) / self.windows

    @property
    def stderr(self) -> float:
        """Standard error of the mean, from the windows' own means; 0 for a single window."""
        if self.windows < 2:
            return 0.0
        return float(torch.tensor(self._windows, dtype=torch.float64).std()) / self.windows**0.5

    def buckets(self) -> list[list[float]]:
        """[first position, end, mean, tokens] each."""
        rows = []
        for first, end in zip(self.bounds, self.bounds[1:], strict=False):
            tokens = (end - first) * self.windows
            rows.append([first, end, float(self._by_position_T[first:end].sum()) / tokens, tokens])
        return rows
