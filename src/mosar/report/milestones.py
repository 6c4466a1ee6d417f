"""What more training gives: a table and charts over the tokens of a run's milestones.

A milestone is a checkpoint on the way that was evaluated like the last one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from mosar.report.charts import DASHED, Chart, Point, point
from mosar.report.claims import far_accuracy, medium_reach
from mosar.report.comparison import (
    BASELINE,
    Comparison,
    Estimate,
    Setting,
    factor_of,
    mean_mass,
    relative_percent,
)
from mosar.report.curves import GAP, variant_series
from mosar.report.formats import number, percent, perplexity, share, times
from mosar.report.tables import Column, Table, estimate_cell, mark_best, plain_cell


def milestones_table(c: Comparison) -> Table:
    """The comparison at each number of trained tokens; empty where no milestones were evaluated."""
    ends = list(dict.fromkeys([*c.factors[:1], *c.factors[-1:]]))
    curves = {v: [c.by_tokens(Setting(v, f)) for f in c.factors] for v in c.evaluated}
    read = {
        v: [c.by_tokens(Setting(v, f, "sparse"), lambda record: record.density) for f in ends]
        for v in c.routed
    }
    amounts = sorted({tokens for by_tokens in curves.values() for tokens in by_tokens[-1]})
    columns = [
        Column("variant", numeric=False),
        *(Column(times(factor), "perplexity") for factor in c.factors),
        *(Column(times(factor), "vs RoPE") for factor in ends),
        *(Column(times(factor), "density, sparse") for factor in ends),
    ]
    rows, keys, groups = [], [], []
    for tokens in amounts if len(amounts) > 1 else ():
        figures = {v: [curve.get(tokens) for curve in curves[v]] for v in curves}
        last = {v: found[-1].mean for v, found in figures.items() if found[-1] is not None}
        baseline = figures.get(BASELINE, [None] * len(c.factors))
        ranked = sorted(last, key=lambda variant: last[variant])
        here = []
        for variant in ranked:
            against = map(relative_percent, figures[variant], baseline)
            differences = dict(zip(c.factors, against, strict=True))
            densities = [curve.get(tokens) for curve in read.get(variant, [])]
            here.append(
                [
                    plain_cell(c.looks[variant].label),
                    *(estimate_cell(found, perplexity) for found in figures[variant]),
                    *(estimate_cell(differences[factor], percent) for factor in ends),
                    *(estimate_cell(found, share) for found in densities or [None] * len(ends)),
                ]
            )
        mark_best(here, columns, "perplexity")
        rows += map(tuple, here)
        keys += ranked
        groups += [f"{number(tokens / 1e6, 2)} million tokens"] * len(ranked)
    return Table(
        name="milestones",
        title="More training",
        caption="Checkpoints of one run, evaluated like the last. Before the last the learning "
        "rate has not come down yet. Perplexity: as each variant was trained. Against RoPE: after "
        "as many tokens, within each seed. Density: executed sparsely, which may cost perplexity.",
        columns=tuple(columns),
        rows=tuple(rows),
        keys=tuple(keys),
        groups=tuple(groups),
    )


def perplexity_by_tokens(c: Comparison, factor: float) -> Chart:
    """What more training gives at one length; empty where no milestones were evaluated."""
    return _by_tokens(
        c,
        f"perplexity_by_tokens_{factor:g}x",
        f"Perplexity at {times(factor)}",
        "perplexity",
        {"": lambda variant: c.by_tokens(Setting(variant, factor))},
        perplexity,
        y_log=True,
    )


def density_by_tokens(c: Comparison, factor: float) -> Chart:
    """How the support changes with training, executed sparsely."""

    def densities(variant: str) -> ByTokens:
        return c.by_tokens(Setting(variant, factor, "sparse"), lambda record: record.density)

    name, title = f"density_by_tokens_{factor:g}x", f"Support density at {times(factor)}"
    return _by_tokens(c, name, title, "density", {"": densities}, share, y_log=True)


def gap_by_tokens(c: Comparison, factor: float) -> Chart:
    """How far sparse execution is from soft routing as training goes on."""

    def gaps(variant: str) -> ByTokens:
        soft, sparse = (
            c.by_tokens(Setting(variant, factor, routing)) for routing in ("soft", "sparse")
        )
        found = {tokens: relative_percent(sparse.get(tokens), soft[tokens]) for tokens in soft}
        return {tokens: gap for tokens, gap in found.items() if gap is not None}

    name, title = f"gap_by_tokens_{factor:g}x", f"Sparse against soft routing at {times(factor)}"
    options = {"unit": " %", "line_at": 0.0}
    return _by_tokens(c, name, title, GAP, {"": gaps}, percent, **options)


def mass_by_tokens(c: Comparison, factor: float) -> Chart:
    """What sparse execution leaves out as training goes on."""

    def masses(variant: str) -> ByTokens:
        settings = (Setting(variant, factor, routing) for routing in ("sparse", "top1"))
        return next(filter(None, (c.by_tokens(s, mean_mass) for s in settings)), {})

    name, title = f"mass_by_tokens_{factor:g}x", f"Discarded mass at {times(factor)}"
    return _by_tokens(c, name, title, "discarded mass", {"": masses}, share, y_zero=True)


def found_by_tokens(c: Comparison, task: str) -> Chart:
    """Right answers from far away as training goes on, as trained and executed sparsely."""
    records = [record for record in c.experiment.retrieval_milestones if record.task == task]
    near, beyond = min(map(factor_of, records)), medium_reach(c)

    def found(routing: str | None) -> Callable[[str], ByTokens]:
        return lambda variant: c.by_tokens(
            Setting(variant, near, routing), lambda record: far_accuracy(record, beyond), records
        )

    return _by_tokens(
        *(c, f"far_{task}_by_tokens", f"{task} from far, {times(near)}", "right answers"),
        {"as trained": found(None), "sparse": found("sparse")},
        share,
        y_domain=(0.0, 1.02),
    )


ByTokens = dict[float, Estimate]


def _by_tokens(
    c: Comparison,
    name: str,
    title: str,
    y_label: str,
    ways: dict[str, Callable[[str], ByTokens]],
    text: Callable[[float], str],
    **options: Any,
) -> Chart:
    """One line per variant and way, over the tokens of its milestones."""

    def curve(variant: str, figures: Callable[[str], ByTokens]) -> Iterable[Point]:
        found = figures(variant)
        # One point is no curve.
        steps = found.items() if len(found) > 1 else ()
        return [point(tokens / 1e6, estimate, text) for tokens, estimate in steps]

    lines = [
        replace(line, note=note, dash=dash or None)
        for (note, figures), dash in zip(ways.items(), ("", DASHED), strict=False)
        for line in variant_series(c, c.looks, lambda v, f=figures: curve(v, f))
    ]
    return Chart(
        name=name,
        title=f"{title} against trained tokens",
        caption="Checkpoints of one run, evaluated like the last. Before the last the learning "
        "rate has not come down yet." + (" Dashed: executed sparsely." if len(ways) > 1 else ""),
        x_label="trained tokens, millions",
        y_label=y_label,
        series=tuple(lines),
        **options,
    )
