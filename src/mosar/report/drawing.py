"""Draws every figure once, with matplotlib: charts, bars, supports and the decoder.

A `Picture` is a matplotlib figure (no pyplot, no global state) whose unit is a point, and what the
page adds to its parts, by their ids: `inline` puts it into the page, `render_figure` into a file.
"""

from __future__ import annotations

import io
import json
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Circle, FancyBboxPatch, PathPatch, Polygon
from matplotlib.path import Path

from mosar.report.charts import Bars, Chart, Point, Series
from mosar.report.diagram import HEIGHT, WIDTH, Diagram, Node, arrow_head
from mosar.report.formats import MINUS, percent
from mosar.report.palette import (
    ATTENTION,
    EDGE,
    GRID,
    INK,
    MUTED,
    RAISED,
    ROUTER,
    SURFACE,
    TINTS,
    Look,
)
from mosar.report.support import SHADES, SupportGrid, shade

FORMATS = ("png", "svg", "pdf")
STYLE: dict[Any, Any] = {
    "axes.edgecolor": EDGE,
    "axes.facecolor": SURFACE,
    "axes.labelcolor": MUTED,
    "axes.labelpad": 6,
    "axes.linewidth": 0.8,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "figure.facecolor": SURFACE,
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans", "Arial"],
    "font.size": 12,
    "svg.fonttype": "none",
    "svg.hashsalt": "mosar",
    "text.color": MUTED,
    # A name with dollar signs is not a formula.
    "text.parse_math": False,
    "xtick.color": EDGE,
    "xtick.labelcolor": MUTED,
    "ytick.color": EDGE,
    "ytick.labelcolor": MUTED,
    "ytick.major.size": 0,
}
# The plot inside of a chart: left, top, width and height of the box, then the whole.
BOX = (70, 20, 438, 250)
SIZE = (520, 314)
_TITLE = 24
_LEGEND_ROWS = 16
_PADDING = 0.06
_FEWEST_TICKS, _MOST_TICKS = 4, 250
_MOST_MARKERS = 24
# matplotlib's name, whether it is filled, and its size.
_MARKERS = {
    "circle": ("o", True, 7),
    "square": ("s", True, 6.5),
    "diamond": ("D", True, 6.5),
    "up": ("^", True, 9),
    "down": ("v", True, 9),
    "cross": ("x", False, 7),
    "plus": ("+", False, 8),
    "star": ("*", True, 12),
    "ring": ("o", False, 7),
}


@dataclass(frozen=True)
class Picture:
    """A figure and what the page makes of it."""

    figure: Figure
    label: str
    """The text for readers who cannot see the picture."""
    looks: tuple[Look, ...]
    size: tuple[float, float]
    """The width and height that the page shows, from the left edge."""
    attributes: dict[str, str] = field(default_factory=dict)
    """Of the picture in the page."""
    groups: dict[str, dict[str, str]] = field(default_factory=dict)
    """Attributes of its parts in the page, by their ids."""

    @cached_property
    def svg(self) -> bytes:
        return render_figure(self.figure, "svg")


def render_figure(figure: Figure, file_format: str, dpi: int = 200) -> bytes:
    """The bytes of a figure as one of FORMATS, without a date, so that they can be compared."""
    if file_format not in FORMATS:
        raise ValueError(f"a figure's format must be one of {FORMATS}, got {file_format!r}")
    dates = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}
    buffer = io.BytesIO()
    with mpl.rc_context(STYLE):
        figure.savefig(buffer, format=file_format, dpi=dpi, metadata=dates.get(file_format))
    data = buffer.getvalue()
    # A text may hold characters that XML cannot.
    return re.sub(rb"[\x00-\x08\x0b\x0c\x0e-\x1f]", b"?", data) if file_format == "svg" else data


def colour(look: Look) -> str:
    """Both shades as custom properties; the style sheet takes the one of the theme."""
    return f"--l:{look.light};--d:{look.dark}"


