"""Charts of training, of positions and distances, along a grid's axis, and of speed."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any

from mosar.records import (
    AttentionBenchmark,
    Cell,
    DecodeBenchmark,
    RetrievalRecord,
)
from mosar.report.charts import DASHED, DOTTED, Chart, Mark, Point, Series, cap_of, point, points
from mosar.report.claims import far_accuracy, medium_reach
from mosar.report.comparison import (
    BASELINE,
    Comparison,
    Estimate,
    curve_of,
    factor_of,
    perplexity_of,
)
from mosar.report.formats import percent, perplexity, setting, share, times
from mosar.report.palette import Look, sequence_looks

GAP = "gap of sparse execution"
# A figure of the cells of one variant at a point of an axis.
Along = Callable[[list[Cell]], Estimate | None]


def variant_series(
    c: Comparison, variants: Iterable[str], points_of: Callable[[str], Iterable[Point]]
) -> list[Series]:
    """A line for each variant, in its look."""
    return [Series(key=v, look=c.looks[v], points=tuple(points_of(v))) for v in variants]


def validation_curves(c: Comparison) -> Chart:
    def curve(variant: str) -> Iterable[Point]:
        runs = c.trainings[variant].items()
        return _over_seeds(
            {seed: _perplexities(curve_of(run.valid_curve)) for seed, run in runs}, perplexity
        )

    series = variant_series(c, c.trainings, curve)
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
        series=tuple(series),
    )


def validation_delta(c: Comparison) -> Chart:
    """The same against the baseline of the same seed: the curves lie too close to be compared."""
    runs_of_baseline = c.trainings.get(BASELINE, {})
    baseline = {seed: curve_of(run.valid_curve) for seed, run in runs_of_baseline.items()}

    def curve(variant: str) -> Iterable[Point]:
        curves = {}
        for seed in c.trainings[variant].keys() & baseline.keys():
            theirs = baseline[seed]
            curves[seed] = {
                step: (math.exp(loss - theirs[step]) - 1) * 100
                for step, loss in c.trainings[variant][seed].valid_curve
                if step in theirs and abs(loss - theirs[step]) < 50
            }
        return _over_seeds(curves, percent)

    return Chart(
        name="validation_delta",
        title="Against RoPE during training",
        caption="Validation perplexity relative to RoPE of the same seed at the same step.",
        x_label="step",
        y_label="perplexity against RoPE",
        unit=" %",
        line_at=0.0,
        series=tuple(variant_series(c, [v for v in c.trainings if v != BASELINE], curve)),
    )


def _perplexities(losses: dict[float, float]) -> dict[float, float]:
    """Perplexities, without an overflow where a model has collapsed."""
    return {place: math.exp(min(loss, 700.0)) for place, loss in losses.items()}


def _over_seeds(
    curves: dict[int, dict[float, float]], text: Callable[[float], str]
) -> Iterable[Point]:
    """At each step after the start that every seed has."""
    shared = set.intersection(*map(set, curves.values())) if curves else set()
    for step in sorted(step for step in shared if step > 0):
        values = {seed: curve[step] for seed, curve in sorted(curves.items())}
        yield point(step, Estimate(values), text)


def perplexity_by_position(c: Comparison, factor: float) -> Chart:
    """How well tokens are predicted, by how much text stands before them."""

    def curve(variant: str) -> Iterable[Point]:
        spans: dict[float, dict[int, float]] = {}
        for record in c.records(variant, factor, c.own_routing(variant) or "native"):
            losses = {(row[0] + row[1]) / 2: row[2] for row in record.buckets if row[3]}
            for middle, figure in _perplexities(losses).items():
                spans.setdefault(middle, {})[record.cell.seed] = figure
        return [point(middle, Estimate(spans[middle]), perplexity) for middle in sorted(spans)]

    series = variant_series(c, c.evaluated, curve)
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
        series=tuple(series),
    )


def retrieval(c: Comparison, task: str, length: int) -> Chart:
    """Accuracy against the distance to what is asked for."""
    records = [r for r in c.retrievals if (r.task, r.length) == (task, length)]
    asked = {record.cell.variant for record in records}
    styles = {"native": ("", None), "soft": ("", None), "top1": ("top-1", DASHED)}
    series = []
    for variant in (name for name in c.looks if name in asked):
        drawn: list[tuple[Point, ...]] = []
        for routing in sorted({r.routing for r in records if r.cell.variant == variant}):
            note, dash = styles.get(routing, (routing, DOTTED))
            mine = [r for r in records if (r.cell.variant, r.routing) == (variant, routing)]
            found, look = tuple(_accuracies(mine)), c.looks[variant]
            if found not in drawn:
                series.append(Series(key=variant, look=look, points=found, note=note, dash=dash))
                drawn.append(found)
    names: dict[float, set[str]] = {}
    for record in records:
        for name, reach in record.reaches.items():
            names.setdefault(reach, {f"{reach:g}"}).add(name)
    farthest = max((row[1] - 1 for r in records for row in r.by_distance), default=0.0)
    nearest = min((row[0] for r in records for row in r.by_distance), default=0.0)
    factor = factor_of(records[0]) if records else 1
    return Chart(
        name=f"retrieval_{task}_{length}",
        title=f"{task.capitalize()}: found at what distance, {times(factor)} length",
        caption="Share of right answers by the distance between the question and what it asks for; "
        "marks at the regimes' reaches, the level is chance. Routings of a variant with the same "
        "answers are one line.",
        x_label="distance",
        y_label="accuracy",
        x_log=nearest > 0 or farthest > 0,
        y_domain=(0.0, 1.02),
        marks=tuple(
            Mark(reach, " ".join(sorted(found, reverse=True)))
            for reach, found in sorted(names.items())
            if nearest <= reach <= farthest
        ),
        line_at=statistics.fmean(record.chance for record in records) if records else 0.0,
        series=tuple(series),
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
    ways: dict[str, Along],
    text: Callable[[float], str],
    about: str = "",
    **options: Any,
) -> Chart:
    """A figure against a grid's axis, with one line per variant and way."""
    stops = c.axes[key]
    numeric = all(
        isinstance(p.value, (int, float)) and not isinstance(p.value, bool) for p in stops
    )
    places = {float(p.value) if numeric else float(i): p for i, p in enumerate(stops)}
    found = {variant for stop in stops for variant in stop.cells}
    lines = [
        Series(
            key=variant,
            look=c.looks[variant],
            note=note,
            dash=dash,
            points=points(
                places, lambda x, v=variant, f=figure: f(places[x].cells.get(v, [])), text
            ),
        )
        for variant in c.looks
        if variant in found
        for (note, figure), dash in zip(ways.items(), ("", DASHED), strict=False)
    ]
    spaced = numeric and min(places, default=0) > 0 and max(places) / min(places) >= 8
    notes = [f"{style}: {note}" for style, note in zip(("Solid", "dashed"), ways, strict=False)]
    return Chart(
        name=f"grid_{key}_{name}",
        title=f"{y_label[:1].upper()}{y_label[1:]} against {key}",
        caption=f"{about}{'; '.join(notes)}." if notes else about,
        x_label=key,
        y_label=y_label,
        x_log=bool(spaced),
        x_ticks=tuple((x, setting(stop.value)) for x, stop in places.items()),
        series=tuple(lines),
        **options,
    )


