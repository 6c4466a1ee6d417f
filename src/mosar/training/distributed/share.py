"""Which windows of a batch are a process's; the batch itself is the same however many there are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from mosar.training.config import TrainConfig


def pass_size(windows: int, most: int) -> int:
    """Windows in one pass: at most so many, and as many in every pass."""
    return next(n for n in range(min(most, windows), 0, -1) if windows % n == 0)


class Share(NamedTuple):
    """Which part of every batch is a process's: part `index` of `number`."""

    index: int = 0
    number: int = 1

    def windows(self, train: TrainConfig) -> range:
        """Places in a step's windows; the order of the data knows nothing of processes."""
        count = train.windows_per_step // self.number
        return range(self.index * count, (self.index + 1) * count)

    def pass_size(self, train: TrainConfig) -> int:
        """Windows in one pass: at most micro_batch, and as many in every pass."""
        return pass_size(len(self.windows(train)), train.micro_batch)

    def passes(self, train: TrainConfig) -> int:
        """Passes in one update."""
        return len(self.windows(train)) // self.pass_size(train)

    def rounds(self, count: int) -> Iterator[tuple[int, bool]]:
        """Which of `count` batches to look at, and whether it is this process's to count.

        Every process looks at as many: the others may need its part of the parameters for theirs.
        """
        for first in range(0, count, self.number):
            own = first + self.index
            yield (own, True) if own < count else (0, False)


WHOLE = Share()