def draw_pictures(items: Iterable[Any]) -> dict[str, Picture]:
    """The charts, bars and diagrams among the items of a report, by their names."""
    makers = {Chart: _draw_chart, Bars: _draw_bars, Diagram: _draw_diagram}
    return {item.name: makers[type(item)](item) for item in items if type(item) in makers}


def draw_charts(charts: Sequence[Chart]) -> Figure:
    """Charts side by side, each with its legend at the right unless the next has the same."""
    many = len(charts) > 1
    left, top, wide, tall = BOX
    top += _TITLE * many
    height, start, places = SIZE[1] + _TITLE * many, 0.0, []
    with mpl.rc_context(STYLE):
        figure = _new_figure(1, 1)
        names = [[line.name for line in chart.series] for chart in charts]
        for chart, labels, following in zip(charts, names, [*names[1:], []], strict=True):
            axes = figure.add_axes((0, 0, 1, 1))
            axes.patch.set_gid("part-ground")
            _paint(axes, chart)
            places.append((axes, start))
            start += SIZE[0]
            if many:
                axes.set_title(chart.title, loc="left", fontsize=13, color=INK, pad=10)
            if len(labels) > 1 and labels != following:
                # A handle beyond the picture's edge would not be drawn.
                legend = axes.legend(
                    frameon=False,
                    loc="center left",
                    bbox_to_anchor=(1.02, 0.5),
                    fontsize=11,
                    ncols=math.ceil(len(labels) / _LEGEND_ROWS),
                )
                legend.set_gid("part-legend")
                listed = (series for series in chart.series if series.in_legend)
                for series, handle in zip(listed, legend.legend_handles, strict=True):
                    if handle is not None:
                        handle.set_gid(f"{_gid(series)}-sample")
                start += legend.get_window_extent().width
        figure.set_size_inches(start / 72, height / 72)
        for axes, x in places:
            corner = (x + left) / start, (height - top - tall) / height
            axes.set_position((*corner, wide / start, tall / height))
    return figure


def _draw_chart(chart: Chart) -> Picture:
    figure = draw_charts([chart])
    (axes,) = figure.axes

    def to_y(value: float) -> float:
        return SIZE[1] - axes.transData.transform((1, value))[1]

    def to_x(value: float) -> float:
        return axes.transData.transform((value, 1))[0]

    def moving(values: Iterable[tuple[float, float]], kind: str, **data: str) -> dict[str, str]:
        """A part of the picture that page.js redraws when the scale changes."""
        shown = [(to_x(x), to_y(y)) for x, y in values]
        places = {"x": _numbers(x for x, _ in shown), "y": _numbers(y for _, y in shown)}
        named = {f"data-{name}": value for name, value in (data | places).items() if value}
        return {"class": f"moves {kind}"} | named

    groups = {f"part-{name}": {"class": name} for name in ("y-axis", "y-name")}
    for series in chart.series:
        values = _drawable(chart, series)
        which = {"key": series.key, "note": series.note}
        told = {"label": series.name.replace(", ", " · "), "t": "|".join(p.text for p in values)}
        line = moving(((p.x, p.y) for p in values), "series", **which, **told)
        groups[_gid(series)] = line | {"style": colour(series.look)}
        if band := _band(chart, series):
            groups[f"{_gid(series)}-band"] = moving(band, "band", **which)
    if chart.line_at is not None:
        ends = ((x, chart.line_at) for x in axes.get_xlim())
        groups["part-level"] = moving(ends, "level")
    stops = [[round(to_x(x), 1), label] for x, label in chart.stops]
    attributes = {
        "data-box": _numbers(BOX),
        "data-stops": json.dumps(stops, ensure_ascii=False),
        "data-xlabel": chart.x_label,
    }
    if chart.y_domain is None:
        levels = [
            [[round(to_y(value), 1), label] for value, label in level]
            for level in _levels_of_any_choice(chart)
        ]
        attributes["data-ticks"] = json.dumps(levels, ensure_ascii=False)
        if chart.cap is not None:
            attributes["data-cap"] = _numbers([to_y(chart.cap)])
        if chart.y_zero:
            attributes["data-base"] = _numbers([to_y(0.0)])
    said = [f"{s.name}: {s.points[0].text} to {s.points[-1].text}" for s in chart.series]
    label = f"{chart.title}. {chart.y_label} against {chart.x_label}. {'; '.join(said)}."
    looks = tuple(series.look for series in chart.series)
    return Picture(figure, label, looks, SIZE, attributes, groups)