def change_chart(c: Comparison, factor: float) -> Chart:
    """What each single change costs, and how many pairs it reads."""
    series = []
    for variant, changes in c.changes.items():
        found = []
        shared = set.intersection(*({cell.seed for cell in cells} for cells in changes.values()))
        for change, every in changes.items():
            cells = [cell for cell in every if cell.seed in shared]
            density, value = (
                c.density_of(cells, factor),
                c.along_axis(cells, factor, None, perplexity_of),
            )
            if density is not None and value is not None:
                name = change.removeprefix("attention.") or "unchanged"
                found.append(Point(density.mean, value.mean, name))
        look = c.looks[variant]
        series.append(
            Series(key=variant, look=look, points=tuple(found), dash="none", annotated=True)
        )
    return Chart(
        name=f"changes_{factor:g}x",
        title=f"One change at a time, {times(factor)}",
        caption="Each point is a variant with one setting changed, mean over the seeds that all "
        "of them have. Left and low is better.",
        x_label="support density ρ",
        y_label="perplexity",
        x_log=True,
        series=tuple(series),
    )


def axis_charts(c: Comparison, key: str) -> list[Chart]:
    """What an axis changes: perplexity, the price of going sparse, what is read, what is found."""

    def at_lengths(figure: Callable[[list[Cell], float], Estimate | None]) -> dict[str, Along]:
        """At the training length and at the longest."""
        return {times(f): lambda cells, f=f: figure(cells, f) for f in c.ends}

    own = at_lengths(lambda cells, f: c.along_axis(cells, f, None, perplexity_of))
    charts = [
        axis_chart(c, key, "perplexity", "perplexity", own, perplexity, y_log=True),
        axis_chart(
            *(c, key, "gap", GAP, at_lengths(c.gap_of), percent),
            about="Perplexity executed sparsely against soft routing of the same run. ",
            unit=" %",
            line_at=0.0,
        ),
        axis_chart(
            *(c, key, "discarded_mass", "discarded mass", at_lengths(c.mass_of), share), y_zero=True
        ),
        axis_chart(
            *(c, key, "density", "support density ρ", at_lengths(c.density_of), share), y_zero=True
        ),
        *_found_along(c, key),
    ]
    # One point is no curve.
    return [chart for chart in charts if any(len(line.points) > 1 for line in chart.series)]


