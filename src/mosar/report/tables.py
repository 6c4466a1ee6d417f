"""Tables as data, and those of a report; `markup` and `page` write them down."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

from mosar.core.config import MoSARConfig
from mosar.core.regimes import pair_geometry
from mosar.records import EvaluationRecord, RetrievalRecord
from mosar.report.claims import Claim, far_accuracy, found_from_far, medium_reach
from mosar.report.comparison import (
    BASELINE,
    MANY,
    Comparison,
    Estimate,
    Setting,
    factor_of,
    mean_mass,
    mean_share,
)
from mosar.report.formats import (
    MISSING,
    number,
    percent,
    perplexity,
    share,
    times,
)
from mosar.report.paper import (
    paper_delta,
    paper_length,
    paper_perplexity,
    paper_reach,
    paper_routing,
)
from mosar.report.verdicts import VERDICTS, Finding, exact_density, reach_estimate, time_ratio


@dataclass(frozen=True)
class TableCell:
    """The text of a cell, and its value for sorting."""

    text: str
    sort: float | str | None = None
    best: bool = False
    muted: bool = False


@dataclass(frozen=True)
class Column:
    label: str
    group: str = ""
    """A heading over neighbours of the same group."""
    numeric: bool = True
    brief: bool = True
    """Shown in a terminal too."""


@dataclass(frozen=True, kw_only=True)
class Table:
    name: str
    title: str
    caption: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[TableCell, ...], ...]
    keys: tuple[str, ...] = ()
    """The variant of each row, which gives it its colour."""
    groups: tuple[str, ...] = ()
    """The group of each row; rows of a group stand under its heading."""
    beneath: Literal["", "columns", "rows"] = ""
    """Where the paper's figures are, which a page may put under ours: in the column after, or in
    the row after (its third cell tells)."""

    @property
    def empty(self) -> bool:
        return not self.rows


def spread(estimate: Estimate, text: Callable[[float], str]) -> str:
    """31.24 ± 0.31: the standard deviation with the mean's decimals; alone with one seed."""
    mean = text(estimate.mean)
    parts = re.fullmatch(r"([^\d]*[\d,]+(?:\.(\d+))?)([^\d]*)", mean)
    if estimate.sd is None:
        return mean
    if parts is None:
        return f"{mean} ± {estimate.sd:.1g}"
    return f"{parts[1]} ± {number(estimate.sd, len(parts[2] or ''))}{parts[3]}"


def estimate_cell(
    estimate: Estimate | None, text: Callable[[float], str], expected: int = 0
) -> TableCell:
    """A mean with its spread; it says so where not all seeds have it."""
    if estimate is None:
        return TableCell(MISSING)
    fewer = f" (n={estimate.n})" if expected and estimate.n != expected else ""
    return TableCell(spread(estimate, text) + fewer, estimate.mean)


def _theirs(value: float | None, text: Callable[[float], str]) -> TableCell:
    """The paper's figure."""
    return TableCell(MISSING if value is None else text(value), value, muted=True)


def figure_cell(value: Any, text: Callable[[Any], str]) -> TableCell:
    """A figure, or that there is none."""
    return TableCell(MISSING) if value is None else TableCell(text(value), value)


# The heading of a column, its value for a row, and its format (None: text).
Field = tuple[str, Callable[[Any], Any], Callable[[Any], str] | None]


def field_table(
    name: str,
    title: str,
    caption: str,
    rows: Iterable[Any],
    *fields: Field,
    keys: Iterable[str] = (),
) -> Table:
    """A table with one row per record."""
    return Table(
        name=name,
        title=title,
        caption=caption,
        columns=tuple(Column(head, numeric=text is not None) for head, _, text in fields),
        rows=tuple(
            tuple(figure_cell(value(row), text or str) for _, value, text in fields) for row in rows
        ),
        keys=tuple(keys),
    )


def whole(value: float) -> str:
    return f"{value:,.0f}"


def plain_cell(text: str, sort: float | str | None = None) -> TableCell:
    return TableCell(text, text if sort is None else sort)


# What the attention of a variant depends on, as headings over rows.
_FAMILIES = {
    "routing": "The contents decide",
    "distance": "Weighed by distance",
    "window": "A part of the pairs",
    "positions": "Positions alone",
}


def _family(c: Comparison, variant: str) -> str:
    geometry = c.geometry_class(variant)
    return _FAMILIES[geometry.family] if geometry else "Others"