def _numbers(values: Iterable[float]) -> str:
    return " ".join(f"{value:.1f}".removesuffix(".0") for value in values)


def _gid(series: Series) -> str:
    return series.key + (f"-{series.note}" if series.note else "")


def _drawable(chart: Chart, series: Series) -> list[Any]:
    return [point for point in series.points if not chart.y_log or point.y > 0]


def _band(chart: Chart, series: Series) -> list[tuple[float, float]]:
    """The outline of one standard deviation up and down; empty without one."""
    ends = [(p.x, p.low, p.high) for p in _drawable(chart, series)]
    up = [(x, high) for x, _, high in ends if high is not None]
    # A logarithmic axis cannot show values below zero.
    least = y_domain(chart, [series])[0] if chart.y_log else -math.inf
    return up + [(x, max(low, least)) for x, low, _ in reversed(ends) if low is not None]


def _paint(axes: Axes, chart: Chart) -> None:
    """Lines, axes and marks of a chart."""
    axes.set(
        xscale="log" if chart.x_log else "linear",
        yscale="log" if chart.y_log else "linear",
        xlabel=chart.x_label,
        ylabel=chart.y_label,
    )
    axes.yaxis.set_gid("part-y-axis")
    axes.yaxis.label.set_gid("part-y-name")
    # Far enough left for the widest labels of ticks, of any choice of series.
    axes.yaxis.set_label_coords(-0.12, 0.5)
    axes.spines[:].set_visible(False)
    axes.grid(axis="y", color=GRID, linewidth=1)
    axes.set_axisbelow(True)
    for place, series in enumerate(chart.series):
        # The first lies highest: where plateaus of gates coincide, the one that falls is seen.
        _paint_series(axes, chart, series, 3 - place / 100)
    if chart.line_at is not None:
        axes.axhline(chart.line_at, color=EDGE, linewidth=1.4, zorder=1.5, gid="part-level")
    for mark in chart.marks:
        axes.axvline(mark.x, color=EDGE, linewidth=1, linestyle=(0, (3, 3)), zorder=1.5)
        at = {"transform": axes.get_xaxis_transform(), "ha": "center", "va": "bottom"}
        axes.text(mark.x, 1.01, mark.label, fontsize=11, **at)
    low, high = y_domain(chart, chart.series)
    axes.set_ylim(low, high)
    levels = tick_levels(low, high, log=chart.y_log, unit=chart.unit)
    _set_ticks(axes.yaxis, enough_ticks(levels, low, high))
    _paint_x_axis(axes, chart)
    # Names are placed by where the points are in the picture, so the axes must be known.
    _annotate(axes, [p for line in chart.series if line.annotated for p in _drawable(chart, line)])


def _paint_x_axis(axes: Axes, chart: Chart) -> None:
    places = [x for x, _ in (*chart.stops, *chart.x_ticks)] + [mark.x for mark in chart.marks]
    low, high = min(places), max(places)
    if low == high:
        low, high = (low / 2, low * 2) if chart.x_log else (low - 1, high + 1)
    ticks = chart.x_ticks or enough_ticks(tick_levels(low, high, log=chart.x_log), low, high)
    to, back = (math.log, math.exp) if chart.x_log else (float, float)
    air = 0.03 * (to(high) - to(low))
    axes.set_xlim(back(to(low) - air), back(to(high) + air))
    end, shown = -math.inf, []
    for value, label in ticks:
        # On a phone a character is 9 units wide.
        x, half = BOX[2] * (to(value) - to(low)) / (to(high) - to(low)), 4.6 * len(label)
        fits = x - half > end
        shown.append((value, label if fits else ""))
        end = x + half + 4 if fits else end
    _set_ticks(axes.xaxis, shown)


