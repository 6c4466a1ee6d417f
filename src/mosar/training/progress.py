"""Progress of a run on stderr: a bar with the time left, or plain lines."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)

# Without a terminal, a line at most this often, besides evaluations and messages.
_LINE_SECONDS = 10.0
_BAR_SECONDS = 0.2


def make_bar(console: Console, done: ProgressColumn, *, width: int) -> Progress:
    """A progress bar with the column `done` and the time; it is redrawn only on request."""
    return Progress(
        BarColumn(bar_width=width),
        done,
        TimeElapsedColumn(),
        TextColumn("{task.fields[left]} left · {task.description}", markup=False),
        console=console,
        # No refreshing thread: it would take time from the training.
        auto_refresh=False,
    )


class Reporter:
    """Shows a run's progress; with `progress` off only messages."""

    def __init__(self, steps: int, *, progress: bool = True):
        self.steps = steps
        self._console = Console(stderr=True, soft_wrap=True)
        self._lines = progress and not self._console.is_terminal
        self._progress = progress and self._console.is_terminal
        self._bar: Progress | None = None
        self._valid = ""

    @classmethod
    def silent(cls) -> Reporter:
        """A reporter that shows nothing."""
        reporter = cls(0, progress=False)
        reporter._console.quiet = True
        return reporter

    @contextmanager
    def running(self, start: int) -> Iterator[None]:
        """Shows the bar while the steps after `start` run."""
        self._start_step = start
        self._start = self._last = time.monotonic()
        if not self._progress:
            yield
            return
        with make_bar(self._console, MofNCompleteColumn(), width=20) as self._bar:
            self._task = self._bar.add_task("", total=self.steps, completed=start, left="-:--:--")
            yield

    def say(self, message: str) -> None:
        """A message that must be seen."""
        self._console.print(message, markup=False, highlight=False)

    def show(self, line: dict[str, Any]) -> None:
        """Shows a line of the metrics."""
        if line["split"] == "valid":
            self._valid = f" · valid {line.get('lm_loss', line['loss']):.4f}"
            if self._lines:
                self.say(f"step {line['step']}/{self.steps}{self._valid}")
            return
        text = f"loss {line['loss']:.4f}{self._valid} · {line['tokens_per_second']:,.0f} tokens/s"
        now, step = time.monotonic(), line["step"]
        # At most five times a second: short steps should not wait for the terminal.
        pause = _BAR_SECONDS if self._bar is not None else _LINE_SECONDS
        if now - self._last < pause and step < self.steps:
            return
        self._last = now
        if self._bar is not None:
            self._bar.update(
                self._task, completed=step, description=text, left=self._left(step), refresh=True
            )
        elif self._lines:
            self.say(f"step {step}/{self.steps} · {text} · {self._left(step)} left")

    def _left(self, step: int) -> str:
        done = max(step - self._start_step, 1)
        seconds = int((time.monotonic() - self._start) / done * (self.steps - step))
        return f"{seconds // 3600}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"
