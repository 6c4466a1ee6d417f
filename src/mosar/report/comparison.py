"""What the records say, over seeds: estimates, differences paired by seed, the axes of a grid.

mean and sample standard deviation over seeds; a difference is taken within each seed first,
since seed k has the same weights outside the geometry and the same batches in every variant
"""

from __future__ import annotations

import json
import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, NamedTuple

from mosar.core.config import MoSARConfig
from mosar.files import parse_json
from mosar.geometries import GEOMETRIES, VARIANTS, AttentionConfig, Geometry
from mosar.records import Cell, EvaluationRecord, RetrievalRecord, TrainingRecord
from mosar.report.experiment import Experiment, task_of
from mosar.report.palette import Look, in_order, variant_looks
from mosar.report.paper import paper

BASELINE = "rope"
# With more variants than this, figures show a few at first: these, and the best of the others.
MANY = 12
_ALWAYS = (BASELINE, "alibi", "mosar", "mosar-hard", "mosar-plus", "fox")
_BEST = 3


@dataclass(frozen=True)
class Estimate:
    """One value per seed."""

    values: dict[int, float]

    @property
    def n(self) -> int:
        return len(self.values)

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values.values())

    @property
    def sd(self) -> float | None:
        """None with one seed."""
        return statistics.stdev(self.values.values()) if self.n > 1 else None

    @property
    def stderr(self) -> float | None:
        return None if self.sd is None else self.sd / math.sqrt(self.n)


class Setting(NamedTuple):
    """What an evaluation is of; routing None: the variant's own, soft or native."""

    variant: str
    factor: float
    routing: str | None = None


class AxisPoint(NamedTuple):
    """A value along a grid's axis and the cells there, by variant."""

    value: Any
    cells: dict[str, list[Cell]]


Value = Callable[[EvaluationRecord], float | None]


def perplexity_of(record: EvaluationRecord) -> float:
    return record.perplexity


