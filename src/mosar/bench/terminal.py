"""A benchmark at the terminal: progress on stderr, tables on stdout, records into a file."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from mosar.bench.attention import AttentionBenchmarkSettings, run_attention_benchmark
from mosar.bench.decode import DecodeBenchmarkSettings, run_decode_benchmark
from mosar.bench.decode_model import ModelDecodeSettings, run_model_decode_benchmark
from mosar.bench.decode_table import decode_footer, decode_table, model_footer, model_table
from mosar.bench.table import attention_footer, attention_table, best_gemm
from mosar.bench.training import TrainingBenchmarkSettings, run_training_benchmark
from mosar.bench.training_table import training_footer, training_table
from mosar.records import (
    AttentionBenchmark,
    DecodeBenchmark,
    ModelDecodeBenchmark,
    Record,
    TrainingBenchmark,
    append_record,
)

# Wide enough for every column.
_WIDTH = 160

R = TypeVar("R", bound=Record)


def show_attention_benchmark(
    settings: AttentionBenchmarkSettings, json: Path | None = None
) -> list[AttentionBenchmark]:
    """Runs, shows and returns the records; after Ctrl-C shows those there are."""
    return show_benchmark(
        lambda report: run_attention_benchmark(settings, report),
        len(settings.cases()),
        _show_attention,
        json,
    )


def show_training_benchmark(
    settings: TrainingBenchmarkSettings, json: Path | None = None
) -> list[TrainingBenchmark]:
    """Runs, shows and returns the records; after Ctrl-C shows those there are."""
    return show_benchmark(
        lambda report: run_training_benchmark(settings, report),
        len(settings.cases()),
        _show_training,
        json,
    )


def show_decode_benchmark(
    settings: DecodeBenchmarkSettings, json: Path | None = None
) -> list[DecodeBenchmark]:
    """Runs, shows and returns the records; after Ctrl-C shows those there are."""
    return show_benchmark(
        lambda report: run_decode_benchmark(settings, report),
        len(settings.cases()),
        _show_decode,
        json,
    )


def show_model_decode_benchmark(
    settings: ModelDecodeSettings, json: Path | None = None
) -> list[ModelDecodeBenchmark]:
    """Runs, shows and returns the records; after Ctrl-C shows those there are."""
    return show_benchmark(
        lambda report: run_model_decode_benchmark(settings, report),
        len(settings.lengths),
        _show_model_decode,
        json,
    )


def show_benchmark(
    run: Callable[[Callable[[str], None]], Iterator[R]],
    total: int,
    show: Callable[[list[R]], None],
    json: Path | None,
) -> list[R]:
    """Runs `total` rows with progress, appends each to `json`, shows what there is at the end."""
    records: list[R] = []
    progress = _progress()
    task = progress.add_task("", total=total)

    def report(step: str) -> None:
        progress.update(task, completed=len(records), description=step, refresh=True)
        if progress.disable:
            progress.console.print(f"[{len(records)}/{total}] {step}", markup=False)

    rows = run(report)
    try:
        with progress:
            for record in rows:
                records.append(record)
                if json is not None:
                    append_record(json, record)
    except KeyboardInterrupt:
        if records:
            show(records)
        raise KeyboardInterrupt(f"stopped after {len(records)} of {total} rows") from None
    if records:
        show(records)
    return records


def _progress() -> Progress:
    console = Console(stderr=True)
    return Progress(
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}", markup=False),
        console=console,
        # No refreshing thread: it would run while we measure.
        auto_refresh=False,
        transient=True,
        disable=not console.is_terminal,
    )


def _wide_console() -> Console:
    # A narrower terminal breaks the lines, which reads badly; leaving out figures would be worse.
    return Console(width=max(Console().width, _WIDTH))


def _show_attention(records: list[AttentionBenchmark]) -> None:
    peak = best_gemm(records)
    for mode in dict.fromkeys(record.mode for record in records):
        rows = [record for record in records if record.mode == mode]
        _wide_console().print(attention_table(rows, peak))
    _footer(attention_footer(records))


def _show_training(records: list[TrainingBenchmark]) -> None:
    _wide_console().print(training_table(records))
    _footer(training_footer(records))


def _show_decode(records: list[DecodeBenchmark]) -> None:
    _wide_console().print(decode_table(records))
    _footer(decode_footer(records))


def _show_model_decode(records: list[ModelDecodeBenchmark]) -> None:
    _wide_console().print(model_table(records))
    _footer(model_footer(records))


def _footer(text: str) -> None:
    Console().print(text, markup=False, highlight=False, soft_wrap=True)
