"""Cells side by side: a process for each, one display and one Ctrl-C for all of them.

A process keeps to its own threads, so it keeps its speed where another one is busy. What a cell
gives is the same as in one process: it has its own run folder, and its records are written whole.
"""

from __future__ import annotations

import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import get_context, parent_process
from multiprocessing.connection import wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

import torch

from mosar.errors import TrainingInterrupted
from mosar.experiments.progress import Display
from mosar.experiments.settings import ExperimentSettings
from mosar.model.parameters import parameter_parts, total
from mosar.records import Cell
from mosar.training.config import RunConfig
from mosar.training.stopping import stop_requests

RunCell = Callable[[ExperimentSettings, Cell, Path, Display, str], None]
# What a process needs before it has a model, in bytes, and numbers a layer keeps for a token.
_TORCH, _KEPT = 800_000_000, 40
# Seconds between looks at the processes, and between their messages.
_MOMENT = 0.2


@dataclass
class Job:
    """A cell that is being run."""

    cell: Cell
    label: str
    process: SpawnProcess
    end: str | None = None
    """Why it failed; "": it finished. None: it has not said."""
    text: str = ""
    counted: int = 0
    """Of its work, what the display knows of."""


def fitting_jobs(settings: ExperimentSettings, cells: Sequence[Cell]) -> int:
    """As many as there are cores, cells and memory for; one on any device but the CPU."""
    if not cells:
        return 1
    configs = [settings.config(cell) for cell in cells]
    if any(torch.device(config.train.device).type != "cpu" for config in configs):
        return 1
    fits = int(_free_memory() // max(_bytes_needed(config) for config in configs))
    return max(1, min(len(os.sched_getaffinity(0)), len(cells), fits))


def _free_memory() -> int:
    """What could be had, caches that the system would give up included."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        (size,) = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
        return 1024 * int(size)
    except (OSError, ValueError):
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _bytes_needed(config: RunConfig) -> int:
    """Roughly: parameters, gradient and two moments, and what the backward pass reads."""
    model, train = config.model, config.train
    tokens = train.micro_batch * model.max_length
    activations = tokens * model.num_layers * model.hidden_size * _KEPT
    return _TORCH + 4 * (4 * total(parameter_parts(model, config.attention)) + activations)


def run_side_by_side(
    run_cell: RunCell,
    settings: ExperimentSettings,
    cells: Sequence[tuple[Cell, str]],
    out: Path,
    display: Display,
    *,
    jobs: int,
    threads: int,
    work: Mapping[str, int],
    ended: Callable[[Cell, str, str], None],
) -> None:
    """Runs cells with their labels, at most `jobs` at a time.

    work: of each cell by name, as the display counts it. ended: told of each cell, with its label,
    why it failed, or "". A signal stops them where they can go on later, as TrainingInterrupted
    says.
    """
    context = get_context("spawn")
    messages = context.Queue()
    waiting, running = list(cells), dict[str, Job]()
    with stop_requests() as stop:
        told = False
        try:
            while running or (waiting and not stop):
                while waiting and len(running) < jobs and not stop:
                    cell, label = waiting.pop(0)
                    given = (run_cell, settings, cell, out, label, threads, messages)
                    process = context.Process(target=_run, args=given)
                    # A child inherits that it hears no Ctrl-C, until it can do something with it.
                    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
                    try:
                        process.start()
                    finally:
                        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
                    running[cell.name] = Job(cell, label, process)
                if stop and not told:
                    told = True
                    for job in running.values():
                        with suppress(ProcessLookupError):
                            os.kill(job.process.pid or 0, stop.signal_number or signal.SIGTERM)
                _read(messages, running, display)
                for name, job in list(running.items()):
                    if job.process.is_alive():
                        continue
                    job.process.join()
                    _read(messages, running, display)
                    del running[name]
                    if job.end is None and not stop:
                        job.end = f"its process ended with exit code {job.process.exitcode}"
                    if job.end is not None:
                        display.skip(work[name] - job.counted)
                        ended(job.cell, job.label, job.end)
        finally:
            for job in running.values():
                job.process.kill()
    if stop:
        raise TrainingInterrupted("stopped", stop.signal_number or signal.SIGTERM)


def _read(messages: Any, running: dict[str, Job], display: Display) -> None:
    """Takes up what the processes say, for a moment at most."""
    deadline = time.monotonic() + _MOMENT
    while (left := deadline - time.monotonic()) > 0:
        try:
            name, kind, value, text = messages.get(timeout=left)
        except queue.Empty:
            return
        job = running[name]
        if kind == "end":
            job.end = value
        elif kind == "say":
            display.say(text)
        else:
            job.text = text.split(" · ")[0] or job.text
            shown = " | ".join(each.text for each in running.values() if each.text)
            job.counted += value
            if kind == "skip":
                display.skip(value)
            display.advance(value if kind == "advance" else 0, shown)


class _RemoteDisplay(Display):
    """Sends what it is told to the process that shows it."""

    def __init__(self, name: str, messages: Any):
        super().__init__(1, 0.0, enabled=False)
        self._name, self._messages = name, messages
        self._unsaid, self._said = 0, 0.0

    def say(self, message: str) -> None:
        self._messages.put((self._name, "say", 0, message))

    def skip(self, work: int) -> None:
        self._messages.put((self._name, "skip", work, ""))

    def advance(self, work: int, text: str = "") -> None:
        self._unsaid += work
        if time.monotonic() - self._said >= _MOMENT:
            self._messages.put((self._name, "advance", self._unsaid, text))
            self._unsaid, self._said = 0, time.monotonic()

    def show(self, text: str = "", *, now: bool = False) -> None:
        self._messages.put((self._name, "show", 0, text))


def _run(
    run_cell: RunCell,
    settings: ExperimentSettings,
    cell: Cell,
    out: Path,
    label: str,
    threads: int,
    messages: Any,
) -> None:
    """One cell in its own process."""
    # Ctrl-C in a terminal goes to everybody; the parent passes on what it means, once.
    os.setsid()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(threads)
    end = None
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
        run_cell(settings, cell, out, _RemoteDisplay(cell.name, messages), label)
        end = ""
    except (TrainingInterrupted, KeyboardInterrupt):
        pass
    # RuntimeError: torch's own too, like memory that cannot be had.
    except (RuntimeError, MemoryError, ValueError) as error:
        end = " ".join(str(error).split()) or type(error).__name__
    except OSError as error:
        end = f"{error.filename or out}: {error.strerror or error}"
    messages.put((cell.name, "end", end, ""))


def _end_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)
