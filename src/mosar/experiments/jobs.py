"""Runs cells side by side: one process for each, with one display and one Ctrl-C for all of them.

A process with one thread keeps its speed while another process is busy. A cell gives the same
records as alone: it has its own run folder and as many threads, whatever the number of jobs.
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
from mosar.experiments.limits import available_cores, available_memory
from mosar.experiments.progress import Display
from mosar.experiments.settings import ExperimentSettings
from mosar.model.parameters import parameter_parts, total
from mosar.records import Cell
from mosar.training.config import RunConfig
from mosar.training.stopping import stop_requests

RunCell = Callable[[ExperimentSettings, Cell, Path, Display, str], None]
# Bytes of a process without a model.
_PROCESS_BYTES = 800_000_000
# Numbers that a layer keeps for the backward pass, per token and hidden unit.
_NUMBERS_KEPT = 40
# Between two messages of a process, and between two checks whether it still runs.
_MESSAGE_SECONDS = 0.2


@dataclass
class Job:
    """A cell that is being run."""

    cell: Cell
    label: str
    process: SpawnProcess
    outcome: str | None = None
    """None while it runs, "" once it finished, otherwise why it failed."""
    text: str = ""
    work_shown: int = 0
    """How much of its work the display has counted."""


def fitting_jobs(settings: ExperimentSettings, cells: Sequence[Cell]) -> int:
    """As many jobs as there are cores, cells and memory for; one on any device but the CPU."""
    if not cells or not _is_on_cpu(settings, cells):
        return 1
    needed = max(_bytes_needed(settings.config(cell)) for cell in cells)
    return max(1, min(available_cores(), len(cells), available_memory() // needed))


def default_threads(settings: ExperimentSettings) -> int | None:
    """Threads of each cell; None on any device but the CPU: torch's own choice.

    One, unless there are fewer cells than cores. The number follows from all cells and not from
    those that are left or run side by side: it decides how sums are rounded, and a resumed cell
    must go on as it began.
    """
    cells = settings.cells()
    return max(1, available_cores() // len(cells)) if _is_on_cpu(settings, cells) else None


def _is_on_cpu(settings: ExperimentSettings, cells: Sequence[Cell]) -> bool:
    devices = (settings.config(cell).train.device for cell in cells)
    return all(torch.device(device).type == "cpu" for device in devices)


def _bytes_needed(config: RunConfig) -> int:
    """About: parameters, gradients, two moments, and what is kept for the backward pass."""
    model, train = config.model, config.train
    tokens = train.micro_batch * model.max_length
    activations = tokens * model.num_layers * model.hidden_size * _NUMBERS_KEPT
    return _PROCESS_BYTES + 4 * (4 * total(parameter_parts(model, config.attention)) + activations)


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

    work: of each cell by its name, in the display's unit. ended: called when a cell ends, with its
    label and why it failed, or "". A signal saves all cells that run and raises
    TrainingInterrupted.
    """
    context = get_context("spawn")
    messages = context.Queue()
    waiting, running = list(cells), dict[str, Job]()
    with stop_requests() as stop:
        is_passed_on = False
        try:
            while running or (waiting and not stop):
                while waiting and len(running) < jobs and not stop:
                    cell, label = waiting.pop(0)
                    given = (run_cell, settings, cell, out, label, threads, messages)
                    process = context.Process(target=_run, args=given)
                    # The child inherits the blocked Ctrl-C and unblocks it once it can save.
                    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
                    try:
                        process.start()
                    finally:
                        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
                    running[cell.name] = Job(cell, label, process)
                if stop and not is_passed_on:
                    is_passed_on = True
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
                    if job.outcome is None and not stop:
                        job.outcome = f"its process ended with exit code {job.process.exitcode}"
                    if job.outcome is not None:
                        count_rest(display, work[name] - job.work_shown, job.outcome)
                        ended(job.cell, job.label, job.outcome)
        finally:
            for job in running.values():
                job.process.kill()
    if stop:
        raise TrainingInterrupted("stopped", stop.signal_number or signal.SIGTERM)


def count_rest(display: Display, work: int, failure: str) -> None:
    """Counts the work of a cell that was not shown while it ran: evaluation, or what it left."""
    if failure:
        display.skip(work)
    else:
        display.advance(work)


def _read(messages: Any, running: dict[str, Job], display: Display) -> None:
    """Reads messages of the processes for a fifth of a second."""
    deadline = time.monotonic() + _MESSAGE_SECONDS
    while (left := deadline - time.monotonic()) > 0:
        try:
            name, kind, value, text = messages.get(timeout=left)
        except queue.Empty:
            return
        job = running[name]
        if kind == "end":
            job.outcome = value
        elif kind == "say":
            display.say(text)
        else:
            job.text = text.split(" · ")[0] or job.text
            shown = " | ".join(each.text for each in running.values() if each.text)
            job.work_shown += value
            if kind == "skip":
                display.skip(value)
            display.advance(value if kind == "advance" else 0, shown)


class _RemoteDisplay(Display):
    """Sends everything to the process that has the display."""

    def __init__(self, name: str, messages: Any):
        super().__init__(1, 0.0, enabled=False)
        self._name, self._messages = name, messages
        self._unsent_work, self._last_sent = 0, 0.0

    def say(self, message: str) -> None:
        self._messages.put((self._name, "say", 0, message))

    def skip(self, work: int) -> None:
        self._messages.put((self._name, "skip", work, ""))

    def advance(self, work: int, text: str = "") -> None:
        self._unsent_work += work
        if time.monotonic() - self._last_sent >= _MESSAGE_SECONDS:
            self._messages.put((self._name, "advance", self._unsent_work, text))
            self._unsent_work, self._last_sent = 0, time.monotonic()

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
    # A terminal sends Ctrl-C to every process of its session; only the parent should get it.
    os.setsid()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(threads)
    outcome = None
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
        run_cell(settings, cell, out, _RemoteDisplay(cell.name, messages), label)
        outcome = ""
    except (TrainingInterrupted, KeyboardInterrupt):
        pass
    # torch raises RuntimeError too, for example without memory.
    except (RuntimeError, MemoryError, ValueError) as error:
        outcome = " ".join(str(error).split()) or type(error).__name__
    except OSError as error:
        outcome = f"{error.filename or out}: {error.strerror or error}"
    messages.put((cell.name, "end", outcome, ""))


def _end_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)
