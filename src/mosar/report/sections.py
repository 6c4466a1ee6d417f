"""What a report says, in order: sections of text, tables and figures.

A section that has nothing to show says in one line what is missing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from mosar.report.charts import Bars, Chart, Named
from mosar.report.claims import Claim, judged_claims, judged_own_claims
from mosar.report.comparison import BASELINE, Comparison
from mosar.report.curves import (
    axis_charts,
    change_chart,
    decode_chart,
    perplexity_by_position,
    retrieval,
    speedup_charts,
    validation_curves,
    validation_delta,
)
from mosar.report.density_law import law_table
from mosar.report.diagram import Diagram, decoder_diagram
from mosar.report.formats import listed, plural, setting, slug, times
from mosar.report.grid_tables import axis_table, change_table
from mosar.report.length_charts import (
    delta_by_length,
    density_by_length,
    gap_by_length,
    perplexity_by_length,
    reach_by_length,
)
from mosar.report.milestones import (
    density_by_tokens,
    found_by_tokens,
    gap_by_tokens,
    mass_by_tokens,
    milestones_table,
    perplexity_by_tokens,
)
from mosar.report.provenance import (
    data_table,
    differing_settings_table,
    environment_table,
    failures_table,
    runs_table,
    shared_settings_table,
)
from mosar.report.routing_charts import decay_chart, discarded_mass, regime_shares
from mosar.report.speed_tables import benchmark_table, decode_table, training_speed_table
from mosar.report.support import SupportGrid, fixed_grids, median_layer, routed_grids
from mosar.report.tables import (
    Table,
    claims_table,
    gap_table,
    main_table,
    mode_table,
    pair_table,
    retrieval_table,
    routing_table,
    sparse_table,
)
from mosar.report.verdicts import Finding


@dataclass(frozen=True)
class Text:
    """A paragraph, or a line that says what is missing."""

    text: str
    kind: Literal["", "lead", "missing"] = ""


@dataclass(frozen=True, kw_only=True)
class Switch(Named):
    """Several items of a kind, shown one at a time."""

    label: str
    options: tuple[tuple[str, Any], ...]
    initial: int = 0


@dataclass(frozen=True)
class Supports:
    """Supports as grids of cells: of one regime for all, and of a trained model by layer."""

    title: str
    caption: str
    fixed: tuple[SupportGrid, ...]
    routed: tuple[SupportGrid, ...]
    initial: int = 0


class Link(NamedTuple):
    """A page beside the report's own."""

    label: str
    source: Path
    """Where it is kept; a report brings a copy along."""
    name: str
    """Of the copy."""


@dataclass(frozen=True)
class Links:
    """Pages that come with the report."""

    title: str
    caption: str
    links: tuple[Link, ...]


@dataclass(frozen=True)
class Columns:
    """Two stacks side by side where the window is wide enough."""

    left: tuple[Any, ...]
    right: tuple[Any, ...]


@dataclass(frozen=True)
class Verdicts:
    """The paper's claims, judged."""

    judged: tuple[tuple[Claim, Finding], ...]
    table: Table


Item = Text | Switch | Supports | Diagram | Links | Columns | Verdicts | Table | Chart | Bars


class Section(NamedTuple):
    """A part of the report under a title."""

    name: str
    title: str
    short: str
    """For the menu."""
    items: tuple[Item, ...]


def make_sections(c: Comparison) -> list[Section]:
    """The whole report."""
    return [
        Section(name, title, short, tuple(make(c)) or (Text(missing, "missing"),))
        for name, title, short, make, missing in (
            *_SECTIONS[:-2],
            ("grid", f"Along {listed(list(c.axes)) or 'an axis'}", "Grid", _axes, _NO_AXIS),
            *_SECTIONS[-2:],
        )
    ]


def all_items(sections: Iterable[Section]) -> Iterator[Item]:
    """The items of every section, including nested ones."""
    waiting = [item for section in sections for item in section.items]
    while waiting:
        item = waiting.pop(0)
        if isinstance(item, Switch):
            waiting[:0] = [option for _, option in item.options]
        elif isinstance(item, Columns):
            waiting[:0] = [*item.left, *item.right]
        yield item


def all_tables(sections: Iterable[Section]) -> list[Table]:
    """The tables of every section."""
    items = all_items(sections)
    found = (item.table if isinstance(item, Verdicts) else item for item in items)
    return [item for item in found if isinstance(item, Table)]


def _shown(items: Iterable[Chart | Bars | Table]) -> list[Item]:
    """Those that have something to show."""
    return [item for item in items if not item.empty]


