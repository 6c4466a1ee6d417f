"""Charts of training, of positions and distances, along a grid's axis, and of speed."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable

from mosar.records import AttentionBenchmark, DecodeBenchmark, EvaluationRecord, RetrievalRecord
from mosar.report.charts import Chart, Mark, Point, Series
from mosar.report.comparison import (
    BASELINE,
    Comparison,
    Estimate,
    curve_of,
    factor_of,
    mean_mass,
    perplexity_of,
)
from mosar.report.formats import percent, perplexity, setting, share, times
from mosar.report.palette import Look, sequence_looks, variant_looks
from mosar.report.series import DASHED, DOTTED, cap_of, noted, point


def validation_curves(c: Comparison) -> Chart:
    series = []
    looks = variant_looks(c.variants)
    for variant, runs in c.trainings.items():
        curves = {seed: curve_of(run.valid_curve) for seed, run in runs.items()}
        points = [
            point(step, Estimate({s: _exp(curve[step]) for s, curve in found}), perplexity)
            for step, found in _common_steps(curves)
        ]
        series.append(
            Series(
                key=variant, label=looks[variant].label, look=looks[variant], points=tuple(points)
            )
        )
    final = sorted(line.points[-1].y for line in series if line.points)
    return Chart(
        name="validation_curves",
        title="Validation perplexity during training",
        caption="At the training length, on a part of the validation text. Bands: one standard "
        "deviation over seeds. The steep start is cut off.",
        cap=2 * final[len(final) // 2] if final else None,
        x_label="step",
        y_label="perplexity",
        y_log=True,
        series=tuple(s for s in series if s.points),
    )


def validation_delta(c: Comparison) -> Chart:
    """The same against the baseline of the same seed: the curves lie too close to be compared."""
    runs_of_baseline = c.trainings.get(BASELINE, {})
    baseline = {seed: curve_of(run.valid_curve) for seed, run in runs_of_baseline.items()}
    looks = variant_looks(c.variants)
    series = []
    for variant, runs in c.trainings.items():
        if variant == BASELINE:
            continue
        curves = {}
        for seed in runs.keys() & baseline.keys():
            theirs = baseline[seed]
            curves[seed] = {
                step: (math.exp(loss - theirs[step]) - 1) * 100
                for step, loss in runs[seed].valid_curve
                if step in theirs and abs(loss - theirs[step]) < 50
            }
        points = [
            point(step, Estimate({s: curve[step] for s, curve in found}), percent)
            for step, found in _common_steps(curves)
        ]
        look = looks[variant]
        series.append(Series(key=variant, label=look.label, look=look, points=tuple(points)))
    return Chart(
        name="validation_delta",
        title="Against RoPE during training",
        caption="Validation perplexity relative to RoPE of the same seed at the same step.",
        x_label="step",
        y_label="perplexity against RoPE",
        unit=" %",
        line_at=0.0,
        series=tuple(s for s in series if s.points),
    )


def _exp(loss: float) -> float:
    """Perplexity, and no overflow where a model has collapsed."""
    return math.exp(min(loss, 700.0))


def _common_steps(
    curves: dict[int, dict[float, float]],
) -> Iterable[tuple[float, list[tuple[int, dict[float, float]]]]]:
    """Steps after the start that every seed has, each with the curves."""
    if not curves:
        return
    shared = set.intersection(*(set(curve) for curve in curves.values()))
    for step in sorted(step for step in shared if step > 0):
        yield step, sorted(curves.items())


def perplexity_by_position(c: Comparison, factor: float) -> Chart:
    """How well a token is predicted that has so much text before it."""
    looks = variant_looks(c.evaluated)
    series = []
    for variant in c.evaluated:
        records = c.records(variant, factor, c.own_routing(variant) or "native")
        buckets: dict[tuple[float, float], dict[int, float]] = {}
        for record in records:
            for start, end, loss, tokens in record.buckets:
                if tokens:
                    seeds = buckets.setdefault((start, end), {})
                    seeds[record.cell.seed] = _exp(loss)
        points = [
            point((start + end) / 2, Estimate(values), perplexity)
            for (start, end), values in sorted(buckets.items())
        ]
        look = looks[variant]
        series.append(Series(key=variant, label=look.label, look=look, points=tuple(points)))
    marks = (Mark(c.train_length, "training length"),) if c.train_length and factor > 1 else ()
    beyond = ": what lies right of the mark was never seen in training" if marks else ""
    return Chart(
        name=f"perplexity_by_position_{factor:g}x",
        title="Perplexity by place in the window",
        caption=f"Tokens grouped by their position in the window{beyond}.",
        cap=cap_of(series),
        x_label="position in the window",
        y_label="perplexity",
        y_log=True,
        marks=marks,
        series=tuple(s for s in series if s.points),
    )


def retrieval(c: Comparison, task: str, length: int) -> Chart:
    """Accuracy against the distance to what is asked for."""
    records = [r for r in c.retrievals if (r.task, r.length) == (task, length)]
    looks = variant_looks({record.cell.variant for record in records})
    series = []
    for variant, look in looks.items():
        routings = sorted({r.routing for r in records if r.cell.variant == variant})
        for routing in routings:
            mine = [r for r in records if (r.cell.variant, r.routing) == (variant, routing)]
            points = tuple(_accuracies(mine))
            line = Series(key=variant, label=look.label, look=look, points=points)
            hard = {"top1": ("top-1", DASHED), "sparse": ("sparse", DOTTED)}.get(routing)
            series.append(noted(line, *hard) if hard else line)
    reaches: dict[str, float] = {}
    for record in records:
        reaches |= record.reaches
    farthest = max((row[1] - 1 for r in records for row in r.by_distance), default=0.0)
    nearest = min((row[0] for r in records for row in r.by_distance), default=0.0)
    factor = factor_of(records[0]) if records else 1
    chance = statistics.fmean(record.chance for record in records) if records else 0.0
    return Chart(
        name=f"retrieval_{task}_{length}",
        title=f"{task.capitalize()}: found at what distance, {times(factor)} length",
        caption="Share of right answers by the distance between the question and what it asks for; "
        "marks at the regimes' reaches, the level is chance.",
        x_label="distance",
        y_label="accuracy",
        x_log=nearest > 0 or farthest > 0,
        y_domain=(0.0, 1.02),
        marks=tuple(
            Mark(reach, f"{name} {reach:g}")
            for name, reach in sorted(reaches.items(), key=lambda item: item[1])
            if nearest <= reach <= farthest
        ),
        line_at=chance,
        series=tuple(s for s in series if s.points),
    )


def _accuracies(records: list[RetrievalRecord]) -> Iterable[Point]:
    bins: dict[tuple[float, float], dict[int, float]] = {}
    for record in records:
        for start, end, accuracy, answers in record.by_distance:
            if answers:
                bins.setdefault((start, end), {})[record.cell.seed] = accuracy
    for (start, end), values in sorted(bins.items()):
        # The middle of its distances on a logarithmic axis; the end is the next bin's.
        middle = math.sqrt(max(start, 1.0) * max(end - 1, 1.0))
        yield point(middle, Estimate(values), lambda value: share(value, 2))


def axis_chart(
    c: Comparison,
    key: str,
    name: str,
    y_label: str,
    value: Callable[[EvaluationRecord], float | None],
    routing: str | None,
    text: Callable[[float], str],
    *,
    y_log: bool = False,
) -> Chart:
    """A figure against a grid's axis: one line a variant and length."""
    points = c.axes[key]
    numeric = all(
        isinstance(p.value, (int, float)) and not isinstance(p.value, bool) for p in points
    )
    places = [float(p.value) if numeric else float(i) for i, p in enumerate(points)]
    lines: list[Series] = []
    looks = variant_looks({variant for stop in points for variant in stop.cells})
    lengths = _ends(c.factors)
    for variant, look in looks.items():
        for factor, dash in zip(lengths, ("", DASHED), strict=False):
            found = []
            for x, stop in zip(places, points, strict=True):
                cells = stop.cells.get(variant, [])
                estimate = c.along_axis(cells, factor, routing, value)
                if estimate is not None:
                    found.append(point(x, estimate, text))
            line = Series(key=variant, label=look.label, look=look, points=tuple(found))
            lines.append(noted(line, times(factor), dash))
    spaced = numeric and min(places, default=0) > 0 and max(places) / min(places) >= 8
    last = f", dashed at {times(lengths[-1])}" if len(lengths) > 1 else ""
    return Chart(
        name=f"grid_{key}_{name}",
        title=f"{y_label.capitalize()} against {key}",
        caption=f"Solid at {times(lengths[0])}{last}." if lengths else "",
        x_label=key,
        y_label=y_label,
        x_log=bool(spaced),
        y_log=y_log,
        y_zero=not y_log,
        x_ticks=tuple(zip(places, (setting(p.value) for p in points), strict=True)),
        series=tuple(line for line in lines if line.points),
    )


