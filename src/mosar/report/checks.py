"""What a record must look like to be reported: its fields are numbers, rows, objects as promised.

`read_records` has checked that every field is there; a ValueError here names the one that is wrong.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from mosar.records import (
    AttentionBenchmark,
    Cell,
    DecodeBenchmark,
    EvaluationRecord,
    Record,
    RetrievalRecord,
    TrainingBenchmark,
    TrainingRecord,
)


def check_record(record: Record) -> None:
    """Raises a ValueError where a field is not what the schema says."""
    if isinstance(record, EvaluationRecord):
        _check_evaluation(record)
    elif isinstance(record, TrainingRecord):
        _check_training(record)
    elif isinstance(record, RetrievalRecord):
        _check_retrieval(record)
    elif isinstance(record, AttentionBenchmark):
        _check_benchmark(record, ("heads", "kv_heads", "head_dim", "length", "pairs"))
        _integer("causal_pairs", record.causal_pairs, 1)
        _text("mode", record.mode)
    elif isinstance(record, DecodeBenchmark):
        _check_benchmark(record, ("heads", "kv_heads", "head_dim", "length", "dense_bytes"))
        _number("keys_read", record.keys_read, 0)
        _integer("allocated_bytes", record.allocated_bytes, 0)
        _text("labels", record.labels)
    elif isinstance(record, TrainingBenchmark):
        _check_benchmark(record, ("length", "batch"))
        _text("preset", record.preset)
        _text("setting", record.setting)
        _object("parameters", record.parameters)
    _object("environment", record.environment)
    _text("created", record.created)


def _check_evaluation(record: EvaluationRecord) -> None:
    _cell(record.cell)
    for name in ("step", "windows", "tokens"):
        _integer(name, getattr(record, name), 0)
    for name in ("train_length", "length"):
        _integer(name, getattr(record, name), 1)
    _text("routing", record.routing)
    _number("loss", record.loss, 0)
    _number("loss_stderr", record.loss_stderr, 0)
    _number("seconds", record.seconds, 0)
    _number("density", record.density, 0, 1)
    _numbers("layer_density", record.layer_density)
    for name in ("reach_soft", "reach_top1"):
        if getattr(record, name) is not None:
            _number(name, getattr(record, name), 0)
    _rows("buckets", record.buckets, 4)
    _list("regimes", record.regimes)
    for name in record.regimes:
        _text("regimes", name)
    for name in ("shares_soft", "shares_top1"):
        _shares(name, getattr(record, name), len(record.regimes))
    _list("discarded_mass", record.discarded_mass)
    for layer in record.discarded_mass:
        _object("discarded_mass", layer)
        for statistic in ("mean", "p95", "worst"):
            _number(f"discarded_mass {statistic}", layer.get(statistic), 0)
    _labels(record.example_labels)


def _check_training(record: TrainingRecord) -> None:
    _cell(record.cell)
    _object("config", record.config)
    _object("data", record.data)
    for name in ("parameters", "step", "tokens"):
        _integer(name, getattr(record, name), 0)
    if record.seconds is not None:
        _number("seconds", record.seconds, 0)
    for name in ("train_curve", "valid_curve", "reach_curve"):
        _rows(name, getattr(record, name), 2)


def _check_benchmark(
    record: AttentionBenchmark | DecodeBenchmark | TrainingBenchmark, counts: tuple[str, ...]
) -> None:
    for name in counts:
        _integer(name, getattr(record, name), 1)
    for name, measurement in record.measurements.items():
        for sample in measurement.samples_ms:
            _number(f"measurements {name}", sample, 0)
    for name, check in record.checks.items():
        if check.error is not None:
            _number(f"checks {name} error", check.error, 0)
        _number(f"checks {name} budget", check.budget, 0)


def _check_retrieval(record: RetrievalRecord) -> None:
    _cell(record.cell)
    _text("task", record.task)
    _text("routing", record.routing)
    for name in ("step", "answers"):
        _integer(name, getattr(record, name), 0)
    for name in ("train_length", "length"):
        _integer(name, getattr(record, name), 1)
    for name in ("accuracy", "chance"):
        _number(name, getattr(record, name), 0, 1)
    if record.density is not None:
        _number("density", record.density, 0, 1)
    _rows("by_distance", record.by_distance, 4)
    _object("reaches", record.reaches)
    for name, reach in record.reaches.items():
        _number(f"reaches {name}", reach, 0)


def _cell(cell: Cell) -> None:
    _text("cell.variant", cell.variant)
    _text("cell.preset", cell.preset)
    _integer("cell.seed", cell.seed, 0)
    _object("cell.grid", cell.grid)


def _text(name: str, value: Any) -> None:
    if not isinstance(value, str) or not value or not value.isprintable():
        raise ValueError(f"{name} must be a text of printable characters, got {value!r:.60}")


def _integer(name: str, value: Any, low: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < low:
        raise ValueError(f"{name} must be an integer >= {low}, got {value!r:.60}")


def _number(name: str, value: Any, low: float = -math.inf, high: float = math.inf) -> None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    # A share may exceed 1 by rounding.
    if not is_number or not math.isfinite(value) or not low <= value <= high + 1e-6:
        bounds = f" in [{low:g}, {high:g}]" if math.isfinite(high) else f" >= {low:g}"
        raise ValueError(
            f"{name} must be a finite number{bounds if math.isfinite(low) else ''}, "
            f"got {value!r:.60}"
        )


def _list(name: str, value: Any) -> None:
    if not isinstance(value, (list, tuple)):
        raise ValueError(f"{name} must be a list, got {value!r:.60}")


def _object(name: str, value: Any) -> None:
    if not isinstance(value, dict):
        raise ValueError(f"{name} must be an object, got {value!r:.60}")


def _numbers(name: str, values: Any) -> None:
    _list(name, values)
    for value in values:
        _number(name, value)


def _rows(name: str, rows: Any, width: int) -> None:
    _list(name, rows)
    for row in rows:
        if not isinstance(row, (list, tuple)) or len(row) != width:
            raise ValueError(f"{name} must have rows of {width} numbers, got {row!r:.60}")
        _numbers(name, row)


def _sides(name: str, values: Any) -> Sequence[Any]:
    """The two lists of an object with "query" and "key", or nothing where it is empty."""
    _object(name, values)
    if not values:
        return ()
    if set(values) != {"query", "key"}:
        raise ValueError(f"{name} must have the fields query and key, got {sorted(values)}")
    sides = [values["query"], values["key"]]
    for side in sides:
        _list(name, side)
    if len(sides[0]) != len(sides[1]):
        raise ValueError(f"{name} must have as many layers for query as for key")
    return sides


def _shares(name: str, values: Any, num_regimes: int) -> None:
    for side in _sides(name, values):
        _rows(name, side, num_regimes)


def _labels(values: Any) -> None:
    for side in _sides("example_labels", values):
        for layer in side:
            if not isinstance(layer, str):
                raise ValueError(f"example_labels must hold texts, got {layer!r:.60}")
