"""Progress of an evaluation on stderr: a bar, or one line per length."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)


def say(message: str) -> None:
    """A message that must be seen."""
    Console(stderr=True, soft_wrap=True).print(message, markup=False, highlight=False)


@contextmanager
def length_progress(label: str, total: int, *, enabled: bool) -> Iterator[Callable[[], None]]:
    """Yields a function to call after each of `total` passes."""
    console = Console(stderr=True, soft_wrap=True)
    if enabled and not console.is_terminal:
        console.print(label, markup=False, highlight=False)
    with Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        # No refreshing thread: it would run while we measure.
        auto_refresh=False,
        disable=not (enabled and console.is_terminal),
    ) as bar:
        task = bar.add_task(label, total=total)
        bar.refresh()
        yield lambda: bar.update(task, advance=1, refresh=True)
