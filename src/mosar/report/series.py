"""Lines of charts from estimates: what every chart of a report shares."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from mosar.report.charts import Point, Series
from mosar.report.comparison import Estimate
from mosar.report.tables import spread

DOTTED, DASHED = "1.5 3.5", "6 4"


def noted(series: Series, note: str, dash: str) -> Series:
    """The same line under a note, in another dash."""
    return replace(series, note=note, dash=dash)


def point(x: float, estimate: Estimate, text: Callable[[float], str]) -> Point:
    """A mean with its band of one standard deviation."""
    sd = estimate.sd
    low, high = (None, None) if sd is None else (estimate.mean - sd, estimate.mean + sd)
    return Point(x, estimate.mean, spread(estimate, text), low, high)


def cap_of(series: Iterable[Series]) -> float | None:
    """A quarter above the highest point of the middle series: what collapses leaves the picture."""
    highest = sorted(max(p.y for p in line.points) for line in series if line.points)
    return 1.25 * highest[(len(highest) - 1) // 2] if highest else None
