"""Progress of a pass over data: a bar on stderr, or one line if stderr is not a terminal."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

_EVERY_SECONDS = 0.1


class Display:
    """Shows the passes of one command, one after the other."""

    def __init__(self, enabled: bool) -> None:
        console = Console(stderr=True)
        self._lines = enabled and not console.is_terminal
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            TaskProgressColumn(),
            TextColumn("{task.fields[note]}", markup=False),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not enabled or not console.is_terminal,
        )
        self._task = None
        self._due = 0.0

    @contextmanager
    def open(self) -> Iterator[Display]:
        with self._progress:
            yield self

    def begin(self, description: str, total: int | None) -> None:
        """Starts a new pass; `total` is None if its size is not known."""
        if self._task is not None:
            self._progress.remove_task(self._task)
        self._task = self._progress.add_task(description, total=total, note="")
        if self._lines:
            self._progress.console.print(description, markup=False, highlight=False)

    def update(self, completed: int, note: str = "") -> None:
        """Cheap enough to be called for every piece of text."""
        now = time.monotonic()
        if self._task is not None and now >= self._due:
            self._due = now + _EVERY_SECONDS
            self._progress.update(self._task, completed=completed, note=note)
