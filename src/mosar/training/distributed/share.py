"""Which windows of a batch a process takes; the batch does not depend on their number."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from mosar.training.config import TrainConfig


def pass_size(windows: int, most: int) -> int:
    """The largest size up to `most` that gives every pass equally many windows."""
    return next(n for n in range(min(most, windows), 0, -1) if windows % n == 0)


class Share(NamedTuple):
    """The part of every batch that a process takes: part `index` of `number`."""

    index: int = 0
    number: int = 1

    def windows(self, train: TrainConfig) -> range:
        """Indices into a step's windows; the order of the data does not depend on processes."""
        count = train.windows_per_step // self.number
        return range(self.index * count, (self.index + 1) * count)

    def pass_size(self, train: TrainConfig) -> int:
        """Windows in one pass: at most micro_batch, and equally many in every pass."""
        return pass_size(len(self.windows(train)), train.micro_batch)

    def passes(self, train: TrainConfig) -> int:
        """Passes in one update."""
        return len(self.windows(train)) // self.pass_size(train)

    def rounds(self, count: int) -> Iterator[tuple[int, bool]]:
        """The batches, of `count`, to evaluate, and whether this process counts each.

        Every process evaluates equally many: the others may need its part of the parameters.
        """
        for first in range(0, count, self.number):
            own = first + self.index
            yield (own, True) if own < count else (0, False)


WHOLE = Share()
