"""How attention's cost grows with context, as `mosar plan --plot` draws it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from mosar.report.figures import GRID, INK, MUTED, STYLE

_COLOURS = ("#2f86c9", "#e0457b", "#2f9e6e", "#5b3fa8", "#f2913d")


def draw_plan(costs: Sequence[Mapping[str, Any]], rest: float, title: str) -> Figure:
    """`costs` are rows of a plan's "attention_by_context"; `rest` is the forward pass without it.

    Filled marks were measured at that multiple of the training length, hollow ones are modelled.
    """
    curves: dict[str, list[Mapping[str, Any]]] = {}
    for cost in costs:
        curves.setdefault(cost["curve"], []).append(cost)
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(9.6, 4.0), layout="constrained")
        left, right = figure.subplots(1, 2)
        any_curve = next(iter(curves.values()))
        contexts = [row["context"] for row in any_curve]
        left.plot(contexts, [row["dense"] / 1e9 for row in any_curve], color=INK, label="all pairs")
        left.axhline(rest / 1e9, color=MUTED, linestyle=":", label="the rest of the forward pass")
        right.plot(
            contexts,
            [row["dense_cache"] / 2**20 for row in any_curve],
            color=INK,
            label="every key",
        )
        for colour, (name, rows) in zip(_COLOURS, curves.items(), strict=False):
            _draw(left, rows, "sparse", 1e9, colour, name)
            _draw(right, rows, "cache", 2**20, colour, name)
        for axes, label in ((left, "GFLOP a token"), (right, "MiB a sequence, a rank")):
            axes.set(xscale="log", yscale="log", xlabel="context (tokens)", ylabel=label)
            axes.set_xticks(contexts, [_thousands(context) for context in contexts])
            axes.xaxis.set_minor_locator(NullLocator())
            axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            axes.grid(color=GRID, linewidth=0.7)
            axes.spines[["top", "right"]].set_visible(False)
            axes.legend(facecolor="white", edgecolor="none", framealpha=1, fontsize=9)
        left.set_title("attention, forward", loc="left", fontsize=10.5)
        right.set_title("KV cache", loc="left", fontsize=10.5)
        figure.suptitle(title, x=0.01, ha="left", fontsize=11.5)
    return figure


def _draw(
    axes: Axes, rows: list[Mapping[str, Any]], key: str, unit: float, colour: str, name: str
) -> None:
    contexts, values = [row["context"] for row in rows], [row[key] / unit for row in rows]
    axes.plot(contexts, values, color=colour, label=name)
    for context, value, row in zip(contexts, values, rows, strict=True):
        measured = row["basis"] == "measured" and key == "sparse"
        face = colour if measured else "white"
        axes.plot(context, value, marker="o", markersize=5, color=colour, markerfacecolor=face)


def _thousands(context: int) -> str:
    return f"{context / 1024:g}k" if context % 1024 == 0 else f"{context:g}"
