"""How an experiment was run: settings, data, machine, runs, failures, benchmarks; as tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import PurePath
from typing import Any

from mosar.records import TrainingRecord
from mosar.report.comparison import Comparison
from mosar.report.experiment import Experiment
from mosar.report.formats import MISSING, count, duration, number, setting
from mosar.report.tables import Column, Table, TableCell, field_table, whole

# The path of a dataset means nothing elsewhere, and seeds have a column of their own.
_LEFT_OUT = ("data.folder", "data.seed", "train.seed")
# More settings than this are listed in one column.
_MOST_SETTINGS = 8
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
    return _pairs("settings", "Settings of all variants", shared)


def differing_settings_table(c: Comparison) -> Table:
    """What tells the variants apart."""
    settings = _settings(c)
    keys = dict.fromkeys(key for values in settings.values() for key in values)
    differing = [key for key in keys if len({v.get(key) for v in settings.values()}) > 1]
    if len(differing) > _MOST_SETTINGS:
        return _listed_settings(c, settings, differing)
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


def _listed_settings(
    c: Comparison, settings: dict[str, dict[str, str]], differing: list[str]
) -> Table:
    """The same in one column: the settings that most of the other variants do not have."""
    usual = {
        key: Counter(values.get(key) for values in settings.values()).most_common(1)[0][0]
        for key in differing
    }
    return field_table(
        "variants",
        "What the variants change",
        "Settings that most of the other variants do not have; nothing else differs.",
        settings,
        ("variant", lambda variant: c.looks[variant].label, None),
        (
            "settings",
            lambda variant: (
                "; ".join(
                    f"{key.rpartition('.')[2]} = {value}"
                    for key in differing
                    if (value := settings[variant].get(key)) not in (usual[key], None, MISSING)
                )
                or MISSING
            ),
            None,
        ),
        keys=settings,
    )


def data_table(experiment: Experiment) -> Table:
    """Where the text came from; differences between cells are listed."""
    found: dict[str, list[str]] = {}
    for record in experiment.trainings.values():
        for key, value in flattened(_named(record.data)):
            values = found.setdefault(key, [])
            if setting(value) not in values:
                values.append(setting(value))
    rows = [(key, "; ".join(values)) for key, values in found.items()]
    return _pairs("data", "Data", rows)


def _named(values: Any) -> Any:
    """Paths as file names: a path on one machine means nothing on another."""
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
    return _pairs("environment", "Software and machine", rows)


def failures_table(experiment: Experiment) -> Table:
    """Cells that failed."""
    return field_table(
        "failures",
        "Cells that failed",
        "They are in no figure of this report.",
        experiment.failures,
        ("cell", lambda failure: failure.cell, None),
        ("error", lambda failure: failure.error, None),
        ("when", lambda failure: failure.when or None, None),
    )


def flattened(values: dict[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    """Dotted keys and values."""
    for key, value in values.items():
        if isinstance(value, dict):
            yield from flattened(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _pairs(name: str, title: str, rows: Iterable[tuple[str, str]]) -> Table:
    return field_table(
        *(name, title, "", rows),
        ("setting", lambda row: row[0], None),
        ("value", lambda row: row[1] or None, None),
    )


def runs_table(c: Comparison) -> Table:
    """Every training run with its budget."""
    runs = list(c.experiment.trainings.values())

    def label(record: TrainingRecord) -> str:
        axis = ", ".join(f"{key} = {value}" for key, value in record.cell.grid.items())
        return c.looks[record.cell.variant].label + (f" ({axis})" if axis else "")

    return field_table(
        "runs",
        "Training runs",
        "Loss: of the last validation during training. Time: in steps, on a machine that may have "
        "had other work.",
        runs,
        ("variant", label, None),
        ("seed", lambda r: r.cell.seed, str),
        ("parameters", lambda r: r.parameters, count),
        ("steps", lambda r: r.step, whole),
        ("tokens", lambda r: r.tokens, count),
        ("loss", lambda r: r.valid_curve[-1][1] if r.valid_curve else None, _four_decimals),
        ("time", lambda r: r.seconds, duration),
        ("tokens/s", lambda r: r.tokens / r.seconds if r.seconds else None, whole),
        ("recorded, UTC", lambda r: r.created, lambda created: created[:16].replace("T", " ")),
        keys=(record.cell.variant for record in runs),
    )


def _four_decimals(value: float) -> str:
    return number(value, 4)
