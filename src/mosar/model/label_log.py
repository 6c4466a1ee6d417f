"""The regimes that tokens chose, one byte each, from which a text's density is counted."""

from __future__ import annotations

import torch
from torch import Tensor


class LabelLog:
    """Labels [..., T] of one layer's queries or keys, appended as tokens are read."""

    def __init__(self):
        self._kept, self._count = torch.empty(0, dtype=torch.uint8), 0

    def __len__(self) -> int:
        return self._count

    def append(self, labels: Tensor) -> None:
        """Appends the labels of the next tokens, [..., T']."""
        end = self._count + labels.shape[-1]
        if end > self._kept.shape[-1]:
            grown = torch.empty(*labels.shape[:-1], max(2 * end, 256), dtype=torch.uint8)
            if self._count:
                grown[..., : self._count] = self._kept[..., : self._count]
            self._kept = grown
        self._kept[..., self._count : end] = labels
        self._count = end

    @property
    def labels(self) -> Tensor:
        """All labels, int64."""
        return self._kept[..., : self._count].long()
