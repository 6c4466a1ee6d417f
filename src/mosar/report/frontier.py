"""The frontier: what reading fewer pairs costs, learned routing against fixed windows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from mosar.report.figures import GRID, INK, MUTED, STYLE
from mosar.report.retrofit import Point

_LEARNED, _WINDOW = "#5b3fa8", "#e0457b"


def draw_frontier(panels: Mapping[int, tuple[Sequence[Point], Sequence[Point]]]) -> Figure:
    """Perplexity gap against density, a panel a length: learned points, and fixed windows."""
    shown = {length: points for length, points in panels.items() if any(points)}
    if not shown:
        raise ValueError("there is no frontier to draw: nothing was evaluated beside dense")
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(4.6 * len(shown), 4.0), layout="constrained")
        first = None
        for index, (length, (learned, windows)) in enumerate(sorted(shown.items())):
            axes = figure.add_subplot(1, len(shown), index + 1, sharey=first)
            first = first or axes
            _draw_points(axes, windows, _WINDOW, "fixed window and sinks", (0, (4, 3)), "o")
            _draw_points(axes, learned, _LEARNED, "learned routing, sparse", "solid", "s")
            axes.axhline(0, color=MUTED, linewidth=0.8)
            axes.set_title(f"{length:,} tokens", loc="left", fontsize=11)
            axes.set_xlabel("density: pairs read / causal pairs")
            if index == 0:
                axes.set_ylabel("perplexity against dense, %")
                axes.legend(frameon=False, fontsize=9.5)
            axes.grid(color=GRID, linewidth=0.8)
            axes.set_axisbelow(True)
            axes.spines[["top", "right"]].set_visible(False)
    return figure


def _draw_points(
    axes: Axes, points: Sequence[Point], colour: str, label: str, style: object, marker: str
) -> None:
    if not points:
        return
    axes.plot(
        [point.density for point in points],
        [100 * point.gap for point in points],
        color=colour,
        linestyle=style,  # pyright: ignore[reportArgumentType]
        linewidth=1.6,
        marker=marker,
        markersize=5,
        label=label,
        gid=label,
    )
    for point in points:
        axes.annotate(
            point.name.removeprefix("window "),
            (point.density, 100 * point.gap),
            xytext=(5, 5),
            textcoords="offset points",
            fontsize=8,
            color=INK,
            parse_math=False,
        )
