"""Benchmark records as tables: attention, decoding, training."""

from __future__ import annotations

from mosar.report.experiment import Experiment
from mosar.report.formats import count, number, percent, share, times
from mosar.report.tables import Column, Table, TableCell, figure_cell


def benchmark_table(experiment: Experiment) -> Table:
    """Rows of the attention benchmark."""
    rows = []
    for r in experiment.benchmarks:
        rows.append(
            (
                TableCell(r.mode, r.mode),
                TableCell(r.shape, r.shape),
                TableCell(f"{r.length:,}", r.length),
                TableCell(share(r.density), r.density),
                figure_cell(r.median_ms("sdpa"), lambda value: f"{value:.3g}"),
                figure_cell(r.median_ms("ours"), lambda value: f"{value:.3g}"),
                figure_cell(r.speedup, times),
                figure_cell(r.speedup_times_density, lambda value: number(value, 2)),
            )
        )
    return Table(
        name="benchmarks",
        title="Attention benchmark",
        caption="Medians of interleaved rounds; a row whose result was outside of its error budget "
        "has no speed-up.",
        columns=(
            Column("mode", numeric=False),
            Column("shape", numeric=False),
            *(Column(name) for name in ("length", "density ρ", "SDPA, ms", "ours, ms")),
            *(Column(name) for name in ("speed-up", "of 1/ρ")),
        ),
        rows=tuple(rows),
    )


def decode_table(experiment: Experiment) -> Table:
    """One step of decoding against the length of its context."""
    return Table(
        name="decoding",
        title="Decoding benchmark",
        caption="One step's attention; memory is what the regime cache holds over the keys and "
        "values of all tokens.",
        columns=(
            *(Column(name, numeric=False) for name in ("shape", "labels")),
            *(Column(name) for name in ("context", "keys read", "SDPA, ms", "ours, ms")),
            *(Column(name) for name in ("speed-up", "memory")),
        ),
        rows=tuple(
            (
                TableCell(r.shape, r.shape),
                TableCell(r.labels, r.labels),
                TableCell(f"{r.length:,}", r.length),
                figure_cell(r.keys_read, lambda value: f"{value:,.0f}"),
                figure_cell(r.median_ms("sdpa"), lambda value: f"{value:.3g}"),
                figure_cell(r.median_ms("ours"), lambda value: f"{value:.3g}"),
                figure_cell(r.speedup, times),
                figure_cell(r.memory_ratio * 100, lambda value: percent(value, 1, signed=False)),
            )
            for r in experiment.decode_benchmarks
        ),
    )


def training_speed_table(experiment: Experiment) -> Table:
    """Tokens a second of a training step, a row a competitor."""
    rows = []
    for r in experiment.training_benchmarks:
        for name in r.measurements:
            rate = r.tokens_per_second(name)
            rows.append(
                (
                    TableCell(name, name),
                    TableCell(r.preset, r.preset),
                    TableCell(r.setting, r.setting),
                    TableCell(f"{r.length:,}", r.length),
                    figure_cell(r.parameters.get(name), count),
                    figure_cell(rate, lambda value: f"{value:,.0f}"),
                    figure_cell(r.ratio(name, "rope"), times),
                )
            )
    return Table(
        name="training-speed",
        title="Training benchmark",
        caption="Medians over steps, in turn; a row with a wrong loss has no ratio.",
        columns=(
            *(Column(name, numeric=False) for name in ("model", "preset", "soft-caps")),
            *(Column(name) for name in ("length", "parameters", "tokens/s", "against rope")),
        ),
        rows=tuple(rows),
    )
