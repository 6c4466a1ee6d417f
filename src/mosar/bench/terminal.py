"""A benchmark at the terminal: progress on stderr, tables on stdout, records into a file."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from mosar.bench.attention import AttentionBenchmarkSettings, run_attention_benchmark
from mosar.bench.table import attention_footer, attention_table, best_gemm
from mosar.records import AttentionBenchmark, append_record

# Wide enough for every column.
_WIDTH = 160


class Interrupted(RuntimeError):
    """Stopped by the user after some rows, which have been shown."""


def show_attention_benchmark(
    settings: AttentionBenchmarkSettings, json: Path | None = None
) -> list[AttentionBenchmark]:
    """Runs, shows and returns the records; Interrupted after Ctrl-C."""
    records: list[AttentionBenchmark] = []
    total = len(settings.cases())
    progress = _progress()
    task = progress.add_task("", total=total)

    def report(step: str) -> None:
        progress.update(task, completed=len(records), description=step, refresh=True)
        if progress.disable:
            progress.console.print(f"[{len(records)}/{total}] {step}", markup=False)

    rows = run_attention_benchmark(settings, report)
    try:
        with progress:
            for record in rows:
                records.append(record)
                if json is not None:
                    append_record(json, record)
    except KeyboardInterrupt:
        _show(records)
        raise Interrupted(f"stopped after {len(records)} of {total} rows") from None
    _show(records)
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


def _show(records: list[AttentionBenchmark]) -> None:
    if not records:
        return
    console = Console()
    # A narrower terminal breaks the lines, which reads badly; leaving out figures would be worse.
    wide = Console(width=max(console.width, _WIDTH))
    peak = best_gemm(records)
    for mode in dict.fromkeys(record.mode for record in records):
        rows = [record for record in records if record.mode == mode]
        wide.print(attention_table(rows, peak))
    console.print(attention_footer(records), markup=False, highlight=False, soft_wrap=True)