def _set_ticks(axis: Any, ticks: Sequence[tuple[float, str]]) -> None:
    axis.set_ticks([value for value, _ in ticks], [label for _, label in ticks])
    axis.set_ticks([], minor=True)


def _paint_series(axes: Axes, chart: Chart, series: Series, zorder: float) -> None:
    values = _drawable(chart, series)
    xs, ys = [p.x for p in values], [p.y for p in values]
    marker, filled, size = _MARKERS[series.look.marker]
    colour, dash = series.look.light, series.dashes
    hollow = series.faint or not filled
    width = 1.6 if series.faint else 2.0
    axes.plot(
        xs,
        ys,
        color=colour,
        alpha=0.6 if series.faint else None,
        linestyle="none" if dash == "none" else _dashes(dash, width),
        linewidth=width,
        marker=marker if len(xs) <= _MOST_MARKERS else None,
        markersize=size,
        markerfacecolor=SURFACE if hollow else colour,
        markeredgecolor=colour if hollow else SURFACE,
        markeredgewidth=1.6 if hollow else 1.2,
        label=series.name if series.in_legend else f"_{series.name}",
        gid=_gid(series),
        zorder=zorder + (not series.in_legend),
    )
    if band := _band(chart, series):
        axes.fill(
            *zip(*band, strict=True), color=colour, alpha=0.13, linewidth=0, zorder=2,
            gid=f"{_gid(series)}-band",
        )  # fmt: skip


def _annotate(axes: Any, points: Sequence[Point]) -> None:
    """Names beside their points, farther away where they would hide a point or another name."""
    wide, tall = BOX[2:]
    in_box = axes.transScale + axes.transLimits
    places = [in_box.transform((p.x, p.y)) * (wide, tall) for p in points]
    taken = [(x - 4, y - 4, x + 4, y + 4) for x, y in places]
    for p, (x, y) in zip(points, places, strict=True):
        width, height = 6.0 * len(p.text), 12
        rows = [5 + height * row for row in range(8)]
        offsets = [
            (right, up)
            for row in rows
            for up in (row, -row - height)
            for right in (5, -5 - width)
            if 0 <= x + right <= wide - width and 0 <= y + up <= tall - height
        ]
        boxes = [(x + dx, y + dy, x + dx + width, y + dy + height) for dx, dy in offsets]
        free = [o for o, box in zip(offsets, boxes, strict=True) if not _overlaps(box, taken)]
        right, up = (free or offsets or [(5, 5)])[0]
        taken.append((x + right, y + up, x + right + width, y + up + height))
        # From the corner of the name that is nearest to its point.
        line = {"arrowstyle": "-", "color": EDGE, "linewidth": 0.7, "shrinkA": 0, "shrinkB": 4}
        line["relpos"] = (0 if right > 0 else 1, 0 if up > 0 else 1)
        beside = -5 - height <= up <= 5
        axes.annotate(
            p.text,
            (p.x, p.y),
            (right if right > 0 else -5, up),
            textcoords="offset points",
            ha="left" if right > 0 else "right",
            va="bottom",
            fontsize=9,
            arrowprops=None if beside else line,
        )


def _overlaps(box: Sequence[float], others: Iterable[Sequence[float]]) -> bool:
    return any(
        box[0] < other[2] and other[0] < box[2] and box[1] < other[3] and other[1] < box[3]
        for other in others
    )


def _dashes(dash: str, width: float) -> Any:
    """For matplotlib, whose dashes are in units of the line's width; ours are in points."""
    return (0, tuple(float(part) / width for part in dash.split())) if dash else "solid"


def y_domain(chart: Chart, series: Sequence[Series]) -> tuple[float, float]:
    """What some series of a chart need, with a little air."""
    if chart.y_domain is not None:
        return chart.y_domain
    ends = [v for s in series for p in s.points for v in (p.y, p.low, p.high) if v is not None]
    if chart.cap is not None and len(series) > 1:
        inside = [value for value in ends if value <= chart.cap]
        # A cap that would hide nearly everything does not count; page.js has the same rule.
        ends = inside if 4 * len(inside) >= len(ends) else ends
    ends += [] if chart.line_at is None else [chart.line_at]
    ends += [0.0] if chart.y_zero else []
    to, back = (math.log, math.exp) if chart.y_log else (float, float)
    found = [to(value) for value in ends if not chart.y_log or value > 0] or [0.0, 1.0]
    low, high = min(found), max(found)
    air = (high - low or abs(high) * 0.1 or 1.0) * _PADDING
    return back(low if chart.y_zero and low == 0 else low - air), back(high + air)


