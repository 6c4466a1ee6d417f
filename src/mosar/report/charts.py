"""A chart as data: series over an axis, with marks. `drawing` makes the picture of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

from mosar.report.comparison import Estimate
from mosar.report.formats import slug
from mosar.report.palette import Look
from mosar.report.tables import spread

DOTTED, DASHED = "1.5 3.5", "6 4"


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
    look: Look
    points: tuple[Point, ...]
    note: str = ""
    """A second line style under the same key: "paper", "top-1", …; the legend explains it once."""
    dash: str | None = None
    """The dash of the note; None: the look's own; "none": markers without a line."""
    faint: bool = False
    """Thin, with hollow markers, for lines of others beside ours."""
    in_legend: bool = True
    annotated: bool = False
    """The text of each point is written beside it."""

    @property
    def label(self) -> str:
        return self.look.label

    @property
    def name(self) -> str:
        return self.label + (f", {self.note}" if self.note else "")

    @property
    def dashes(self) -> str:
        return self.look.dash if self.dash is None else self.dash

    def noted(self, note: str, dash: str) -> Series:
        """The same line under a note, in another dash."""
        return replace(self, note=note, dash=dash)


class Mark(NamedTuple):
    """A vertical line with a name."""

    x: float
    label: str


@dataclass(frozen=True, kw_only=True)
class Named:
    """An item with a file or an anchor of its own; its name becomes a slug."""

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
    """Series without a point are left out."""
    x_ticks: tuple[tuple[float, str], ...] = ()
    """Places and labels; empty: round numbers."""
    x_log: bool = False
    y_log: bool = False
    y_zero: bool = False
    """The axis starts at 0."""
    y_domain: tuple[float, float] | None = None
    """A fixed range; None: the range of the visible series."""
    cap: float | None = None
    """Lines may leave the picture above this value, so that the others stay apart."""
    unit: str = ""
    """Written after the numbers of the vertical axis."""
    marks: tuple[Mark, ...] = ()
    line_at: float | None = None
    """A horizontal line that means something: 0 %, chance."""

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "series", tuple(line for line in self.series if line.points))

    @property
    def empty(self) -> bool:
        return not self.series

    @property
    def stops(self) -> list[tuple[float, str]]:
        """Every place that has a value, and how it is written."""
        labels = dict(self.x_ticks)
        places = sorted({point.x for series in self.series for point in series.points})
        return [(x, labels.get(x) or f"{x:,.6g}") for x in places]


@dataclass(frozen=True, kw_only=True)
class Bars(Named):
    """Stacked shares, one bar per layer; one panel per side."""

    title: str
    caption: str
    panels: tuple[tuple[str, tuple[tuple[float, ...], ...]], ...]
    """Title, and for each bar its shares."""
    looks: tuple[Look, ...]
    """One per share."""

    @property
    def empty(self) -> bool:
        return not any(bars for _, bars in self.panels)


def point(x: float, estimate: Estimate, text: Callable[[float], str]) -> Point:
    """A mean with its band of one standard deviation."""
    sd = estimate.sd
    low, high = (None, None) if sd is None else (estimate.mean - sd, estimate.mean + sd)
    return Point(x, estimate.mean, spread(estimate, text), low, high)


def points(
    places: Iterable[float],
    estimate: Callable[[float], Estimate | None],
    text: Callable[[float], str],
) -> tuple[Point, ...]:
    """A point at each place that has an estimate."""
    found = ((x, estimate(x)) for x in places)
    return tuple(point(x, value, text) for x, value in found if value is not None)


def cap_of(series: Iterable[Series]) -> float | None:
    """A quarter above the highest point of the median series; collapsed models may leave it."""
    highest = sorted(max(p.y for p in line.points) for line in series if line.points)
    return 1.25 * highest[(len(highest) - 1) // 2] if highest else None