def _results(c: Comparison) -> Iterator[Item]:
    if not c.evaluated:
        return
    yield main_table(c)
    if c.point:
        where = listed([f"{key} = {setting(value)}" for key, value in c.point.items()])
        yield Text(f"Of the grid, this compares the cells at {where}.")
    yield from _shown([perplexity_by_length(c), delta_by_length(c)])
    if any(c.modes(variant) for variant in c.evaluated):
        yield mode_table(c)
    if len(c.evaluated) > 1:
        yield gap_table(c)
    if BASELINE not in c.evaluated:
        yield Text("RoPE was not evaluated: there are no differences against it.", "missing")


def _verdicts(c: Comparison) -> Iterator[Item]:
    judged = judged_claims(c)
    if all(finding.verdict == "unmeasured" for _, finding in judged):
        judged = []
    judged += judged_own_claims(c)
    if judged:
        yield Verdicts(tuple(judged), claims_table(judged))


def _mechanism(c: Comparison) -> Iterator[Item]:
    """How it works: gates, supports, decoder; with the settings of the runs."""
    # MoSAR, or the first with routers.
    variant = "mosar" if "mosar" in c.routed else next(iter(c.routed), None)
    names = [name for name in (variant, "mosar", *c.trainings) if name]
    config = next((found for name in names if (found := c.geometry(name))), None)
    if config is None:
        return
    yield Text(
        "A pair of regimes, one of the query and one of the key, fixes how attention falls with "
        "distance. At inference the choice becomes a support that is known before any similarity "
        "is computed.",
        "lead",
    )
    runs = (run for name in names for run in c.trainings.get(name, {}).values())
    model = next((run.config.get("model", {}) for run in runs), {})
    diagram = decoder_diagram(model, [regime.name for regime in config.regimes])
    yield Columns((decay_chart(config), pair_table(config)), (diagram,))
    routed, fixed = routed_grids(c, variant) if variant else [], fixed_grids(config)
    over = (
        f"is the support if every token has that regime, over the {config.max_length:,} tokens of "
        "the training length"
    )
    source = (
        f"Each of the first {over}; the last is what the trained model chose for the first "
        f"{routed[0].tokens:,} tokens of the evaluation text."
        if routed
        else f"Each {over}. No evaluation kept the choices of a trained model."
    )
    sides = " or ".join(f"{n} × {n}" for n in sorted({grid.block for grid in (*fixed, *routed)}))
    yield Supports(
        "Supports as cells",
        "Which keys (columns) are in the support of each query (row). A cell is a square of "
        f"{sides} pairs, and its shade the share that is inside. {source}",
        tuple(fixed),
        tuple(routed),
        median_layer(routed),
    )


def _geometry(c: Comparison) -> Iterator[Item]:
    if not c.routed:
        return
    yield routing_table(c)
    yield from _looks(c)
    for variant in c.routed:
        bars = ((times(factor), regime_shares(c, variant, factor)) for factor in c.factors)
        yield from _switch(f"shares-{variant}", "length", bars)
    yield from _shown([density_by_length(c), reach_by_length(c)])


def _looks(c: Comparison) -> Iterator[Item]:
    """One page per routed variant, of the first seed that has one."""
    kept, links = c.experiment.looks, []
    for variant, cells in c.routed_cells.items():
        cell = next((cell for cell in cells if cell.name in kept), None)
        if cell is not None:
            label = f"{c.looks[variant].label}, seed {cell.seed}"
            links.append(Link(label, kept[cell.name], f"{slug(cell.name)}.html"))
    if links:
        yield Links(
            "Under the microscope",
            "A fixed paragraph, token by token: what each token chose, what it reads and what it "
            "leaves out. mosar look makes such a page for any text.",
            tuple(links),
        )


def _sparse(c: Comparison) -> Iterator[Item]:
    table = sparse_table(c)
    if table.empty:
        return
    yield table
    yield from _shown([law_table(c), gap_by_length(c)])
    masses = ((c.looks[variant].label, discarded_mass(c, variant)) for variant in c.routed)
    missing = Text("The discarded mass was not measured.", "missing")
    yield from _switch("mass", "variant", masses) or [missing]


def _training(c: Comparison) -> Iterator[Item]:
    yield from _shown([validation_curves(c), validation_delta(c), milestones_table(c)])
    for name, make in (
        ("milestones", perplexity_by_tokens),
        ("densities", density_by_tokens),
        ("gaps", gap_by_tokens),
        ("masses", mass_by_tokens),
    ):
        yield from _switch(name, "length", ((times(f), make(c, f)) for f in c.factors))
    tasks = sorted({record.task for record in c.experiment.retrieval_milestones})
    yield from _shown(found_by_tokens(c, task) for task in tasks)


