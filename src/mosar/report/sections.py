"""What a report says, in order: sections of text, tables and figures.

A section that has nothing to show says in one line what is missing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from mosar.core.config import MoSARConfig
from mosar.report.charts import Bars, Chart, Named
from mosar.report.claims import Claim, judged_claims
from mosar.report.comparison import Comparison
from mosar.report.curves import (
    axis_charts,
    decode_chart,
    perplexity_by_position,
    retrieval,
    speedup_chart,
    validation_curves,
    validation_delta,
)
from mosar.report.diagram import Diagram, decoder_diagram
from mosar.report.formats import listed, plural, setting, times
from mosar.report.length_charts import (
    delta_by_length,
    density_by_length,
    gap_by_length,
    perplexity_by_length,
    reach_by_length,
)
from mosar.report.palette import variant_looks
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
    main_table,
    pair_table,
    retrieval_table,
    routing_table,
    sparse_table,
)
from mosar.report.verdicts import Finding


@dataclass(frozen=True)
class Missing:
    """One line about what there is nothing to show of."""

    text: str


@dataclass(frozen=True)
class Text:
    """A paragraph."""

    text: str


@dataclass(frozen=True, kw_only=True)
class Switch(Named):
    """Several of a kind, one shown at a time."""

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


@dataclass(frozen=True)
class Drawing:
    """The decoder."""

    title: str
    caption: str
    diagram: Diagram


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


Item = Missing | Text | Switch | Supports | Drawing | Columns | Verdicts | Table | Chart | Bars


@dataclass(frozen=True)
class Section:
    name: str
    title: str
    items: tuple[Item, ...]
    lead: str = ""
    short: str = field(default="")
    """For the menu."""


def make_sections(c: Comparison) -> list[Section]:
    """The whole report."""
    makers: list[Callable[[Comparison], Section]] = [
        _results,
        _verdicts,
        _mechanism,
        _geometry,
        _sparse,
        _training,
        _position,
        _retrieval,
        _axes,
        _speed,
        _provenance,
    ]
    return [make(c) for make in makers]


def all_tables(sections: Iterable[Section]) -> list[Table]:
    """Those of every section, for the documents with tables."""
    found = []
    for section in sections:
        for item in section.items:
            parts = (*item.left, *item.right) if isinstance(item, Columns) else (item,)
            found += [part for part in parts if isinstance(part, Table)]
            found += [part.table for part in parts if isinstance(part, Verdicts)]
    return found


def _shown(charts: Iterable[Chart | Bars]) -> list[Chart | Bars]:
    return [chart for chart in charts if not chart.empty]


def _results(c: Comparison) -> Section:
    if not c.evaluated:
        items: list[Item] = [Missing("No evaluation was recorded: there is nothing to compare.")]
    else:
        items = [main_table(c), *_shown([perplexity_by_length(c), delta_by_length(c)])]
        if c.point:
            where = listed([f"{key} = {setting(value)}" for key, value in c.point.items()])
            items.insert(1, Text(f"Of the grid, this compares the cells at {where}."))
        if "rope" not in c.evaluated:
            items.append(Missing("RoPE was not evaluated: there are no differences against it."))
    return Section("results", "Quality and length", tuple(items), short="Results")


def _verdicts(c: Comparison) -> Section:
    judged = judged_claims(c)
    if all(finding.verdict == "unmeasured" for _, finding in judged):
        items: tuple[Item, ...] = (Missing("These records can judge none of the paper's claims."),)
    else:
        items = (Verdicts(tuple(judged), claims_table(judged)),)
    return Section("claims", "What reproduces and what does not", items, short="Claims")


def _mechanism(c: Comparison) -> Section:
    """How it works: gates, supports, decoder; with the settings of the runs."""
    variant = _routed_variant(c)
    config = any_geometry(c)
    if config is None:
        return Section(
            "mechanism",
            "The mechanism",
            (Missing("No training record tells the regimes and the decoder."),),
            short="Mechanism",
        )
    routed = routed_grids(c, variant) if variant else []
    fixed = fixed_grids(config)
    source = (
        "Each of the first is the support if every token has that regime, over the "
        f"{config.max_length:,} tokens of the training length; the last is what the trained model "
        f"chose for the first {routed[0].tokens:,} tokens of the evaluation text."
        if routed
        else "Each is the support if every token has that regime, over the "
        f"{config.max_length:,} tokens of the training length. No evaluation kept the choices "
        "of a trained model."
    )
    sides = " or ".join(f"{n} × {n}" for n in sorted({grid.block for grid in (*fixed, *routed)}))
    supports = Supports(
        "Supports as cells",
        "Which keys (columns) are in the support of each query (row). A cell is a square of "
        f"{sides} pairs, and its shade the share that is inside. {source}",
        tuple(fixed),
        tuple(routed),
        median_layer(routed),
    )
    model = next(
        (
            run.config.get("model", {})
            for name in (variant, *c.trainings)
            if name in c.trainings
            for run in c.trainings[name].values()
        ),
        {},
    )
    drawing = Drawing(
        "The decoder and its routers",
        "Two small routers read the rotated queries and keys of a layer and choose how far each "
        "token looks; values bypass them. What is outside of the coloured boxes and RoPE is the "
        "same in all variants.",
        decoder_diagram(model, [regime.name for regime in config.regimes]),
    )
    lead = (
        "A pair of regimes, one of the query and one of the key, fixes how attention falls with "
        "distance. At inference the choice becomes a support that is known before any similarity "
        "is computed."
    )
    items = (Columns((decay_chart(config), pair_table(config)), (drawing,)), supports)
    return Section("mechanism", "The mechanism", items, lead, "Mechanism")


def _geometry(c: Comparison) -> Section:
    if not c.routed:
        missing = Missing("No variant with routers was evaluated: there is no learned geometry.")
        return Section("geometry", "The learned geometry", (missing,), short="Geometry")
    items: list[Item] = [routing_table(c)]
    for variant in c.routed:
        options = [
            (times(factor), bars)
            for factor in c.factors
            if not (bars := regime_shares(c, variant, factor)).empty
        ]
        if options:
            items.append(Switch(name=f"shares-{variant}", label="length", options=tuple(options)))
    items += _shown([density_by_length(c), reach_by_length(c)])
    return Section("geometry", "The learned geometry", tuple(items), short="Geometry")


def _sparse(c: Comparison) -> Section:
    table = sparse_table(c)
    if not table.rows:
        missing = Missing("Neither top-1 nor sparse routing was evaluated.")
        return Section("sparse", "From soft to sparse", (missing,), short="Sparse")
    items: list[Item] = [table, *_shown([gap_by_length(c)])]
    looks = variant_looks(c.routed)
    masses = [
        (looks[variant].label, chart)
        for variant in c.routed
        if not (chart := discarded_mass(c, variant)).empty
    ]
    items.append(
        Switch(name="mass", label="variant", options=tuple(masses))
        if masses
        else Missing("The discarded mass was not measured.")
    )
    return Section("sparse", "From soft to sparse", tuple(items), short="Sparse")


def _training(c: Comparison) -> Section:
    charts = _shown([validation_curves(c), validation_delta(c)])
    items = tuple(charts) or (Missing("No training record has a validation curve."),)
    return Section("training", "Training", items, short="Training")


def _position(c: Comparison) -> Section:
    options = [
        (times(factor), chart)
        for factor in reversed(c.factors)
        if not (chart := perplexity_by_position(c, factor)).empty
    ]
    if not options:
        items: tuple[Item, ...] = (Missing("No evaluation has perplexities by position."),)
    else:
        items = (Switch(name="position", label="length", options=tuple(options)),)
    return Section("position", "Perplexity by position", items, short="Position")


def _retrieval(c: Comparison) -> Section:
    tasks = sorted({(record.task, record.length) for record in c.retrievals})
    charts = _shown(retrieval(c, task, length) for task, length in tasks)
    if not charts:
        items: tuple[Item, ...] = (Missing("No retrieval task was evaluated."),)
        lead = ""
    else:
        items = (*charts, retrieval_table(c))
        lead = "Whether rare long links are kept, measured: synthetic tasks with a known distance."
    return Section("retrieval", "Retrieval", items, lead, "Retrieval")


def _axes(c: Comparison) -> Section:
    items: list[Item] = []
    for key, points in c.axes.items():
        charts = axis_charts(c, key)
        if len(points) < 2 or not charts:
            items.append(Missing(f"Along {key} there is only one value so far."))
        items += charts if len(points) > 1 else []
    if not items:
        items = [Missing("The experiment was not repeated along any axis (--grid).")]
    keys = listed(list(c.axes))
    return Section("grid", f"Along {keys}" if keys else "Along an axis", tuple(items), short="Grid")


def _speed(c: Comparison) -> Section:
    records = c.experiment.benchmarks
    modes = list(dict.fromkeys(record.mode for record in records))
    charts = [speedup_chart(records, mode) for mode in modes]
    charts.append(decode_chart(c.experiment.decode_benchmarks))
    tables = [benchmark_table, decode_table, training_speed_table]
    items: list[Item] = [*_shown(charts)]
    items += [table for make in tables if (table := make(c.experiment)).rows]
    if not items:
        items = [Missing("No benchmark was recorded (mosar bench … --json DIR/benchmarks/…).")]
    return Section("speed", "Speed", tuple(items), short="Speed")


def _provenance(c: Comparison) -> Section:
    items: list[Item] = []
    failures = failures_table(c.experiment)
    items.append(failures if failures.rows else Text("No cell failed."))
    waiting = c.experiment.unfinished
    if waiting:
        some = f" and {len(waiting) - 12} more" if len(waiting) > 12 else ""
        items.append(Missing(f"Not finished yet: {', '.join(waiting[:12])}{some}."))
    if c.experiment.trainings:
        items.append(runs_table(c))
        tables = [differing_settings_table(c), shared_settings_table(c), data_table(c.experiment)]
        items += [table for table in tables if table.rows]
    else:
        items.append(Missing("No training record: configuration and data are not known."))
    items.append(environment_table(c.experiment))
    cells = plural(len(c.experiment.cells), "cell")
    dates = sorted(record.created for record in c.experiment.records)
    first, last = dates[0][:10], dates[-1][:10]
    span = first if first == last else f"{first} – {last}"
    variants = listed([look.label for look in variant_looks(c.variants).values()])
    lead = f"{cells} with records, of {span}." + (f" Variants: {variants}." if variants else "")
    return Section("run", "How it was run", tuple(items), lead, "Run")


def _routed_variant(c: Comparison) -> str | None:
    """MoSAR, or the first with routers."""
    return "mosar" if "mosar" in c.routed else next(iter(c.routed), None)


def any_geometry(c: Comparison) -> MoSARConfig | None:
    """The regimes of the routed variant, or of any other that has them."""
    names = [_routed_variant(c), "mosar", *c.trainings]
    return next((found for name in names if name and (found := c.geometry(name))), None)