def _by_family(c: Comparison, ranked: list[str]) -> list[str]:
    """Variants of a family together, the family of the best one first."""
    families = list(dict.fromkeys(_family(c, variant) for variant in ranked))
    return sorted(ranked, key=lambda variant: families.index(_family(c, variant)))


def main_table(c: Comparison, *, grouped: bool = True) -> Table:
    """The paper's main table with ours beside it, the best at the longest length first.

    grouped: by family where there are many variants.
    """
    factors = c.factors
    at = 1.0 if 1.0 in factors else (factors[0] if factors else 1.0)
    ends = list(dict.fromkeys([at, *factors[-1:]])) if BASELINE in c.evaluated else []
    columns = [Column("variant", numeric=False)]
    for factor in factors:
        columns += _pair("perplexity", factor, c)
    for factor in ends:
        columns += _pair("vs RoPE", factor, c)
    columns += [Column("ours", "reach"), Column("paper", "reach", brief=False)]
    columns += [Column("LM loss", brief=False), Column("seeds")]
    rows = {}
    for variant in c.evaluated:
        n = len(c.seeds[variant])
        row = [plain_cell(c.looks[variant].label)]
        for factor in factors:
            row.append(estimate_cell(c.estimate(Setting(variant, factor)), perplexity, n))
            if paper_length(factor):
                row.append(_theirs(paper_perplexity(variant, factor), perplexity))
        for factor in ends:
            # The baseline against itself has no spread to speak of.
            own = Estimate({0: 0.0}) if variant == BASELINE else c.delta(variant, factor)
            text = _hundredths if factor == at else percent
            row.append(estimate_cell(own, text))
            if paper_length(factor):
                row.append(_theirs(paper_delta(variant, factor), text))
        row += [
            estimate_cell(c.reach(variant, at), four_share),
            _theirs(paper_reach(variant), four_share),
            estimate_cell(c.estimate(Setting(variant, at), lambda r: r.loss), _four, n),
            TableCell(str(n), n),
        ]
        rows[variant] = row
    mark_best(list(rows.values()), columns, "perplexity")
    order = c.ranked(c.longest or 1.0)
    grouped = grouped and len(order) > MANY
    if grouped:
        order = _by_family(c, order)
    return Table(
        name="main",
        title="Quality and length extrapolation",
        caption=_main_caption(c),
        columns=tuple(columns),
        rows=tuple(tuple(rows[variant]) for variant in order),
        keys=tuple(order),
        groups=tuple(_family(c, variant) for variant in order) if grouped else (),
        beneath="columns",
    )


def gap_table(c: Comparison) -> Table:
    """The paper's table of related methods, with what the records measured of each."""
    near, far = c.factors[0], c.factors[-1]
    tasks = sorted({record.task for record in c.retrievals})
    task = "passkey" if "passkey" in tasks else next(iter(tasks), None)
    asked = sorted({factor_of(record) for record in c.retrievals if record.task == task})
    ends = list(dict.fromkeys([*asked[:1], *asked[-1:]]))
    order = _by_family(c, c.ranked(far))
    rows, keys, groups = [], [], []
    for variant in order:
        geometry = c.geometry_class(variant)
        executed = "sparse" if "sparse" in c.routings(variant) else c.own_routing(variant)
        for routing in (executed, *c.modes(variant)):
            label, is_own = c.looks[variant].label, routing == executed
            settings = [Setting(variant, factor, routing) for factor in (near, far)]
            found = (found_from_far(c, variant, task or "", f, routing or "") for f in ends)
            rows.append(
                (
                    plain_cell(label if is_own else f"{label} · {routing}"),
                    *(
                        (
                            plain_cell("yes" if geometry.adaptive else "no"),
                            plain_cell(geometry.decay),
                        )
                        if geometry and is_own
                        else (TableCell(MISSING), TableCell(MISSING))
                    ),
                    *(
                        estimate_cell(c.estimate(s, lambda record: record.density), share)
                        for s in settings
                    ),
                    estimate_cell(c.estimate(settings[1]), perplexity),
                    *(estimate_cell(estimate, share) for estimate in found),
                )
            )
            keys.append(variant)
            groups.append(_family(c, variant))
    columns = (
        *(Column(name, numeric=False) for name in ("method", "input adaptive", "decays")),
        *(Column(times(factor), "pairs read") for factor in (near, far)),
        Column(times(far), "perplexity"),
        *(Column(times(factor), f"far {task}") for factor in ends),
    )
    return Table(
        name="gap",
        title="What each method does, and what it reads",
        caption="The paper's table of related methods, measured. Input adaptive: contents decide "
        "which pairs are read or how they are weighed, besides their score. Decays: attention "
        "falls with distance by a fixed or a learned law. Pairs read: the exact share of the "
        "causal pairs. Variants with routers are executed sparsely."
        + (" Far: the right answers from beyond every reach but the global one." if ends else ""),
        columns=columns,
        rows=tuple(rows),
        keys=tuple(keys),
        groups=tuple(groups),
    )


