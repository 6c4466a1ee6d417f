"""A competitor's figures, and the error of its result."""

from __future__ import annotations

import statistics
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """The measurements of one competitor, or why there are none."""

    samples_ms: tuple[float, ...] = ()
    """Milliseconds per call, one sample per round."""
    peak_bytes: int | None = None
    """Peak resident memory of one call above what was there before it."""
    unavailable: str | None = None
    """Why a figure is missing."""

    @property
    def median_ms(self) -> float | None:
        return statistics.median(self.samples_ms) if self.samples_ms else None

    @property
    def min_ms(self) -> float | None:
        return min(self.samples_ms, default=None)


@dataclass(frozen=True, kw_only=True)
class ErrorCheck:
    """The largest error of a tensor against float64, and its budget."""

    error: float | None
    """None: not a number."""
    budget: float

    @property
    def passed(self) -> bool:
        return self.error is not None and self.error <= self.budget
