"""How an experiment was run: settings, data, machine, runs, failures, benchmarks; as tables."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import PurePath
from typing import Any

from mosar.report.comparison import Comparison
from mosar.report.experiment import Experiment
from mosar.report.formats import MISSING, count, duration, number, setting
from mosar.report.tables import Column, Table, TableCell, figure_cell

# Where a dataset lay says nothing elsewhere, and seeds have a column of their own.
_LEFT_OUT = ("data.folder", "data.seed", "train.seed")
_ENVIRONMENT = {
    "mosar": "mosar",
    "torch": "torch",
    "python": "Python",
    "cpu": "CPU",
    "cpu_capability": "instructions",
    "threads": "threads",
    "platform": "platform",
    "commit": "commit",
}


def _settings(c: Comparison) -> dict[str, dict[str, str]]:
    """Variant -> dotted key -> value, of its first compared run."""
    found = {}
    for variant, runs in c.trainings.items():
        config = runs[min(runs)].config
        flat = dict(flattened({k: v for k, v in config.items() if isinstance(v, dict)}))
        flat = {key: value for key, value in flat.items() if not key.startswith("environment.")}
        found[variant] = {k: setting(v) for k, v in flat.items() if k not in _LEFT_OUT}
    return found


def shared_settings_table(c: Comparison) -> Table:
    """What all variants have in common."""
    settings = list(_settings(c).values())
    shared = [
        (key, value)
        for key, value in (settings[0] if settings else {}).items()
        if all(other.get(key) == value for other in settings)
    ]
    return _pairs("settings", "Settings of all variants", "", shared)


def differing_settings_table(c: Comparison) -> Table:
    """What tells the variants apart."""
    settings = _settings(c)
    keys = dict.fromkeys(key for values in settings.values() for key in values)
    differing = [key for key in keys if len({v.get(key) for v in settings.values()}) > 1]
    return Table(
        name="variants",
        title="What the variants change",
        caption="Settings that are not the same in all of them; nothing else differs.",
        columns=(
            Column("variant", numeric=False),
            *(Column(key, numeric=False) for key in differing),
        ),
        rows=tuple(
            (
                TableCell(c.looks[variant].label, c.looks[variant].label),
                *(TableCell(values.get(key, MISSING)) for key in differing),
            )
            for variant, values in settings.items()
        )
        if differing
        else (),
        keys=tuple(settings) if differing else (),
    )


def data_table(experiment: Experiment) -> Table:
    """Where the text came from; every cell has the same, or it is said."""
    found: dict[str, list[str]] = {}
    for record in experiment.trainings.values():
        for key, value in flattened(_named(record.data)):
            values = found.setdefault(key, [])
            if setting(value) not in values:
                values.append(setting(value))
    rows = [(key, "; ".join(values)) for key, values in found.items()]
    return _pairs("data", "Data", "", rows)


def _named(values: Any) -> Any:
    """Paths by their names: where a file lay on one machine says nothing on another."""
    if isinstance(values, dict):
        return {key: _named(value) for key, value in values.items()}
    if isinstance(values, list):
        return [_named(value) for value in values]
    if isinstance(values, str) and values.startswith(("/", "../", "~")):
        return PurePath(values).name
    return values


def environment_table(experiment: Experiment) -> Table:
    """Software and machine of the records."""
    found: dict[str, list[str]] = {}
    for record in experiment.records:
        for key, value in record.environment.items():
            values = found.setdefault(_ENVIRONMENT.get(key, key), [])
            if setting(value) not in values:
                values.append(setting(value))
    rows = [(key, "; ".join(sorted(values))) for key, values in found.items()]
    return _pairs("environment", "Software and machine", "", rows)


def failures_table(experiment: Experiment) -> Table:
    """Cells that failed."""
    return Table(
        name="failures",
        title="Cells that failed",
        caption="They are in no figure of this report.",
        columns=tuple(Column(name, numeric=False) for name in ("cell", "error", "when")),
        rows=tuple(
            (TableCell(f.cell, f.cell), TableCell(f.error), TableCell(f.when or MISSING, f.when))
            for f in experiment.failures
        ),
    )


def flattened(values: dict[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    """Dotted keys and values."""
    for key, value in values.items():
        if isinstance(value, dict):
            yield from flattened(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _pairs(name: str, title: str, caption: str, rows: list[tuple[str, str]]) -> Table:
    return Table(
        name=name,
        title=title,
        caption=caption,
        columns=(Column("setting", numeric=False), Column("value", numeric=False)),
        rows=tuple((TableCell(key, key), TableCell(value or MISSING)) for key, value in rows),
    )


def runs_table(c: Comparison) -> Table:
    """Every training run with its budget."""
    records = c.experiment.trainings
    rows = []
    for record in records.values():
        last = record.valid_curve[-1][1] if record.valid_curve else None
        axis = ", ".join(f"{key} = {value}" for key, value in record.cell.grid.items())
        rate = record.tokens / record.seconds if record.seconds else None
        rows.append(
            (
                TableCell(c.looks[record.cell.variant].label + (f" ({axis})" if axis else "")),
                TableCell(str(record.cell.seed), record.cell.seed),
                TableCell(count(record.parameters), record.parameters),
                TableCell(f"{record.step:,}", record.step),
                TableCell(count(record.tokens), record.tokens),
                figure_cell(last, lambda value: number(value, 4)),
                figure_cell(record.seconds, duration),
                figure_cell(rate, lambda value: f"{value:,.0f}"),
                TableCell(record.created[:16].replace("T", " "), record.created),
            )
        )
    return Table(
        name="runs",
        title="Training runs",
        caption="Loss: of the last validation during training. Time: in steps, on a machine that "
        "may have had other work.",
        columns=(
            Column("variant", numeric=False),
            *(Column(name) for name in ("seed", "parameters", "steps", "tokens", "loss")),
            *(Column(name) for name in ("time", "tokens/s", "recorded, UTC")),
        ),
        rows=tuple(rows),
        keys=tuple(record.cell.variant for record in records.values()),
    )