def _main_caption(c: Comparison) -> str:
    length = f" N = {c.train_length:,} tokens," if c.train_length else ""
    return (
        f"Each variant as it was trained, at multiples of the training length{length} on the same "
        "tokens; the paper's figures at the same multiples of its 2,048 (2k, 4k, 8k). Perplexities "
        "of different texts and models do not compare: what compares is the order and the "
        "percentages. Mean ± standard deviation over seeds; against RoPE: within each seed. "
        "Reach: normalized, of soft routing; by definition where there are no routers."
    )


def _pair(what: str, factor: float, c: Comparison) -> list[Column]:
    """Ours, and the paper's where it has this length."""
    group = f"{what}, {times(factor)}"
    theirs = paper_length(factor)
    columns = [Column("ours", group)]
    # The difference compares with the paper's; the perplexity does not.
    return columns + (
        [Column(f"paper, {theirs}", group, brief=what != "perplexity")] if theirs else []
    )


def mark_best(rows: list[list[TableCell]], columns: list[Column], what: str) -> None:
    """Marks the lowest value of each column in a group, ours and the paper's."""
    for index, column in enumerate(columns):
        if not column.group.startswith(what):
            continue
        figures = [row[index].sort for row in rows]
        found = [figure for figure in figures if isinstance(figure, float)]
        for row in rows:
            cell = row[index]
            if len(found) > 1 and cell.sort == min(found):
                row[index] = TableCell(cell.text, cell.sort, best=True, muted=cell.muted)


def routing_table(c: Comparison) -> Table:
    """The paper's routing table: ours and the paper's under each other."""
    columns = [
        *(Column(name, numeric=False) for name in ("variant", "length", "")),
        *(Column(name, "perplexity") for name in ("soft", "top-1", "sparse", "top-1 gap")),
        *(Column(name, "reach") for name in ("soft", "top-1")),
        Column("ρ", "density"),
        *(Column(name, side) for side in ("queries", "keys") for name in ("short", "global")),
    ]
    rows, keys = [], []
    for variant in c.routed:
        for factor in c.factors:
            rows.append(_routing_row(c, variant, factor, c.looks[variant].label))
            keys.append(variant)
            said = paper_routing(variant, factor)
            if said:
                rows.append(_paper_routing_row(said, factor, c.looks[variant].label))
                keys.append(variant)
    return Table(
        name="routing",
        title="Soft, top-1 and sparse routing",
        caption="Perplexities by routing; the gap is top-1 against soft. Shares are mean "
        "probabilities over layers and tokens of the shortest and the global regime. Density: "
        "exact; the paper does not report it. The paper's figures are the last line of a row.",
        columns=tuple(columns),
        rows=tuple(rows),
        keys=tuple(keys),
        beneath="rows",
    )


def _routing_row(c: Comparison, variant: str, factor: float, label: str) -> tuple[TableCell, ...]:
    n = len(c.seeds[variant])

    def of(routing: str, value: Any = None) -> Estimate | None:
        setting = Setting(variant, factor, routing)
        return c.estimate(setting) if value is None else c.estimate(setting, value)

    gap = c.relative(Setting(variant, factor, "top1"), Setting(variant, factor, "soft"))
    own = Setting(variant, factor)
    return (
        plain_cell(label),
        plain_cell(times(factor), factor),
        plain_cell("ours"),
        *(estimate_cell(of(routing), perplexity, n) for routing in ("soft", "top1", "sparse")),
        estimate_cell(gap, percent),
        estimate_cell(reach_estimate(c, variant, factor, top1=False), four_share),
        estimate_cell(reach_estimate(c, variant, factor, top1=True), four_share),
        estimate_cell(exact_density(c, variant, factor), four_share),
        *(
            estimate_cell(c.estimate(own, mean_share(side, regime)), share)
            for side in ("query", "key")
            for regime in (0, -1)
        ),
    )


