"""Benchmark records as tables: attention, decoding, training."""

from __future__ import annotations

from mosar.report.experiment import Experiment
from mosar.report.formats import count, number, percent, share, times
from mosar.report.tables import Table, field_table, whole


def benchmark_table(experiment: Experiment) -> Table:
    """Rows of the attention benchmark."""
    return field_table(
        "benchmarks",
        "Attention benchmark",
        "Medians of interleaved rounds; a row whose result was outside of its error budget has no "
        "speed-up.",
        experiment.benchmarks,
        ("mode", lambda r: r.mode, None),
        ("shape", lambda r: r.shape, None),
        ("length", lambda r: r.length, whole),
        ("density ρ", lambda r: r.density, share),
        ("SDPA, ms", lambda r: r.median_ms("sdpa"), _three_digits),
        ("ours, ms", lambda r: r.median_ms("ours"), _three_digits),
        ("speed-up", lambda r: r.speedup, times),
        ("of 1/ρ", lambda r: r.speedup_times_density, lambda value: number(value, 2)),
    )


def decode_table(experiment: Experiment) -> Table:
    """One step of decoding against the length of its context."""
    return field_table(
        "decoding",
        "Decoding benchmark",
        "One step's attention; memory is what the regime cache holds over the keys and values of "
        "all tokens.",
        experiment.decode_benchmarks,
        ("shape", lambda r: r.shape, None),
        ("labels", lambda r: r.labels, None),
        ("context", lambda r: r.length, whole),
        ("keys read", lambda r: r.keys_read, whole),
        ("SDPA, ms", lambda r: r.median_ms("sdpa"), _three_digits),
        ("ours, ms", lambda r: r.median_ms("ours"), _three_digits),
        ("speed-up", lambda r: r.speedup, times),
        ("memory", lambda r: r.memory_ratio * 100, lambda value: percent(value, 1, signed=False)),
    )


def training_speed_table(experiment: Experiment) -> Table:
    """Tokens per second of a training step, one row per competitor."""
    rows = [(r, name) for r in experiment.training_benchmarks for name in r.measurements]
    return field_table(
        "training-speed",
        "Training benchmark",
        "Medians over steps, in turn; a row with a wrong loss has no ratio.",
        rows,
        ("model", lambda row: row[1], None),
        ("preset", lambda row: row[0].preset, None),
        ("soft-caps", lambda row: row[0].setting, None),
        ("length", lambda row: row[0].length, whole),
        ("parameters", lambda row: row[0].parameters.get(row[1]), count),
        ("tokens/s", lambda row: row[0].tokens_per_second(row[1]), whole),
        ("against rope", lambda row: row[0].ratio(row[1], "rope"), times),
    )


def _three_digits(value: float) -> str:
    return f"{value:.3g}"