class Comparison:
    """The cells that are compared with each other, and the figures of each variant.

    These are the cells outside of any grid; of a variant that has none, those at `point`. Cells
    that learnt a task are compared only where none learnt text.
    """

    def __init__(self, experiment: Experiment):
        self.experiment = experiment
        self.point, cells = _choose_cells(_of_text(experiment))
        self.cells = {cell.name: cell for cell in cells}
        self._records: dict[tuple[str, float, str], dict[int, EvaluationRecord]] = {}
        for record in experiment.evaluations:
            if record.cell.name in self.cells:
                key = (record.cell.variant, factor_of(record), record.routing)
                self._records.setdefault(key, {})[record.cell.seed] = record

    @cached_property
    def variants(self) -> list[str]:
        return in_order({cell.variant for cell in self.cells.values()})

    @cached_property
    def looks(self) -> dict[str, Look]:
        """How figures draw each variant that has a record, in their order."""
        return variant_looks({cell.variant for cell in self.experiment.cells})

    @cached_property
    def evaluated(self) -> list[str]:
        """Variants with an evaluation."""
        return in_order({variant for variant, _, _ in self._records})

    @cached_property
    def featured(self) -> list[str]:
        """Variants that charts show at first: all of them, or a few where there are many."""
        if len(self.looks) <= MANY or self.longest is None:
            return list(self.looks)
        others = [name for name in self.ranked(self.longest) if name not in _ALWAYS]
        return in_order({*(set(_ALWAYS) & set(self.looks)), *others[:_BEST]})

    def ranked(self, factor: float) -> list[str]:
        """Evaluated variants by their perplexity at a length, the best first."""
        found = {name: self.estimate(Setting(name, factor)) for name in self.evaluated}
        means = {name: math.inf if e is None else e.mean for name, e in found.items()}
        return sorted(means, key=lambda name: means[name])

    def geometry_class(self, variant: str) -> type[Geometry] | None:
        """The geometry that a variant was trained with; None where it is not known."""
        runs = self.trainings.get(variant, {}).values()
        names = (run.config.get("attention", {}).get("geometry") for run in runs)
        known = VARIANTS.get(variant)
        return GEOMETRIES.get(next(names, known.geometry if known else ""))

    @cached_property
    def routed(self) -> list[str]:
        """Variants with routers."""
        return [
            variant
            for variant in self.evaluated
            if any(record.regimes for record in self.records(variant))
        ]

    @cached_property
    def routed_cells(self) -> dict[str, list[Cell]]:
        """The compared cells of each variant with routers, by seed."""
        ordered = sorted(self.cells.values(), key=lambda cell: cell.seed)
        return {name: [cell for cell in ordered if cell.variant == name] for name in self.routed}

    @cached_property
    def factors(self) -> list[float]:
        """Lengths over the training length, ascending."""
        return sorted({factor for _, factor, _ in self._records})

    @property
    def ends(self) -> list[float]:
        """The shortest and the longest of them."""
        return list(dict.fromkeys([*self.factors[:1], *self.factors[-1:]]))

    @property
    def longest(self) -> float | None:
        return self.factors[-1] if self.factors else None

    @cached_property
    def seeds(self) -> dict[str, list[int]]:
        """By variant."""
        found: dict[str, set[int]] = {variant: set() for variant in self.variants}
        for cell in self.cells.values():
            found[cell.variant].add(cell.seed)
        return {variant: sorted(seeds) for variant, seeds in found.items()}

    @cached_property
    def trainings(self) -> dict[str, dict[int, TrainingRecord]]:
        """By variant and seed."""
        found: dict[str, dict[int, TrainingRecord]] = {}
        tasks = {task_of(record) for record in self.experiment.trainings.values()}
        for name, record in self.experiment.trainings.items():
            if name in self.cells and (task_of(record) == "text" or "text" not in tasks):
                found.setdefault(record.cell.variant, {})[record.cell.seed] = record
        return {variant: found[variant] for variant in in_order(found)}

    @cached_property
    def train_length(self) -> int | None:
        """N, the training length; None where records disagree or there are none."""
        found = {
            record.train_length for seeds in self._records.values() for record in seeds.values()
        }
        return found.pop() if len(found) == 1 else None

    def records(
        self, variant: str, factor: float | None = None, routing: str | None = None
    ) -> list[EvaluationRecord]:
        """Evaluations of a variant, by factor, routing and seed."""
        return [
            seeds[seed]
            for key, seeds in sorted(self._records.items())
            if key[0] == variant
            and (factor is None or key[1] == factor)
            and (routing is None or key[2] == routing)
            for seed in sorted(seeds)
        ]

    def routings(self, variant: str) -> list[str]:
        known = ("native", "soft", "top1", "sparse")
        found = {routing for name, _, routing in self._records if name == variant}
        return sorted(found, key=lambda r: (known.index(r) if r in known else len(known), r))

    def modes(self, variant: str) -> list[str]:
        """The modes of `mosar evaluate --mode` that were evaluated; routings do not count."""
        routings = ("native", "soft", "top1", "sparse")
        return [routing for routing in self.routings(variant) if routing not in routings]

    def own_routing(self, variant: str) -> str | None:
        """How it was trained: soft with routers, native without."""
        found = self.routings(variant)
        return next((routing for routing in ("soft", "native") if routing in found), None)

    def estimate(self, setting: Setting, value: Value = perplexity_of) -> Estimate | None:
        """A figure over the seeds that have it; None where there is none."""
        routing = setting.routing or self.own_routing(setting.variant)
        if routing is None:
            return None
        found = self._records.get((setting.variant, setting.factor, routing), {})
        values = {seed: value(found[seed]) for seed in sorted(found)}
        present = {seed: figure for seed, figure in values.items() if figure is not None}
        return Estimate(present) if present else None

    def by_tokens(
        self,
        setting: Setting,
        value: Callable[[Any], float | None] = perplexity_of,
        records: Iterable[EvaluationRecord | RetrievalRecord] | None = None,
    ) -> dict[float, Estimate]:
        """A figure over the seeds at each number of trained tokens, where a run has milestones."""
        routings = ("soft", "native") if setting.routing is None else (setting.routing,)
        found: dict[float, dict[int, float]] = {}
        for record in self.experiment.milestones if records is None else records:
            run = self._run_of(record)
            which = (record.cell.variant, factor_of(record))
            figure = value(record) if which == setting[:2] and record.routing in routings else None
            if run is not None and figure is not None and self._is_compared(record):
                tokens = record.step * run.tokens / run.step
                found.setdefault(tokens, {})[record.cell.seed] = figure
        return {tokens: Estimate(found[tokens]) for tokens in sorted(found)}

    def relative(
        self, setting: Setting, to: Setting, value: Value = perplexity_of
    ) -> Estimate | None:
        """By how many percent a figure is above another, within each seed that has both."""
        return relative_percent(self.estimate(setting, value), self.estimate(to, value))

    def delta(self, variant: str, factor: float) -> Estimate | None:
        """Perplexity against the baseline, percent."""
        return self.relative(Setting(variant, factor), Setting(BASELINE, factor))

    def geometry(self, variant: str) -> MoSARConfig | None:
        """The regimes a variant was trained with; None where its configuration is not known."""
        for record in self.trainings.get(variant, {}).values():
            config = geometry_of(record.config)
            if config is not None:
                return config
        return None

    def nominal_reach(self, variant: str) -> float | None:
        """The reach that a geometry without routers has by definition, over N."""
        for record in self.trainings.get(variant, {}).values():
            attention, config = record.config.get("attention", {}), geometry_of(record.config)
            geometry = GEOMETRIES.get(attention.get("geometry"))
            if geometry is not None and "regime" not in geometry.settings:
                # A window of another kind has no reach in the sense of regimes.
                return None if geometry.family == "window" else 1.0
            if config is None:
                return None
            reaches = {regime.name: regime.reach for regime in config.regimes}
            reach = reaches.get(attention.get("regime"))
            return None if reach is None else min(reach / config.max_length, 1.0)
        return None

    def reach(self, variant: str, factor: float) -> Estimate | None:
        """Normalized reach: of the routers' probabilities, or the nominal one at this length."""
        if variant in self.routed:
            return self.estimate(Setting(variant, factor), lambda record: record.reach_soft)
        nominal = self.nominal_reach(variant)
        if nominal is None:
            return None
        reach = nominal if nominal == 1 else nominal / factor
        return Estimate({0: min(reach, 1.0)})

    @cached_property
    def retrievals(self) -> list[RetrievalRecord]:
        """Records of the compared cells. A task is not a point of an axis, so all tasks count."""
        return [record for record in self.experiment.retrievals if self._is_compared(record)]

    def _is_compared(self, record: EvaluationRecord | RetrievalRecord) -> bool:
        point, grid = (
            {key: value for key, value in values.items() if key != "data.task"}
            for values in (self.point, record.cell.grid)
        )
        of_task = isinstance(record, RetrievalRecord) and grid in ({}, point)
        return of_task or record.cell.name in self.cells

    def _run_of(self, record: EvaluationRecord | RetrievalRecord) -> TrainingRecord | None:
        """The run that an evaluation belongs to; a cell may have learnt text and a task."""
        runs, name = self.experiment.trainings, record.cell.name
        task = record.task if isinstance(record, RetrievalRecord) else None
        return runs.get(f"{name} ({task})") or runs.get(name)

    @cached_property
    def axes(self) -> dict[str, list[AxisPoint]]:
        """By dotted key: the points along it, other keys as in the compared cells."""
        keys = dict.fromkeys(key for cell in self.experiment.cells for key in cell.grid)
        return {key: self._axis(key) for key in keys if key != "data.task"}

    def _axis(self, key: str) -> list[AxisPoint]:
        found: dict[str, AxisPoint] = {}
        varied = {cell.variant for cell in self.experiment.cells if key in cell.grid}
        for cell in self.experiment.cells:
            elsewhere = {name: value for name, value in cell.grid.items() if name != key}
            chosen = {name: value for name, value in self.point.items() if name != key}
            if cell.variant not in varied or elsewhere not in ({}, chosen):
                continue
            value = self._configured(cell, key)
            point = found.setdefault(json.dumps(_plain(value)), AxisPoint(value, {}))
            point.cells.setdefault(cell.variant, []).append(cell)
        return sorted(found.values(), key=_by_value)

    @cached_property
    def changes(self) -> dict[str, dict[str, list[Cell]]]:
        """Variant -> "key=value" of its one change ("" for none) -> the evaluated cells."""
        evaluated = {record.cell.name for record in self.experiment.evaluations}
        found: dict[str, dict[str, list[Cell]]] = {}
        for cell in self.experiment.cells:
            if len(cell.grid) < 2 and cell.name in evaluated and "data.task" not in cell.grid:
                change = "".join(f"{key}={value}" for key, value in cell.grid.items())
                found.setdefault(cell.variant, {}).setdefault(change, []).append(cell)
        ordered = {name: dict(sorted(found[name].items())) for name in in_order(found)}
        return {name: changes for name, changes in ordered.items() if {""} < changes.keys()}

    def density_of(self, cells: Iterable[Cell], factor: float) -> Estimate | None:
        """The exact density of some cells of one variant."""
        return self._discrete(cells, factor, lambda record: record.density)

    def mass_of(self, cells: Iterable[Cell], factor: float) -> Estimate | None:
        """The discarded mass of some cells of one variant, mean over layers."""
        return self._discrete(cells, factor, mean_mass)

    def gap_of(self, cells: Iterable[Cell], factor: float) -> Estimate | None:
        """What sparse execution costs some cells of one variant, percent of perplexity."""
        cells = list(cells)
        sparse, own = (self.along_axis(cells, factor, r, perplexity_of) for r in ("sparse", None))
        return relative_percent(sparse, own)

    def _discrete(self, cells: Iterable[Cell], factor: float, value: Value) -> Estimate | None:
        """An evaluation may have measured it under one routing only."""
        cells = list(cells)
        found = (self.along_axis(cells, factor, r, value) for r in ("sparse", "top1", None))
        return next((estimate for estimate in found if estimate is not None), None)

    def _configured(self, cell: Cell, key: str) -> Any:
        """The value a cell was trained with; without that record, the one that its grid names."""
        record = self.experiment.trainings.get(cell.name)
        section, _, name = key.partition(".")
        settings = record.config.get(section) if record else None
        if isinstance(settings, dict) and name in settings:
            return settings[name]
        if settings and section == "attention" and key not in cell.grid:
            # The run is older than the setting.
            return getattr(AttentionConfig(), name, None)
        return _plain(cell.grid.get(key))

    def along_axis(
        self,
        cells: Iterable[Cell],
        factor: float,
        routing: str | None,
        value: Callable[[Any], float | None],
        records: Iterable[EvaluationRecord | RetrievalRecord] | None = None,
    ) -> Estimate | None:
        """A figure over the seeds of some cells of one variant, from evaluations or `records`."""
        names = {cell.name: cell.seed for cell in cells}
        values: dict[int, float] = {}
        for record in self.experiment.evaluations if records is None else records:
            wanted = ("soft", "native") if routing is None else (routing,)
            if record.cell.name not in names or record.routing not in wanted:
                continue
            figure = value(record) if factor_of(record) == factor else None
            if figure is not None:
                values[names[record.cell.name]] = figure
        return Estimate(dict(sorted(values.items()))) if values else None


