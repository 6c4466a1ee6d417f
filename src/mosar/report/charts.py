"""A chart as data: series over an axis, with marks; drawn as SVG for the page, by matplotlib for
papers. Domains and ticks are computed here, and once more, alike, in page.js."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple

from mosar.report.formats import slug
from mosar.report.palette import Look

PADDING = 0.06


class Point(NamedTuple):
    """A value with its spread, and how a tooltip writes it."""

    x: float
    y: float
    text: str
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, kw_only=True)
class Series:
    """A line of a chart."""

    key: str
    """What the legend switches on and off, page-wide: a variant, a length, …"""
    label: str
    look: Look
    points: tuple[Point, ...]
    note: str = ""
    """A second line style under the same key: "paper", "top-1", …; the legend explains it once."""
    dash: str | None = None
    """Of the note; None: the look's own."""


class Mark(NamedTuple):
    """A vertical line with a name."""

    x: float
    label: str


@dataclass(frozen=True, kw_only=True)
class Named:
    """What has a file or an anchor of its own: any name becomes a slug."""

    name: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", slug(self.name))


@dataclass(frozen=True, kw_only=True)
class Chart(Named):
    """Lines over an axis."""

    title: str
    caption: str
    x_label: str
    y_label: str
    series: tuple[Series, ...]
    x_ticks: tuple[tuple[float, str], ...] = ()
    """Places and labels; empty: chosen here."""
    x_log: bool = False
    y_log: bool = False
    y_zero: bool = False
    """The axis starts at 0."""
    y_domain: tuple[float, float] | None = None
    """Fixed; None: as the visible series need it."""
    cap: float | None = None
    """Above this a line may leave the picture, so that the others are told apart."""
    unit: str = ""
    """After the numbers of the vertical axis."""
    marks: tuple[Mark, ...] = ()
    line_at: float | None = None
    """A horizontal line that means something: 0 %, chance."""

    @property
    def empty(self) -> bool:
        return not any(series.points for series in self.series)


@dataclass(frozen=True, kw_only=True)
class Bars(Named):
    """Stacked shares, a bar a layer; one panel a side."""

    title: str
    caption: str
    panels: tuple[tuple[str, tuple[tuple[float, ...], ...]], ...]
    """Title, and for each bar its shares."""
    looks: tuple[Look, ...]
    """One a share."""
    x_label: str = "layer"

    @property
    def empty(self) -> bool:
        return not any(bars for _, bars in self.panels)


Kind = Literal["linear", "log"]


def x_domain(chart: Chart) -> tuple[float, float]:
    """From the first to the last place that is drawn."""
    places = [point.x for series in chart.series for point in series.points]
    places += [mark.x for mark in chart.marks] + [place for place, _ in chart.x_ticks]
    low, high = min(places), max(places)
    if low == high:
        return (low / 2, low * 2) if chart.x_log else (low - 1, high + 1)
    return low, high


def escapes(chart: Chart) -> list[tuple[Series, Point]]:
    """The highest point of each series that leaves the picture."""
    found = []
    for series in chart.series:
        highest = max(series.points, key=lambda point: point.y, default=None)
        if chart.cap is not None and highest is not None and highest.y > chart.cap:
            found.append((series, highest))
    return found


def y_domain(chart: Chart) -> tuple[float, float]:
    """What the values need, with a little air."""
    if chart.y_domain is not None:
        return chart.y_domain
    values = [value for series in chart.series for point in series.points for value in _ends(point)]
    if chart.cap is not None and len(chart.series) > 1:
        values = [value for value in values if value <= chart.cap] or values
    return padded(values, log=chart.y_log, zero=chart.y_zero, line=chart.line_at)


def _ends(point: Point) -> tuple[float, ...]:
    return tuple(v for v in (point.y, point.low, point.high) if v is not None)


def padded(
    values: Iterable[float], *, log: bool, zero: bool = False, line: float | None = None
) -> tuple[float, float]:
    found = [value for value in values if not log or value > 0]
    if line is not None and not log:
        found.append(line)
    if not found:
        return (1.0, 10.0) if log else (0.0, 1.0)
    low, high = min(found), max(found)
    if log:
        air = max((math.log(high) - math.log(low)) * PADDING, 0.01)
        return math.exp(math.log(low) - air), math.exp(math.log(high) + air)
    if zero:
        low = min(low, 0.0)
    air = (high - low or abs(high) * 0.1 or 1.0) * PADDING
    return (low if zero and low == 0 else low - air), high + air


def ticks(low: float, high: float, *, log: bool, wanted: int = 5) -> list[float]:
    """Round numbers inside [low, high]."""
    if log and high / low >= 6:
        decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        for steps in ((1, 2, 5), (1, 3), (1,)):
            found = [s * 10.0**d for d in decades for s in steps if low <= s * 10.0**d <= high]
            if len(found) <= wanted + 2:
                break
        if len(found) >= 3:
            return found
    step = nice_step((high - low) / wanted)
    first = math.ceil(low / step - 1e-9)
    return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]


def nice_step(rough: float) -> float:
    """1, 2, 2.5 or 5 times a power of ten, at least `rough`."""
    power = 10.0 ** math.floor(math.log10(rough))
    return next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= rough * (1 - 1e-9))


def tick_label(value: float, all_ticks: list[float], unit: str) -> str:
    """As many decimals as tell the ticks apart."""
    gaps = [b - a for a, b in pairwise(all_ticks)]
    step = min(gaps, default=abs(value) or 1.0)
    decimals = 0
    while decimals < 9 and abs(round(step, decimals) - step) > step * 0.01:
        decimals += 1
    text = f"{abs(value):.{decimals}f}"
    if abs(value) >= 1e5:
        text = f"{abs(value):.0e}".replace("e+0", "e").replace("e+", "e")
    sign = "\u2212" if value < 0 and float(text) else ""
    return f"{sign}{text}{unit}"


def place(value: float, low: float, high: float, *, log: bool) -> float:
    """Where a value lies between two ends, 0 to 1."""
    if log:
        return (math.log(value) - math.log(low)) / (math.log(high) - math.log(low))
    return (value - low) / (high - low)
