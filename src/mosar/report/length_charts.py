"""Charts against length: perplexity and its differences, density, reach.

Each is empty where there is nothing to draw.
"""

from __future__ import annotations

from collections.abc import Callable

from mosar.report.charts import Chart, Point, Series
from mosar.report.comparison import BASELINE, Comparison, Estimate, Setting
from mosar.report.formats import percent, perplexity, share, times
from mosar.report.palette import variant_looks
from mosar.report.paper import paper_delta, paper_length, paper_routing
from mosar.report.series import DASHED, DOTTED, cap_of, noted, point
from mosar.report.verdicts import reach_estimate

PAPER = "paper"
# Differences up to so many percent always fit: most of them are below zero.
LEAST_CAP = 5.0


def perplexity_by_length(c: Comparison) -> Chart:
    series = [
        _over_lengths(c, variant, lambda f, v=variant: c.estimate(Setting(v, f)), perplexity)
        for variant in c.evaluated
    ]
    return _by_length(
        c,
        name="perplexity_by_length",
        title="Perplexity against length",
        caption="The same tokens at every length, each variant as it was trained (soft routing "
        "where it has routers). Bands: one standard deviation over seeds.",
        y_label="perplexity",
        y_log=True,
        series=series,
        cap=cap_of(series),
    )


def delta_by_length(c: Comparison) -> Chart:
    """Against the baseline, with the paper's own."""
    series = []
    for variant in c.evaluated:
        if variant == BASELINE:
            continue
        ours = _over_lengths(c, variant, lambda f, v=variant: c.delta(v, f), percent)
        if ours.points:
            series += [ours, _paper_series(c, variant, lambda f, v=variant: paper_delta(v, f))]
    # The paper's p-RoPE, at +95 %, would press all the others together.
    cap = cap_of(line for line in series if line.note != PAPER)
    return _by_length(
        c,
        name="delta_by_length",
        title="Against RoPE, and beside the paper",
        caption="Perplexity relative to RoPE of the same seed. Dotted: the paper's own, at 2k, 4k "
        "and 8k tokens.",
        y_label="perplexity against RoPE",
        unit=" %",
        line_at=0.0,
        series=series,
        cap=max(LEAST_CAP, cap or 0.0),
    )


def gap_by_length(c: Comparison) -> Chart:
    """What becomes of perplexity when soft routing is made discrete."""
    series = []
    for variant in c.routed:
        for routing, dash in (("top1", ""), ("sparse", DASHED)):
            ours = _over_lengths(
                c,
                variant,
                lambda f, v=variant, r=routing: c.relative(Setting(v, f, r), Setting(v, f, "soft")),
                percent,
            )
            series.append(noted(ours, "top-1" if routing == "top1" else "sparse", dash))
        if series[-1].points or series[-2].points:
            series.append(
                _paper_series(c, variant, lambda f, v=variant: paper_routing(v, f).get("gap_pct"))
            )
    return _by_length(
        c,
        name="gap_by_length",
        title="The price of discrete routing",
        caption="Perplexity of top-1 routing (solid) and of sparse execution (dashed) against soft "
        "routing of the same checkpoint. Dotted: the paper's top-1 gap.",
        y_label="perplexity against soft routing",
        unit=" %",
        line_at=0.0,
        series=series,
    )


def density_by_length(c: Comparison) -> Chart:
    series = []
    for variant in c.evaluated:
        routing = next((r for r in ("sparse", "top1") if r in c.routings(variant)), None)
        line = _over_lengths(
            c,
            variant,
            lambda f, v=variant, r=routing: c.estimate(Setting(v, f, r), lambda r: r.density),
            share,
        )
        if any(point.y < 1 for point in line.points):
            series.append(line)
    return _by_length(
        c,
        name="density_by_length",
        title="Support density",
        caption="ρ: the exact share of causal pairs that sparse attention evaluates, mean over "
        "layers. Geometries that evaluate every pair have 1 and are not drawn.",
        y_label="support density ρ",
        y_zero=True,
        series=series,
    )


def reach_by_length(c: Comparison) -> Chart:
    series = []
    for variant in c.routed:
        for top1, note, dash in ((False, "soft", ""), (True, "top-1", DASHED)):
            line = _over_lengths(
                c,
                variant,
                lambda f, v=variant, hard=top1: reach_estimate(c, v, f, top1=hard),
                share,
            )
            series.append(noted(line, note, dash))
        if series[-1].points or series[-2].points:
            series.append(
                _paper_series(
                    c, variant, lambda f, v=variant: paper_routing(v, f).get("top1_reach"), share
                )
            )
    return _by_length(
        c,
        name="reach_by_length",
        title="Normalized reach",
        caption="Mean reach of the chosen regimes over the length, of the routers' probabilities "
        "(solid) and of top-1 routing (dashed). Dotted: the paper's top-1 reach. It is not the "
        "density: a band of reach n/16 covers about twice that share of the causal pairs.",
        y_label="normalized reach",
        y_zero=True,
        series=series,
    )


def _by_length(c: Comparison, *, series: list[Series], **fields) -> Chart:
    names = []
    for factor in c.factors:
        length = c.train_length and round(c.train_length * factor)
        names.append((factor, f"{times(factor)} · {length:,}" if length else times(factor)))
    return Chart(
        x_label="length: times the training length · tokens",
        x_log=True,
        x_ticks=tuple(names),
        series=tuple(line for line in series if line.points),
        **fields,
    )


def _over_lengths(
    c: Comparison,
    variant: str,
    estimate: Callable[[float], Estimate | None],
    text: Callable[[float], str],
) -> Series:
    look = variant_looks(c.evaluated)[variant]
    found = [(factor, estimate(factor)) for factor in c.factors]
    points = tuple(point(f, value, text) for f, value in found if value is not None)
    return Series(key=variant, label=look.label, look=look, points=points)


def _paper_series(
    c: Comparison,
    variant: str,
    value: Callable[[float], float | None],
    text: Callable[[float], str] = percent,
) -> Series:
    look = variant_looks(c.evaluated)[variant]
    found = [(factor, value(factor)) for factor in c.factors]
    points = tuple(
        Point(factor, figure, f"{text(figure)} at {paper_length(factor)}")
        for factor, figure in found
        if figure is not None
    )
    return Series(key=variant, label=look.label, look=look, points=points, note=PAPER, dash=DOTTED)