Ticks = list[tuple[float, str]]


_MANTISSAS = ((1,), (1, 3), (1, 2, 5), (1, 2, 3, 5))


def tick_levels(low: float, high: float, *, log: bool = False, unit: str = "") -> Iterator[Ticks]:
    """Round numbers in [low, high] with their labels, from few to many."""
    for level in range(40):
        finer = level - len(_MANTISSAS)
        if log and finer >= 0 and high < 10 * low:
            # Within a decade equal steps are easier to read than those of each decade.
            step = _step(finer, math.ceil(math.log10(high - low)))
            found, decimals = _regular(step, low, high), None
        elif log:
            mantissas = _MANTISSAS[level] if finer < 0 else _regular(_step(finer, 0), 1, 10)[:-1]
            decades = range(math.floor(math.log10(low)), math.floor(math.log10(high)) + 1)
            values = [m * 10.0**d for d in decades for m in mantissas]
            found, decimals = [value for value in values if low <= value <= high], None
        else:
            step = _step(level, math.ceil(math.log10(high - low)))
            found = _regular(step, low, high)
            decimals = max(0, -math.floor(math.log10(step) + 1e-9))
        yield [(value, tick_label(value, decimals, unit)) for value in found]


def _step(level: int, exponent: int) -> float:
    """1, 0.5, 0.2, 0.1, … times a power of ten."""
    return (1, 0.5, 0.2)[level % 3] * 10.0 ** (exponent - level // 3)


def _regular(step: float, low: float, high: float) -> list[float]:
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [i * step for i in range(first, last + 1)]


def enough_ticks(levels: Iterable[Ticks], low: float, high: float) -> Ticks:
    """Of the first level with enough of them between two ends; page.js has the same rule."""
    found = ([tick for tick in level if low <= tick[0] <= high] for level in levels)
    return next(ticks for ticks in found if len(ticks) >= _FEWEST_TICKS)


def tick_label(value: float, decimals: int | None, unit: str = "") -> str:
    """With so many decimals; None: as many as it needs."""
    text = f"{abs(value):.6g}" if decimals is None else f"{abs(value):.{decimals}f}"
    if abs(value) >= 1e5:
        text = f"{abs(value):.0e}".replace("e+0", "e").replace("e+", "e")
    return f"{MINUS if value < 0 and float(text) else ''}{text}{unit}"


def _levels_of_any_choice(chart: Chart) -> Iterator[Ticks]:
    """The levels of ticks that page.js may need, whichever series it shows."""
    # Alone, and among others, where a cap counts.
    views = [y_domain(chart, [s] * times) for s in chart.series for times in (1, 2)]
    views.append(y_domain(chart, chart.series))
    low, high = min(low for low, _ in views), max(high for _, high in views)
    for level in tick_levels(low, high, log=chart.y_log, unit=chart.unit):
        if len(level) > _MOST_TICKS:
            return
        yield level
        if all(sum(a <= v <= b for v, _ in level) >= _FEWEST_TICKS for a, b in views):
            return


def _new_figure(width: float, height: float) -> Figure:
    figure = Figure(figsize=(width / 72, height / 72), dpi=72)
    figure.patch.set_gid("part-ground")
    return figure


def _draw_bars(bars: Bars) -> Picture:
    """Panels of stacked bars side by side."""
    width, height, left, gap = 520, 296, 44, 34
    count = len(bars.panels)
    wide = (width - left - 8 - gap * (count - 1)) / count
    groups = {}
    with mpl.rc_context(STYLE):
        figure = _new_figure(width + 90, height)
        for index, (title, panel) in enumerate(bars.panels):
            corner = (left + index * (wide + gap)) / (width + 90), 50 / height
            axes = figure.add_axes((*corner, wide / (width + 90), 216 / height))
            axes.patch.set_gid("part-ground")
            axes.spines[:].set_visible(False)
            axes.grid(axis="y", color=GRID, linewidth=1)
            axes.set_axisbelow(True)
            base = [0.0] * len(panel)
            for part, look in enumerate(bars.looks):
                heights = [shares[part] for shares in panel]
                places = range(1, len(panel) + 1)
                drawn = axes.bar(
                    places, heights, 0.82, bottom=base, color=look.light, label=look.label
                )
                base = [a + b for a, b in zip(base, heights, strict=True)]
                for layer, bar in enumerate(drawn):
                    bar.set_gid(f"bar-{index}-{layer}-{part}")
                    tip = "|".join([f"layer {layer + 1}", *_shares(bars, panel[layer])])
                    groups[f"bar-{index}-{layer}-{part}"] = {"class": "share", "data-tip": tip}
            axes.set_title(title, loc="left", fontsize=12, color=INK, weight="bold")
            axes.set_xlabel("layer")
            axes.set_ylim(0, 1)
            axes.set_yticks([0, 0.5, 1], ["0%", "50%", "100%"] if index == 0 else [""] * 3)
            axes.set_xticks(range(1, len(panel) + 1, -(-len(panel) // 9) or 1))
            axes.tick_params(axis="x", length=0)
        legend = figure.axes[-1].legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
        legend.set_gid("part-legend")
    means = [
        f"{title}: "
        + ", ".join(_shares(bars, [sum(part) / len(panel) for part in zip(*panel, strict=True)]))
        for title, panel in bars.panels
        if panel
    ]
    label = f"{bars.title}. Mean shares over layers. {'; '.join(means)}."
    return Picture(figure, label, bars.looks, (width, height), groups=groups)


def _shares(bars: Bars, shares: Sequence[float]) -> list[str]:
    return [
        f"{look.label}: {percent(portion * 100, signed=False)}"
        for look, portion in zip(bars.looks, shares, strict=True)
    ]


def draw_support(grid: SupportGrid) -> Picture:
    """One grid of cells."""
    with mpl.rc_context(STYLE):
        figure = _new_figure(240, 240)
        _paint_support(figure.add_axes((0, 0, 1, 1)), grid)
    label = (
        f"{grid.title}: {percent(grid.density * 100, signed=False)} of the causal pairs of "
        f"{grid.tokens:,} tokens are inside the support"
    )
    return Picture(figure, label, (grid.look,), (240, 240), {"class": "support"})


def draw_supports(grids: Sequence[SupportGrid]) -> Figure:
    """Grids of cells side by side."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(2.6 * len(grids), 3.0), layout="constrained")
        for index, grid in enumerate(grids):
            axes = figure.add_subplot(1, len(grids), index + 1)
            _paint_support(axes, grid)
            axes.set_title(grid.title, fontsize=10.5, loc="left", color=INK)
            axes.set_xlabel(f"keys → · {grid.remark}", fontsize=9.5)
        figure.axes[0].set_ylabel("← queries", fontsize=9.5)
    return figure


def _paint_support(axes: Axes, grid: SupportGrid) -> None:
    """One unit per cell; neighbours of the same shade are one rectangle."""
    boxes: list[list[tuple[int, int, int, int]]] = [[] for _ in SHADES]
    for row, shares in enumerate(grid.shares):
        start = 0
        for level, run in groupby(map(shade, shares)):
            end = start + len(list(run))
            if level >= 0:
                boxes[level].append((start, row, end, row + 1))
            start = end
    n = grid.size
    ground = _outlines((0, row, row + 1, row + 1) for row in range(n))
    axes.add_patch(PathPatch(ground, facecolor=RAISED, linewidth=0))
    for alpha, some in zip(SHADES, boxes, strict=True):
        if some:
            cells = _outlines(some)
            axes.add_patch(PathPatch(cells, facecolor=grid.look.light, alpha=alpha, linewidth=0))
    lines = [((0, i), (min(i + 1, n), i)) for i in range(n + 1)]
    lines += [((i, max(i - 1, 0)), (i, n)) for i in range(n + 1)]
    net = Path([end for line in lines for end in line], [Path.MOVETO, Path.LINETO] * len(lines))
    axes.add_patch(PathPatch(net, edgecolor=SURFACE, facecolor="none", linewidth=0.45))
    axes.set(xlim=(-0.3, n + 0.3), ylim=(n + 0.3, -0.3), aspect="equal", xticks=[], yticks=[])
    axes.spines[:].set_visible(False)
    axes.patch.set_gid("part-ground")


def _outlines(boxes: Iterable[tuple[float, float, float, float]]) -> Path:
    """Rectangles (left, top, right, bottom) as one path."""
    corners = [
        corner
        for x, y, right, bottom in boxes
        for corner in ((x, y), (right, y), (right, bottom), (x, bottom), (x, y))
    ]
    box = [Path.MOVETO, *[Path.LINETO] * 3, Path.CLOSEPOLY]
    return Path(corners, box * (len(corners) // 5))


_NODE_COLOURS = {
    "plain": (SURFACE, EDGE),
    "norm": (SURFACE, EDGE),
    "sum": (SURFACE, EDGE),
    "router": (TINTS["router"].light, ROUTER.light),
    "attention": (TINTS["attention"].light, ATTENTION.light),
}


def _draw_diagram(diagram: Diagram) -> Picture:
    """The decoder with its routers."""
    with mpl.rc_context(STYLE):
        figure = _new_figure(WIDTH, HEIGHT)
        axes = figure.add_axes((0, 0, 1, 1))
        axes.set(xlim=(0, WIDTH), ylim=(HEIGHT, 0))
        axes.axis("off")
        x, y, width, height = diagram.frame
        axes.add_patch(_rounded(x, y, width, height, 14, facecolor=RAISED, edgecolor=GRID))
        axes.text(x + width - 12, y + 18, diagram.repeat, ha="right", va="center", fontsize=13)
        for arrow in diagram.arrows:
            colour = ROUTER.light if arrow.kind == "router" else MUTED
            axes.plot(*zip(*arrow.points, strict=True), color=colour, linewidth=1.3, zorder=2)
            axes.add_patch(Polygon(arrow_head(arrow), color=colour, linewidth=0, zorder=2))
        for node in diagram.nodes:
            _paint_node(axes, node)
    label = (
        "The decoder: tokens, embedding; in each layer RMSNorm, Q, K and V, RoPE on Q and K, a "
        "query router and a key router whose mixture of gates is added to causal attention as a "
        "bias, RMSNorm, residual sum, a gated MLP between RMSNorms, residual sum; then logits."
    )
    looks = (ROUTER, ATTENTION, *TINTS.values())
    return Picture(figure, label, looks, (WIDTH, HEIGHT), {"class": "diagram"})


def _rounded(
    x: float, y: float, width: float, height: float, radius: float, **style: Any
) -> FancyBboxPatch:
    boxstyle = f"round,pad=0,rounding_size={radius}"
    return FancyBboxPatch((x, y), width, height, boxstyle=boxstyle, linewidth=1.2, **style)


def _paint_node(axes: Axes, node: Node) -> None:
    face, edge = _NODE_COLOURS[node.kind]
    style: dict[str, Any] = {"facecolor": face, "edgecolor": edge, "zorder": 3}
    left, top = node.x - node.width / 2, node.y - node.height / 2
    axes.add_patch(
        Circle((node.x, node.y), node.width / 2, linewidth=1.2, **style)
        if node.kind == "sum"
        else _rounded(left, top, node.width, node.height, 7, **style)
    )
    # On the baseline: a centred text would move with its letters.
    centre = {"ha": "center", "va": "baseline", "zorder": 4}
    below = -2 if node.small else 4.5
    axes.text(node.x, node.y + below, node.text, color=INK, fontsize=14, **centre)
    if node.small:
        axes.text(node.x, node.y + 13, node.small, fontsize=11, **centre)
