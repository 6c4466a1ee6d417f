"""A competitor's figures, and what a result is checked against."""

from __future__ import annotations

import statistics
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """What was measured of one competitor, or why nothing was."""

    samples_ms: tuple[float, ...] = ()
    """One time a round, milliseconds a call."""
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
    """The largest error of a tensor against float64, and the budget it had."""

    error: float | None
    """None: not a number."""
    budget: float

    @property
    def passed(self) -> bool:
        return self.error is not None and self.error <= self.budget