def _paper_routing_row(said: dict[str, float], factor: float, label: str) -> tuple[TableCell, ...]:
    return (
        TableCell(label, label, muted=True),
        TableCell(times(factor), factor, muted=True),
        TableCell(f"paper, {paper_length(factor)}", "paper", muted=True),
        _theirs(said["soft_ppl"], perplexity),
        _theirs(said["top1_ppl"], perplexity),
        _theirs(None, perplexity),
        _theirs(said["gap_pct"], percent),
        _theirs(said["soft_reach"], four_share),
        _theirs(said["top1_reach"], four_share),
        _theirs(None, share),
        *(_theirs(said[name], share) for name in ("q_S", "q_G", "k_S", "k_G")),
    )


def sparse_table(c: Comparison) -> Table:
    """Sparse execution: what it leaves out, what it changes, what it saves."""
    columns = (
        *(Column(name, numeric=False) for name in ("variant", "length")),
        Column("density ρ"),
        *(Column(name, "discarded mass") for name in ("mean", "95th percentile", "worst row")),
        Column("sparse against top-1", "perplexity"),
        *(Column(name, "time") for name in ("top-1, s", "sparse, s", "times as fast")),
    )
    rows, keys = [], []
    for variant in c.routed:
        for factor in c.factors:
            row = _sparse_row(c, variant, factor, c.looks[variant].label)
            if any(cell.text != MISSING for cell in row[2:]):
                rows.append(row)
                keys.append(variant)
    return Table(
        name="sparse",
        title="Sparse execution",
        caption="Discarded mass: the share of a row's attention that top-1 routing has outside of "
        "the support. Mean: over the layers; 95th percentile: of the layer where it is highest; "
        "worst: over all rows. "
        "Times: the forward passes of one evaluation, with the routings in turn.",
        columns=columns,
        rows=tuple(rows),
        keys=tuple(keys),
    )


def _sparse_row(c: Comparison, variant: str, factor: float, label: str) -> tuple[TableCell, ...]:
    def mass(value: Callable[[EvaluationRecord], float | None]) -> Estimate | None:
        for routing in ("sparse", "top1", "soft"):
            found = c.estimate(Setting(variant, factor, routing), value)
            if found is not None:
                return found
        return None

    def highest(name: str) -> Callable[[EvaluationRecord], float | None]:
        return lambda r: max((layer[name] for layer in r.discarded_mass), default=None)

    top1, sparse = (Setting(variant, factor, routing) for routing in ("top1", "sparse"))
    ratio = time_ratio(c, variant, factor)
    return (
        plain_cell(label),
        plain_cell(times(factor), factor),
        estimate_cell(exact_density(c, variant, factor), four_share),
        estimate_cell(mass(mean_mass), share),
        *(estimate_cell(mass(highest(name)), share) for name in ("p95", "worst")),
        estimate_cell(c.relative(sparse, top1), lambda value: percent(value, 2)),
        *(estimate_cell(c.estimate(s, lambda r: r.seconds), _tenths) for s in (top1, sparse)),
        estimate_cell(ratio, lambda value: f"{number(value, 2)}×"),
    )


def claims_table(judged: list[tuple[Claim, Finding]]) -> Table:
    """What reproduces and what does not."""
    return Table(
        name="claims",
        title="What reproduces and what does not",
        caption="",
        columns=tuple(
            Column(name, numeric=False)
            for name in ("claim", "paper", "ours", "verdict", "it rests on")
        ),
        rows=tuple(
            (
                plain_cell(claim.text),
                TableCell(finding.paper, muted=True),
                TableCell(finding.ours),
                plain_cell(VERDICTS[finding.verdict]),
                TableCell(finding.basis or MISSING),
            )
            for claim, finding in judged
        ),
        groups=tuple(claim.group for claim, _ in judged),
    )


