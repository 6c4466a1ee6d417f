"""The charts, grids and the diagram of a report as matplotlib figures, for papers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.collections import PatchCollection
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.patches import Circle, FancyBboxPatch, Polygon, Rectangle

from mosar.report.charts import Bars, Chart, Series, tick_label, ticks, x_domain, y_domain
from mosar.report.diagram import HEIGHT, WIDTH, Diagram, Node, arrow_head
from mosar.report.figures import GRID, INK, MUTED, STYLE
from mosar.report.support import SupportGrid, opacity, shade

_MARKERS = {
    "circle": "o",
    "square": "s",
    "diamond": "D",
    "up": "^",
    "down": "v",
    "cross": "x",
    "plus": "P",
    "star": "*",
}
_FILLS = {
    "plain": "#ffffff",
    "norm": "#f1f3f6",
    "router": "#fde9dc",
    "attention": "#e4eef9",
    "sum": "#ffffff",
}
_ROUTER = "#d55e00"
# A name with dollar signs is no formula.
_STYLE: dict[Any, Any] = STYLE | {"text.parse_math": False}


def draw_chart(chart: Chart) -> Figure:
    """A chart with its legend at the right."""
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(7.2, 4.0), layout="constrained")
        axes = figure.add_subplot()
        low, high = y_domain(chart)
        if chart.y_log:
            axes.set_yscale("log")
        if chart.x_log:
            axes.set_xscale("log")
        for series in chart.series:
            _draw_series(axes, series)
        _place_ticks(axes, chart, low, high)
        if chart.line_at is not None:
            axes.axhline(chart.line_at, color=MUTED, linewidth=1.0, zorder=1)
        for mark in chart.marks:
            axes.axvline(mark.x, color=MUTED, linewidth=1.0, linestyle=(0, (3, 3)), zorder=1)
            axes.text(
                *(mark.x, 1.01, mark.label),
                transform=axes.get_xaxis_transform(),
                ha="center",
                va="bottom",
                color=MUTED,
                fontsize=9,
            )
        axes.set_ylim(low, high)
        axes.set_xlabel(chart.x_label)
        axes.set_ylabel(chart.y_label)
        axes.grid(axis="y", color=GRID, linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        if len(chart.series) > 1:
            axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1.01, 0.5), fontsize=9)
    return figure


def _draw_series(axes: Axes, series: Series) -> None:
    xs, ys = [p.x for p in series.points], [p.y for p in series.points]
    look = series.look
    dash = look.dash if series.dash is None else series.dash
    style = (0, tuple(float(d) for d in dash.split())) if dash else "-"
    faint = series.note == "paper"
    axes.plot(
        xs,
        ys,
        color=look.light,
        linestyle=style,
        linewidth=1.2 if faint else 1.9,
        marker=_MARKERS[look.marker] if len(xs) <= 24 else None,
        markersize=3.5 if faint else 5,
        alpha=0.75 if faint else 1,
        label=series.label + (f", {series.note}" if series.note else ""),
        gid=f"{series.key}-{series.note}" if series.note else series.key,
        zorder=3,
    )
    if any(p.low is not None for p in series.points):
        lows = [p.y if p.low is None else p.low for p in series.points]
        highs = [p.y if p.high is None else p.high for p in series.points]
        axes.fill_between(xs, lows, highs, color=look.light, alpha=0.15, linewidth=0, zorder=2)


def _place_ticks(axes: Axes, chart: Chart, low: float, high: float) -> None:
    values = ticks(low, high, log=chart.y_log)
    axes.set_yticks(values, [tick_label(value, values, chart.unit) for value in values])
    axes.set_yticks([], minor=True)
    shown = list(chart.x_ticks)
    if not shown:
        places = ticks(*x_domain(chart), log=chart.x_log, wanted=6)
        shown = [(value, tick_label(value, places, "")) for value in places]
    axes.set_xticks([value for value, _ in shown], [label for _, label in shown])
    axes.set_xticks([], minor=True)


def draw_bars(bars: Bars) -> Figure:
    """Stacked shares, a panel a side."""
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(7.2, 3.2), layout="constrained")
        for index, (title, panel) in enumerate(bars.panels):
            axes = figure.add_subplot(1, len(bars.panels), index + 1)
            base = [0.0] * len(panel)
            places = range(1, len(panel) + 1)
            for part, look in enumerate(bars.looks):
                heights = [shares[part] for shares in panel]
                axes.bar(places, heights, 0.8, bottom=base, color=look.light, label=look.label)
                base = [a + b for a, b in zip(base, heights, strict=True)]
            axes.set_title(title, loc="left", fontsize=11)
            axes.set_xlabel(bars.x_label)
            axes.set_ylim(0, 1)
            axes.set_yticks([0, 0.5, 1], ["0%", "50%", "100%"])
            axes.set_xticks(list(places)[:: -(-len(panel) // 9) or 1])
            axes.spines[["top", "right"]].set_visible(False)
        figure.axes[-1].legend(frameon=False, loc="center left", bbox_to_anchor=(1.01, 0.5))
    return figure


def draw_supports(grids: Sequence[SupportGrid]) -> Figure:
    """Grids of cells side by side."""
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(2.6 * len(grids), 3.0), layout="constrained")
        for index, grid in enumerate(grids):
            axes = figure.add_subplot(1, len(grids), index + 1)
            cells, colours = [], []
            for row, shares in enumerate(grid.shares):
                for column, portion in enumerate(shares):
                    cells.append(Rectangle((column, row), 1, 1))
                    level = shade(portion)
                    colours.append(
                        "#f1f3f6" if level < 0 else to_rgba(grid.look.light, opacity(level))
                    )
            axes.add_collection(
                PatchCollection(cells, facecolor=colours, edgecolor="#ffffff", linewidth=0.25)
            )
            axes.set(xlim=(0, grid.size), ylim=(grid.size, 0), aspect="equal")
            axes.set_xticks([])
            axes.set_yticks([])
            axes.spines[:].set_visible(False)
            axes.set_title(grid.title, fontsize=10.5, loc="left")
            axes.set_xlabel(f"keys → · {grid.remark}", fontsize=9.5)
        figure.axes[0].set_ylabel("← queries", fontsize=9.5)
    return figure


def draw_diagram(diagram: Diagram) -> Figure:
    """The decoder with its routers."""
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(WIDTH / 90, HEIGHT / 90))
        axes = figure.add_axes((0, 0, 1, 1))
        axes.set(xlim=(0, WIDTH), ylim=(HEIGHT, 0))
        axes.axis("off")
        x, y, width, height = diagram.frame
        axes.add_patch(
            FancyBboxPatch(
                (x, y),
                width,
                height,
                boxstyle="round,pad=0,rounding_size=14",
                facecolor="#fafbfc",
                edgecolor="#d5d9e0",
            )
        )
        axes.text(x + width - 12, y + 18, diagram.repeat, ha="right", va="center", color=MUTED)
        for arrow in diagram.arrows:
            colour = _ROUTER if arrow.kind == "router" else MUTED
            xs, ys = zip(*arrow.points, strict=True)
            axes.plot(xs, ys, color=colour, linewidth=1.3, zorder=2)
            axes.add_patch(Polygon(arrow_head(arrow), color=colour, linewidth=0, zorder=2))
        for node in diagram.nodes:
            _draw_node(axes, node)
    return figure


def _draw_node(axes: Axes, node: Node) -> None:
    edge = _ROUTER if node.kind == "router" else "#3f7fbf" if node.kind == "attention" else MUTED
    if node.kind == "sum":
        patch = Circle((node.x, node.y), node.width / 2, facecolor="#ffffff", edgecolor=edge)
    else:
        patch = FancyBboxPatch(
            (node.x - node.width / 2, node.y - node.height / 2),
            node.width,
            node.height,
            boxstyle="round,pad=0,rounding_size=7",
            facecolor=_FILLS[node.kind],
            edgecolor=edge,
        )
    patch.set_zorder(3)
    axes.add_patch(patch)
    centre = {"ha": "center", "va": "center", "zorder": 4}
    axes.text(node.x, node.y - (7 if node.small else 0), node.text, color=INK, fontsize=9, **centre)
    if node.small:
        axes.text(node.x, node.y + 9, node.small, color=MUTED, fontsize=7, **centre)
