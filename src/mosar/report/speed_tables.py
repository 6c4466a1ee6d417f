"""Benchmark records as tables: attention, decoding, training."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from mosar.report.experiment import Experiment
from mosar.report.formats import count, number, percent, share, times
from mosar.report.tables import Column, Table, figure_cell

# The heading of a column, what it shows of a row, and how; without that it is text.
Field = tuple[str, Callable[[Any], Any], Callable[[float], str] | None]


def benchmark_table(experiment: Experiment) -> Table:
    """Rows of the attention benchmark."""
    return _table(
        "benchmarks",
        "Attention benchmark",
        "Medians of interleaved rounds; a row whose result was outside of its error budget has no "
        "speed-up.",
        experiment.benchmarks,
        ("mode", lambda r: r.mode, None),
        ("shape", lambda r: r.shape, None),
        ("length", lambda r: r.length, _whole),
        ("density ρ", lambda r: r.density, share),
        ("SDPA, ms", lambda r: r.median_ms("sdpa"), _three_digits),
        ("ours, ms", lambda r: r.median_ms("ours"), _three_digits),
        ("speed-up", lambda r: r.speedup, times),
        ("of 1/ρ", lambda r: r.speedup_times_density, lambda value: number(value, 2)),
    )


def decode_table(experiment: Experiment) -> Table:
    """One step of decoding against the length of its context."""
    return _table(
        "decoding",
        "Decoding benchmark",
        "One step's attention; memory is what the regime cache holds over the keys and values of "
        "all tokens.",
        experiment.decode_benchmarks,
        ("shape", lambda r: r.shape, None),
        ("labels", lambda r: r.labels, None),
        ("context", lambda r: r.length, _whole),
        ("keys read", lambda r: r.keys_read, _whole),
        ("SDPA, ms", lambda r: r.median_ms("sdpa"), _three_digits),
        ("ours, ms", lambda r: r.median_ms("ours"), _three_digits),
        ("speed-up", lambda r: r.speedup, times),
        ("memory", lambda r: r.memory_ratio * 100, lambda value: percent(value, 1, signed=False)),
    )


def training_speed_table(experiment: Experiment) -> Table:
    """Tokens a second of a training step, one row per competitor."""
    rows = [(r, name) for r in experiment.training_benchmarks for name in r.measurements]
    return _table(
        "training-speed",
        "Training benchmark",
        "Medians over steps, in turn; a row with a wrong loss has no ratio.",
        rows,
        ("model", lambda row: row[1], None),
        ("preset", lambda row: row[0].preset, None),
        ("soft-caps", lambda row: row[0].setting, None),
        ("length", lambda row: row[0].length, _whole),
        ("parameters", lambda row: row[0].parameters.get(row[1]), count),
        ("tokens/s", lambda row: row[0].tokens_per_second(row[1]), _whole),
        ("against rope", lambda row: row[0].ratio(row[1], "rope"), times),
    )


def _table(name: str, title: str, caption: str, rows: Iterable[Any], *fields: Field) -> Table:
    return Table(
        name=name,
        title=title,
        caption=caption,
        columns=tuple(Column(head, numeric=text is not None) for head, _, text in fields),
        rows=tuple(
            tuple(figure_cell(value(row), text or str) for _, value, text in fields) for row in rows
        ),
    )


def _whole(value: float) -> str:
    return f"{value:,.0f}"


def _three_digits(value: float) -> str:
    return f"{value:.3g}"
