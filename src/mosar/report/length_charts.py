"""Charts against length: perplexity and its differences, density, reach.

Each is empty where there is nothing to draw.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from mosar.report.charts import DASHED, DOTTED, Chart, Point, Series, cap_of, points
from mosar.report.comparison import BASELINE, Comparison, Estimate, Setting
from mosar.report.formats import percent, perplexity, share, times
from mosar.report.paper import paper_delta, paper_length, paper_routing
from mosar.report.verdicts import exact_density, reach_estimate

PAPER = "paper"
# Differences up to so many percent always fit: most of them are below zero.
LEAST_CAP = 5.0
Text = Callable[[float], str]


def perplexity_by_length(c: Comparison) -> Chart:
    series = [
        _over_lengths(c, v, lambda f, v=v: c.estimate(Setting(v, f)), perplexity)
        for v in c.evaluated
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
        ours = _over_lengths(c, variant, lambda f, v=variant: c.delta(v, f), percent)
        if variant != BASELINE and ours.points:
            series += [ours, _papers(ours, c, lambda f, v=variant: paper_delta(v, f), percent)]
    # The paper's p-RoPE, at +95 %, would squeeze all the others together.
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
    """How perplexity changes when soft routing is made discrete."""

    def against_soft(variant: str, factor: float, routing: str) -> Estimate | None:
        return c.relative(Setting(variant, factor, routing), Setting(variant, factor, "soft"))

    return _by_length(
        c,
        name="gap_by_length",
        title="The price of discrete routing",
        caption="Perplexity of top-1 routing (solid) and of sparse execution (dashed) against soft "
        "routing of the same checkpoint. Dotted: the paper's top-1 gap.",
        y_label="perplexity against soft routing",
        unit=" %",
        line_at=0.0,
        series=_two_ways(
            c, against_soft, {"top1": "top-1", "sparse": "sparse"}, "gap_pct", percent
        ),
    )


def density_by_length(c: Comparison) -> Chart:
    series = [_over_lengths(c, v, lambda f, v=v: _density(c, v, f), share) for v in c.evaluated]
    return _by_length(
        c,
        name="density_by_length",
        title="Support density",
        caption="ρ: the exact share of causal pairs that sparse attention evaluates, mean over "
        "layers. Geometries that evaluate every pair have 1 and are not drawn.",
        y_label="support density ρ",
        y_zero=True,
        series=[line for line in series if any(point.y < 1 for point in line.points)],
    )


def _density(c: Comparison, variant: str, factor: float) -> Estimate | None:
    if {"sparse", "top1"} & set(c.routings(variant)):
        return exact_density(c, variant, factor)
    return c.estimate(Setting(variant, factor), lambda record: record.density)


def reach_by_length(c: Comparison) -> Chart:
    def reach(variant: str, factor: float, routing: str) -> Estimate | None:
        return reach_estimate(c, variant, factor, top1=routing == "top1")

    return _by_length(
        c,
        name="reach_by_length",
        title="Normalized reach",
        caption="Mean reach of the chosen regimes over the length, of the routers' probabilities "
        "(solid) and of top-1 routing (dashed). Dotted: the paper's top-1 reach. It is not the "
        "density: a band of reach n/16 covers about twice that share of the causal pairs.",
        y_label="normalized reach",
        y_zero=True,
        series=_two_ways(c, reach, {"soft": "soft", "top1": "top-1"}, "top1_reach", share),
    )


def _two_ways(
    c: Comparison,
    estimate: Callable[[str, float, str], Estimate | None],
    routings: dict[str, str],
    theirs: str,
    text: Text,
) -> list[Series]:
    """Three lines per routed variant: two routings (solid and dashed), and the paper's."""
    series = []
    for variant in c.routed:
        ours = [
            _over_lengths(
                c, variant, lambda f, v=variant, r=routing: estimate(v, f, r), text
            ).noted(note, dash)
            for (routing, note), dash in zip(routings.items(), ("", DASHED), strict=True)
        ]
        series += ours
        if any(line.points for line in ours):
            said = lambda f, v=variant: paper_routing(v, f).get(theirs)  # noqa: E731
            series.append(_papers(ours[0], c, said, text))
    return series


def _by_length(c: Comparison, *, series: list[Series], **fields) -> Chart:
    names = []
    for factor in c.factors:
        length = c.train_length and round(c.train_length * factor)
        names.append((factor, f"{times(factor)} · {length:,}" if length else times(factor)))
    return Chart(
        x_label="length: times the training length · tokens",
        x_log=True,
        x_ticks=tuple(names),
        series=tuple(series),
        **fields,
    )


def _over_lengths(
    c: Comparison, variant: str, estimate: Callable[[float], Estimate | None], text: Text
) -> Series:
    found = points(c.factors, estimate, text)
    return Series(key=variant, look=c.looks[variant], points=found)


def _papers(
    ours: Series, c: Comparison, value: Callable[[float], float | None], text: Text
) -> Series:
    """The paper's own line beside ours."""
    figures = ((factor, value(factor)) for factor in c.factors)
    found = tuple(
        Point(factor, figure, f"{text(figure)} at {paper_length(factor)}")
        for factor, figure in figures
        if figure is not None
    )
    return replace(ours, points=found, note=PAPER, dash=DOTTED, faint=True)