def axis_charts(c: Comparison, key: str) -> list[Chart]:
    """Perplexity, discarded mass and density against a grid's axis."""
    charts = [
        axis_chart(c, key, "perplexity", "perplexity", perplexity_of, None, perplexity, y_log=True)
    ]
    for name, y_label, value in (
        ("discarded_mass", "discarded mass", mean_mass),
        ("density", "support density ρ", _density),
    ):
        # An evaluation may have measured it under one of the two only.
        found = [
            axis_chart(c, key, name, y_label, value, routing, share)
            for routing in ("sparse", "top1")
        ]
        charts += [chart for chart in found if not chart.empty][:1]
    return [chart for chart in charts if not chart.empty]


def _density(record: EvaluationRecord) -> float:
    return record.density


def speedup_chart(records: Iterable[AttentionBenchmark], mode: str) -> Chart:
    """Speed-up over dense SDPA against length, one line a shape, beside 1/rho."""
    rows = [record for record in records if record.mode == mode and record.speedup is not None]
    shapes = list(dict.fromkeys(record.shape for record in rows))
    looks = sequence_looks(shapes)
    series = [
        Series(
            key=f"shape-{shape}",
            label=shape,
            look=looks[shape],
            points=tuple(
                Point(r.length, r.speedup or 1.0, times(r.speedup or 1.0))
                for r in sorted((r for r in rows if r.shape == shape), key=lambda r: r.length)
            ),
        )
        for shape in shapes
    ]
    ideal = {record.length: 1 / record.density for record in rows if record.density}
    if mode.startswith("sparse"):
        look = Look("1/ρ, all that sparsity promises", "#6b7280", "#9aa3b2", "cross", DASHED)
        points = tuple(Point(n, ideal[n], times(ideal[n])) for n in sorted(ideal))
        series.append(Series(key="ideal", label=look.label, look=look, points=points))
    return Chart(
        name=f"speedup_{mode}",
        title=f"Speed-up over dense SDPA: {mode}",
        caption="Shapes are query heads × key/value heads × head dimension.",
        x_label="length",
        y_label="times as fast",
        x_log=True,
        y_log=True,
        unit="×",
        x_ticks=tuple((n, f"{n:,}") for n in sorted(ideal)),
        line_at=1.0,
        series=tuple(series),
    )


def decode_chart(records: Iterable[DecodeBenchmark]) -> Chart:
    """Speed-up of one step of decoding against the length of its context."""
    rows = [record for record in records if record.speedup is not None]
    names = list(dict.fromkeys(f"{record.shape}, {record.labels}" for record in rows))
    looks = sequence_looks(names)
    series = []
    for name in names:
        mine = [record for record in rows if f"{record.shape}, {record.labels}" == name]
        points = tuple(
            Point(r.length, r.speedup or 1.0, times(r.speedup or 1.0))
            for r in sorted(mine, key=lambda record: record.length)
        )
        key = f"decode-{name}"
        series.append(Series(key=key, label=name, look=looks[name], points=points))
    return Chart(
        name="decode_speedup",
        title="Speed-up over dense SDPA: one step of decoding",
        caption="With the regime cache, against the length of the context.",
        x_label="context",
        y_label="times as fast",
        x_log=True,
        y_log=True,
        unit="×",
        x_ticks=tuple((n, f"{n:,}") for n in sorted({record.length for record in rows})),
        line_at=1.0,
        series=tuple(series),
    )


def _ends(factors: list[float]) -> list[float]:
    """The training length and the longest."""
    return list(dict.fromkeys([factors[0], factors[-1]])) if factors else []