def _position(c: Comparison) -> Iterable[Item]:
    charts = ((times(f), perplexity_by_position(c, f)) for f in reversed(c.factors))
    return _switch("position", "length", charts)


def _switch(name: str, label: str, options: Iterable[tuple[str, Chart | Bars]]) -> list[Item]:
    """A switch between the options that are not empty."""
    found = tuple(option for option in options if not option[1].empty)
    return [Switch(name=name, label=label, options=found)] if found else []


def _retrieval(c: Comparison) -> Iterator[Item]:
    tasks = sorted({(record.task, record.length) for record in c.retrievals})
    charts = _shown(retrieval(c, task, length) for task, length in tasks)
    if charts:
        lead = "Are rare long links kept? Synthetic tasks with a known distance measure it."
        yield Text(lead, "lead")
        yield from charts
        yield retrieval_table(c)


def _axes(c: Comparison) -> Iterator[Item]:
    if c.changes:
        yield from _shown(change_chart(c, factor) for factor in c.ends)
        yield change_table(c)
    # Of several axes, those with two values are in the table above.
    least = 3 if len(c.axes) > 1 and c.changes else 2
    for key, points in c.axes.items():
        if len(points) >= least:
            yield from _shown([*axis_charts(c, key), axis_table(c, key)])
        elif len(points) == 1:
            yield Text(f"Along {key} there is only one value so far.", "missing")
    yield from _shown([retrieval_table(c, of_grid=True)])


def _speed(c: Comparison) -> Iterator[Item]:
    charts = [*speedup_charts(c.experiment.benchmarks)]
    yield from _shown([*charts, decode_chart(c.experiment.decode_benchmarks)])
    tables = (benchmark_table, decode_table, training_speed_table)
    yield from _shown(make(c.experiment) for make in tables)


def _provenance(c: Comparison) -> Iterator[Item]:
    dates = sorted(record.created for record in c.experiment.records)
    span = " – ".join(dict.fromkeys((dates[0][:10], dates[-1][:10])))
    variants = listed([c.looks[name].label for name in c.variants])
    lead = f"{plural(len(c.experiment.cells), 'cell')} with records, of {span}."
    yield Text(lead + (f" Variants: {variants}." if variants else ""), "lead")
    failures = failures_table(c.experiment)
    yield Text("No cell failed.") if failures.empty else failures
    waiting = c.experiment.unfinished
    if waiting:
        some = f" and {len(waiting) - 12} more" if len(waiting) > 12 else ""
        yield Text(f"Not finished yet: {', '.join(waiting[:12])}{some}.", "missing")
    if c.experiment.trainings:
        yield runs_table(c)
        tables = (differing_settings_table(c), shared_settings_table(c), data_table(c.experiment))
        yield from _shown(tables)
    else:
        yield Text("No training record: configuration and data are not known.", "missing")
    yield environment_table(c.experiment)


_NO_AXIS = "The experiment was not repeated along any axis (--grid)."
# Name, title, name in the menu, what makes its items, and what to say where there are none.
_SECTIONS: tuple[tuple[str, str, str, Callable[[Comparison], Iterable[Item]], str], ...] = (
    (
        *("results", "Quality and length", "Results", _results),
        "No evaluation was recorded: there is nothing to compare.",
    ),
    (
        *("claims", "What reproduces and what does not", "Claims", _verdicts),
        "These records can judge none of the paper's claims.",
    ),
    (
        *("mechanism", "The mechanism", "Mechanism", _mechanism),
        "No training record tells the regimes and the decoder.",
    ),
    (
        *("geometry", "The learned geometry", "Geometry", _geometry),
        "No variant with routers was evaluated: there is no learned geometry.",
    ),
    (
        *("sparse", "From soft to sparse", "Sparse", _sparse),
        "Neither top-1 nor sparse routing was evaluated.",
    ),
    (
        *("training", "Training", "Training", _training),
        "No training record has a validation curve.",
    ),
    (
        *("position", "Perplexity by position", "Position", _position),
        "No evaluation has perplexities by position.",
    ),
    ("retrieval", "Retrieval", "Retrieval", _retrieval, "No retrieval task was evaluated."),
    (
        *("speed", "Speed", "Speed", _speed),
        "No benchmark was recorded (mosar bench … --json DIR/benchmarks/…).",
    ),
    ("run", "How it was run", "Run", _provenance, ""),
)