def _found_along(c: Comparison, key: str) -> Iterable[Chart]:
    """Right answers from far away, as the model was trained and executed sparsely."""
    by_task: dict[str, list[RetrievalRecord]] = {}
    for record in c.experiment.retrievals:
        by_task.setdefault(record.task, []).append(record)
    for task, records in sorted(by_task.items()):
        near = min(map(factor_of, records))
        ways = {
            note: _far_along(c, records, near, routing)
            for note, routing in (("as trained", None), ("sparse", "sparse"))
        }
        label = f"{task} from far, {times(near)}"
        yield axis_chart(c, key, f"far_{task}", label, ways, share, y_domain=(0.0, 1.02))


def _far_along(
    c: Comparison, records: list[RetrievalRecord], factor: float, routing: str | None
) -> Along:
    beyond = medium_reach(c)
    return lambda cells: c.along_axis(
        cells, factor, routing, lambda record: far_accuracy(record, beyond), records
    )


def speedup_charts(records: Iterable[AttentionBenchmark]) -> list[Chart]:
    """Speed-up over dense SDPA against length, one chart per mode that has one."""
    timed = [record for record in records if record.speedup is not None]
    modes = dict.fromkeys(record.mode for record in timed)
    return [_speedup_chart([r for r in timed if r.mode == mode], mode) for mode in modes]


def _speedup_chart(rows: Sequence[AttentionBenchmark], mode: str) -> Chart:
    """One line per shape with its break-even point, beside 1/rho."""
    series = []
    for line in _speedup_lines(rows, lambda record: record.shape, "speedup"):
        even = break_even([p.x for p in line.points], [p.y for p in line.points])
        if even is None:
            remark = "slower at the end"
        elif even == line.points[0].x:
            remark = f"faster from {even:.0f} or less"
        else:
            remark = f"faster from {even:.0f}"
            ring = Look(line.label, line.look.light, line.look.dark, "ring")
            at = (Point(even, 1.0, f"from {even:.0f}"),)
            series.append(
                Series(key=line.key, look=ring, points=at, note="break-even", in_legend=False)
            )
        label = f"{line.label}: {remark}"
        look = Look(label, line.look.light, line.look.dark, line.look.marker)
        series.append(Series(key=line.key, look=look, points=line.points))
    ideal = {record.length: 1 / record.density for record in rows if record.density}
    if mode.startswith("sparse"):
        look = Look("1/ρ, all that sparsity promises", "#6b7280", "#9aa3b2", "cross", DASHED)
        promised = tuple(Point(n, ideal[n], times(ideal[n])) for n in sorted(ideal))
        series.append(Series(key="ideal", look=look, points=promised))
    labels = "" if rows[0].labels == "none" else f", labels: {rows[0].labels}"
    return Chart(
        name=f"speedup_{mode}",
        title=f"Speed-up over dense SDPA: {mode}{labels}",
        caption="Shapes are query heads × key/value heads × head dimension; a ring is where ours "
        "starts to be faster.",
        x_label="length",
        **_SPEEDUP,
        x_ticks=tuple((n, f"{n:,}") for n in sorted({record.length for record in rows})),
        series=tuple(series),
    )


def decode_chart(records: Iterable[DecodeBenchmark]) -> Chart:
    """Speed-up of one step of decoding against the length of its context."""
    rows = [record for record in records if record.speedup is not None]
    return Chart(
        name="decode_speedup",
        title="Speed-up over dense SDPA: one step of decoding",
        caption="With the regime cache, against the length of the context.",
        x_label="context",
        **_SPEEDUP,
        x_ticks=tuple((n, f"{n:,}") for n in sorted({record.length for record in rows})),
        series=tuple(_speedup_lines(rows, lambda r: f"{r.shape}, {r.labels}", "decode")),
    )


_SPEEDUP = {"y_label": "times as fast", "x_log": True, "y_log": True, "unit": "×", "line_at": 1.0}


def _speedup_lines(
    rows: Sequence[AttentionBenchmark | DecodeBenchmark],
    name_of: Callable[..., str],
    prefix: str,
) -> Iterable[Series]:
    looks = sequence_looks(dict.fromkeys(map(name_of, rows)))
    for name, look in looks.items():
        mine = sorted((r for r in rows if name_of(r) == name), key=lambda record: record.length)
        found = tuple(Point(r.length, r.speedup or 1.0, times(r.speedup or 1.0)) for r in mine)
        yield Series(key=f"{prefix}-{name}", look=look, points=found)


def break_even(lengths: Sequence[float], speedups: Sequence[float]) -> float | None:
    """The length from which the speed-up stays above 1, on straight lines between measurements in
    logarithms; the first length where it always is, None where it ends below."""
    if speedups[-1] < 1:
        return None
    logs = list(zip(map(math.log, lengths), map(math.log, speedups), strict=True))
    crossings = [(a, b) for a, b in pairwise(logs) if a[1] < 0 <= b[1]]
    if not crossings:
        return float(lengths[0])
    (x, y), (next_x, next_y) = crossings[-1]
    return math.exp(x - y * (next_x - x) / (next_y - y))
