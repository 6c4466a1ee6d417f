"""One display for the whole experiment, on stderr: cells, steps, time left."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import Progress, TaskProgressColumn

from mosar.training.progress import Reporter, make_bar

# Without a terminal, seconds between two lines, besides the start and the end of a cell.
_LINE_SECONDS = 30.0
_BAR_SECONDS = 0.2


class Display:
    """Shows the progress of all cells; with `enabled` off only messages."""

    def __init__(self, total: int, guess: float, *, enabled: bool = True):
        self.total, self.guess, self.enabled = max(total, 1), guess, enabled
        self.console = Console(stderr=True, soft_wrap=True)
        self.done = 0
        self._fresh = 0
        self._start = self._last = time.monotonic()
        self._bar: Progress | None = None
        self._text = ""

    @contextmanager
    def running(self) -> Iterator[None]:
        self._start = time.monotonic()
        if not self.enabled or not self.console.is_terminal:
            yield
            return
        with make_bar(self.console, TaskProgressColumn(), width=24) as self._bar:
            self._task = self._bar.add_task("", total=self.total, left=_clock(self.guess))
            yield
        self._bar = None

    def say(self, message: str) -> None:
        """A message that must be seen."""
        self.console.print(message, markup=False, highlight=False)

    def skip(self, work: int) -> None:
        """Counts work that was not done now, so it says nothing about the speed."""
        self.done += work

    def advance(self, work: int, text: str = "") -> None:
        """Counts work that was just done."""
        self.done += work
        self._fresh += work
        self.show(text)

    def show(self, text: str = "", *, now: bool = False) -> None:
        self._text = text or self._text
        moment = time.monotonic()
        pause = _BAR_SECONDS if self._bar is not None else _LINE_SECONDS
        if not self.enabled or (moment - self._last < pause and not now):
            return
        self._last = moment
        if self._bar is not None:
            self._bar.update(
                self._task,
                completed=self.done,
                description=self._text,
                left=self._left(),
                refresh=True,
            )
        else:
            share = 100 * self.done / self.total
            self.say(f"{share:3.0f} % · {self._left()} left · {self._text}")

    def _left(self) -> str:
        left = max(self.total - self.done, 0)
        # Until the first step, the time was spent on starting processes.
        spent = time.monotonic() - self._start if self._fresh else 0.0
        # The guess has the weight of a twentieth of the work, since early steps say little.
        trust = self.total / 20
        rate = (spent + self.guess * trust / self.total) / (self._fresh + trust)
        return _clock(left * rate)


def _clock(seconds: float) -> str:
    whole = int(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"


class CellReporter(Reporter):
    """Shows the training of one cell as a part of the experiment."""

    def __init__(self, display: Display, label: str, steps: int, work_per_step: int):
        super().__init__(steps, progress=False)
        self._display, self._label, self._work = display, label, work_per_step
        self._step = 0

    @contextmanager
    def running(self, start: int) -> Iterator[None]:
        self._step = start
        self._display.skip(start * self._work)
        yield

    def say(self, message: str) -> None:
        self._display.say(f"{self._label}: {message}")

    def show(self, line: dict[str, Any]) -> None:
        if line["split"] == "valid":
            self._valid = f" · valid {line['lm_loss']:.3f}"
            return
        text = f"{self._label}, step {line['step']}/{self.steps} · loss {line['loss']:.3f}"
        self._display.advance((line["step"] - self._step) * self._work, text + self._valid)
        self._step = line["step"]