def retrieval_table(c: Comparison, *, of_grid: bool = False) -> Table:
    """Accuracy of the synthetic tasks, over all and from far away; of a grid, of each point."""
    beyond = medium_reach(c)
    limit = "every reach but the global one" if beyond is None else f"{beyond:g} tokens"
    found: dict[tuple[str, float, str, str, str], dict[int, RetrievalRecord]] = {}
    for record in c.experiment.retrievals if of_grid else c.retrievals:
        grid = {key: value for key, value in record.cell.grid.items() if key != "data.task"}
        point = ", ".join(f"{key}={value}" for key, value in grid.items()) if of_grid else ""
        if of_grid and not point:
            continue
        key = (record.task, factor_of(record), record.cell.variant, point, record.routing)
        found.setdefault(key, {})[record.cell.seed] = record
    order = list(c.looks)
    rows, keys = [], []
    for key in sorted(found, key=lambda k: (*k[:2], order.index(k[2]), *k[3:])):
        task, factor, variant, point, routing = key
        records = sorted(found[key].items())
        measured = (
            [(seed, record.accuracy) for seed, record in records],
            [(seed, far_accuracy(record, beyond)) for seed, record in records],
            [(seed, record.density) for seed, record in records],
        )
        known = ({seed: x for seed, x in values if x is not None} for values in measured)
        rows.append(
            (
                plain_cell(c.looks[variant].label + (f", {point}" if point else "")),
                plain_cell(routing),
                plain_cell(task),
                plain_cell(times(factor), factor),
                *(estimate_cell(Estimate(x) if x else None, share) for x in known),
            )
        )
        keys.append(variant)
    return Table(
        name="grid-retrieval" if of_grid else "retrieval",
        title="Retrieval along the grid" if of_grid else "Retrieval",
        caption="Share of right answers: over all, and of those whose target is farther away than "
        f"{limit}; and the share of the pairs that are read on these texts.",
        columns=(
            *(Column(name, numeric=False) for name in ("variant", "routing", "task", "length")),
            *(Column(name) for name in ("accuracy", "from far", "density")),
        ),
        rows=tuple(rows),
        keys=tuple(keys),
    )


def mode_table(c: Comparison) -> Table:
    """Trained models executed in ways that they were not trained with."""
    rows, keys = [], []
    for variant in c.evaluated:
        for mode in c.modes(variant):
            row = [plain_cell(f"{c.looks[variant].label} · {mode}")]
            for factor in c.factors:
                setting = Setting(variant, factor, mode)
                row.append(estimate_cell(c.estimate(setting), perplexity))
                row.append(estimate_cell(c.relative(setting, Setting(variant, factor)), percent))
                row.append(estimate_cell(c.estimate(setting, lambda r: r.density), share))
            rows.append(tuple(row))
            keys.append(variant)
    columns = [Column("model · mode", numeric=False)]
    for factor in c.factors:
        names = ("perplexity", "vs as trained", "density")
        columns += [Column(name, times(factor)) for name in names]
    return Table(
        name="modes",
        title="Modes of trained models",
        caption="The same checkpoints, executed in ways they were not trained for (mosar evaluate "
        "--mode): their perplexity against the usual execution, and the share of pairs they read.",
        columns=tuple(columns),
        rows=tuple(rows),
        keys=tuple(keys),
    )


def pair_table(config: MoSARConfig) -> Table:
    """The geometry of every pair of regimes."""
    geometry = pair_geometry(config)
    last = config.global_index
    rows = []
    for n in range(config.num_regimes):
        for m in range(n + 1):
            names = (config.regimes[m].name, config.regimes[n].name)
            joint = "" if max(map(len, names)) == 1 else "–"
            figures = [float(table[m, n]) for table in geometry]
            cells = [TableCell(f"{figure:g}", figure) for figure in figures]
            if m == n == last:
                # It never falls.
                cells = [TableCell("∞", math.inf), TableCell("∞", math.inf), TableCell("0", 0.0)]
            rows.append((plain_cell(joint.join(names)), *cells))
    return Table(
        name="pairs",
        title="Regime pairs",
        caption="In tokens; the gate is 1 on the plateau T and falls over the transition L to its "
        "floor at the reach δ = T + L.",
        columns=(
            Column("pair", numeric=False),
            *(Column(name) for name in ("reach δ", "plateau T", "transition L")),
        ),
        rows=tuple(rows),
    )


def _hundredths(value: float) -> str:
    return percent(value, 2)


def _tenths(value: float) -> str:
    return number(value, 1)


def _four(value: float) -> str:
    return number(value, 4)


def four_share(value: float) -> str:
    return share(value, 4)