def factor_of(record: EvaluationRecord | RetrievalRecord) -> float:
    """Its length over the training length."""
    return round(record.length / record.train_length, 6)


def curve_of(rows: list[list[float]]) -> dict[float, float]:
    """Step -> value."""
    return {row[0]: row[1] for row in rows}


def paired(a: Estimate | None, b: Estimate | None) -> tuple[Estimate, Estimate] | None:
    """Both over the seeds that both have; None where they share none."""
    shared = [seed for seed in a.values if seed in b.values] if a and b else []
    if not a or not b or not shared:
        return None
    first, second = (Estimate({seed: e.values[seed] for seed in shared}) for e in (a, b))
    return first, second


def relative_percent(a: Estimate | None, b: Estimate | None) -> Estimate | None:
    """(a / b - 1) in percent within each seed that both have; None where they share none."""
    if a is None or b is None:
        return None
    shared = [seed for seed in a.values if b.values.get(seed)]
    found = {seed: (a.values[seed] / b.values[seed] - 1) * 100 for seed in shared}
    return Estimate(found) if found else None


def difference(a: Estimate, b: Estimate) -> Estimate:
    """a - b within each seed; both have the same."""
    return Estimate({seed: a.values[seed] - b.values[seed] for seed in a.values})


def geometry_of(config: dict[str, Any]) -> MoSARConfig | None:
    """The regimes of a run's configuration; None where it does not say."""
    attention, model = config.get("attention"), config.get("model")
    if not isinstance(attention, dict) or not isinstance(model, dict):
        return None
    known = {field.name for field in fields(MoSARConfig)} - {"max_length"}
    settings = {name: value for name, value in attention.items() if name in known}
    if settings.get("regimes") is None:
        settings.pop("regimes", None)
    try:
        made = MoSARConfig.scaled(model["max_length"], **settings)
    except (KeyError, TypeError, ValueError):
        return None
    # Positions are counted in 32 bits.
    return made if made.max_length < 2**31 else None


