"""Shows a benchmark: progress on stderr, tables on stdout, records in a file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from mosar.bench.comparison import Comparison, R
from mosar.bench.table import footer, make_table
from mosar.records import append_record
from mosar.terminal import table_console


def show_comparison(comparison: Comparison[Any, R], json: Path | None = None) -> list[R]:
    """Runs with progress, appends each row to `json`, shows the rows at the end and returns them.

    After Ctrl-C it shows the rows there are.
    """
    records: list[R] = []
    total = len(comparison.cases())
    console = Console(stderr=True)
    bar = (BarColumn(bar_width=20), MofNCompleteColumn(), TimeElapsedColumn())
    text = TextColumn("{task.description}", markup=False)
    # No refresh thread: it would disturb the measurement.
    progress = Progress(*bar, text, console=console, transient=True, auto_refresh=False)
    progress.disable = not console.is_terminal
    task = progress.add_task("", total=total)

    def report(step: str) -> None:
        progress.update(task, completed=len(records), description=step, refresh=True)
        if progress.disable:
            progress.console.print(f"[{len(records)}/{total}] {step}", markup=False)

    rows = comparison.run(report)
    try:
        with progress:
            for record in rows:
                records.append(record)
                if json is not None:
                    append_record(json, record)
    except KeyboardInterrupt:
        _show(comparison, records)
        raise KeyboardInterrupt(f"stopped after {len(records)} of {total} rows") from None
    _show(comparison, records)
    return records


def _show(comparison: Comparison[Any, R], records: Sequence[R]) -> None:
    """One table for each title."""
    if not records:
        return
    columns = comparison.columns(records)
    console = table_console()
    for title in dict.fromkeys(map(comparison.title_of, records)):
        rows = [record for record in records if comparison.title_of(record) == title]
        console.print(make_table(title, columns, rows, comparison.verdicts))
    text = footer(records, comparison.notes(records))
    console.print(text, markup=False, highlight=False, soft_wrap=True)
