"""Figures that commands draw outside of a report: kernels, speed-up, frontier, plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from matplotlib.figure import Figure

from mosar.core.config import MoSARConfig
from mosar.records import AttentionBenchmark
from mosar.report.charts import DASHED, DOTTED, Chart, Point, Series
from mosar.report.curves import speedup_charts
from mosar.report.drawing import draw_charts, render_figure, y_domain
from mosar.report.palette import NEUTRAL, Look, pair_looks
from mosar.report.retrofit import FrontierPoint
from mosar.report.routing_charts import decay_chart

__all__ = [
    "draw_decay_kernels",
    "draw_frontier",
    "draw_plan",
    "draw_speedup",
    "render_figure",
]


def draw_decay_kernels(config: MoSARConfig, max_distance: int | None = None) -> Figure:
    """The gate of every distinct regime pair over distance."""
    return draw_charts([decay_chart(config, max_distance)])


def draw_speedup(records: Sequence[AttentionBenchmark]) -> Figure:
    """Speed-up over dense SDPA against length, one panel per mode and one line per shape.

    Rows that are wrong or were not timed are left out.
    """
    charts = speedup_charts(records)
    if not charts:
        raise ValueError("there is no speed-up to draw: no record has one")
    return draw_charts(charts)


def draw_frontier(
    panels: Mapping[int, tuple[Sequence[FrontierPoint], Sequence[FrontierPoint]]],
) -> Figure:
    """Perplexity gap against density, one panel per length: learned points, and fixed windows."""
    looks = (
        Look("learned routing, sparse", "#5b3fa8", "#a48ff0", "square"),
        Look("fixed window and sinks", "#e0457b", "#f4769f", "circle", DASHED),
    )
    charts = [
        Chart(
            name=f"frontier_{length}",
            title=f"{length:,} tokens",
            caption="",
            x_label="density: pairs read / causal pairs",
            y_label="perplexity against dense",
            unit=" %",
            line_at=0.0,
            series=tuple(
                Series(
                    key=look.label,
                    look=look,
                    annotated=True,
                    points=tuple(
                        Point(p.density, 100 * p.gap, p.name.removeprefix("window "))
                        for p in points
                    ),
                )
                for look, points in zip(looks, both, strict=True)
            ),
        )
        for length, both in sorted(panels.items())
        if any(both)
    ]
    if not charts:
        raise ValueError("there is no frontier to draw: nothing was evaluated beside dense")
    ends = [y_domain(chart, chart.series) for chart in charts]
    shared = min(low for low, _ in ends), max(high for _, high in ends)
    return draw_charts([replace(chart, y_domain=shared) for chart in charts])


def draw_plan(costs: Sequence[Mapping[str, Any]], rest: float, title: str) -> Figure:
    """How attention's cost grows with context, as `mosar plan --plot` draws it.

    `costs` are rows of a plan's "attention_by_context"; `rest` is the forward pass without it.
    Filled marks were measured at that multiple of the training length, hollow ones are modelled.
    """
    curves: dict[str, list[Mapping[str, Any]]] = {}
    for cost in costs:
        curves.setdefault(cost["curve"], []).append(cost)
    first = next(iter(curves.values()))
    ticks = tuple((row["context"], _thousands(row["context"])) for row in first)

    def line(
        look: Look, rows: Sequence[Mapping[str, Any]], key: str, unit: float, **more
    ) -> Series:
        points = tuple(Point(row["context"], row[key] / unit, "") for row in rows)
        return Series(key=look.label, look=look, points=points, **more)

    def panel(name: str, y_label: str, key: str, unit: float, series: list[Series]) -> Chart:
        for label, look in pair_looks(curves).items():
            rows = curves[label]
            series.append(line(replace(look, marker="ring"), rows, key, unit))
            measured = [r for r in rows if r["basis"] == "measured" and key == "sparse"]
            full = replace(look, marker="circle")
            series.append(
                line(full, measured, key, unit, note="measured", dash="none", in_legend=False)
            )
        return Chart(
            name=name,
            title=f"{title}: {name}" if key == "sparse" else name,
            caption="",
            x_label="context (tokens)",
            y_label=y_label,
            x_log=True,
            y_log=True,
            x_ticks=ticks,
            series=tuple(series),
        )

    dense = replace(NEUTRAL, label="all pairs")
    forward = replace(NEUTRAL, label="the rest of the forward pass", dash=DOTTED)
    constant = [{"context": row["context"], "rest": rest} for row in first]
    compute = [line(dense, first, "dense", 1e9), line(forward, constant, "rest", 1e9)]
    cache = [line(replace(dense, label="every key"), first, "dense_cache", 2**20)]
    return draw_charts(
        [
            panel("attention, forward", "GFLOP a token", "sparse", 1e9, compute),
            panel("KV cache", "MiB a sequence, a rank", "cache", 2**20, cache),
        ]
    )


def _thousands(context: int) -> str:
    return f"{context / 1024:g}k" if context % 1024 == 0 else f"{context:g}"