def mean_mass(record: EvaluationRecord) -> float | None:
    """Discarded mass, mean over layers."""
    layers = record.discarded_mass
    return statistics.fmean(layer["mean"] for layer in layers) if layers else None


def mean_share(side: str, regime: int, *, top1: bool = False) -> Value:
    """A regime's share of queries or keys, mean over layers."""

    def value(record: EvaluationRecord) -> float | None:
        layers = (record.shares_top1 if top1 else record.shares_soft).get(side)
        return statistics.fmean(layer[regime] for layer in layers) if layers else None

    return value


def _of_text(experiment: Experiment) -> tuple[Cell, ...]:
    """The cells that learnt text; all where none did."""
    texts = (record for record in experiment.trainings.values() if task_of(record) == "text")
    names = {record.cell.name for record in (*experiment.evaluations, *texts)}
    return tuple(cell for cell in experiment.cells if not names or cell.name in names)


def _choose_cells(cells: tuple[Cell, ...]) -> tuple[dict[str, Any], list[Cell]]:
    """The grid point and the cells to compare: see `Comparison`."""
    plain = {cell.variant for cell in cells if not cell.grid}
    points = Counter(_point(cell) for cell in cells if cell.variant not in plain)
    if not points:
        return {}, [cell for cell in cells if not cell.grid]

    def rank(point: str) -> tuple[int, int]:
        as_in_paper = sum(
            _plain(paper()["settings"].get(key)) == _plain(value)
            for key, value in json.loads(point).items()
        )
        return points[point], as_in_paper

    chosen = max(points, key=rank)
    kept = [
        cell
        for cell in cells
        if (not cell.grid if cell.variant in plain else _point(cell) == chosen)
    ]
    return json.loads(chosen), kept


def _point(cell: Cell) -> str:
    return json.dumps(cell.grid, sort_keys=True)


def _plain(value: Any) -> Any:
    """The same number whether it was written 6, 6.0 or "6"."""
    if isinstance(value, str):
        try:
            value = parse_json(value)
        except ValueError:
            return value
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _by_value(point: AxisPoint) -> tuple[int, float, str]:
    if isinstance(point.value, (int, float)) and not isinstance(point.value, bool):
        return 0, float(point.value), ""
    return 1, 0.0, str(point.value)
