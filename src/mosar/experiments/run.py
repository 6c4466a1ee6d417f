"""Runs an experiment: trains, evaluates and records every cell once.

DIR/experiment.json          what was asked for
DIR/cells/<cell>/            run folders
DIR/records/<cell>.jsonl     what a finished cell gave: all that a report reads
DIR/failures/<cell>.json     why a cell failed; the others go on

A cell is finished when its records exist. An interrupted one resumes from its checkpoint, and
finished evaluations are not computed again.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from mosar.data.manifest import Manifest
from mosar.errors import TrainingError, TrainingInterrupted
from mosar.evaluation.evaluate import evaluate
from mosar.experiments.jobs import (
    count_rest,
    default_threads,
    fitting_jobs,
    run_side_by_side,
)
from mosar.experiments.progress import CellReporter, Display
from mosar.experiments.record import training_record
from mosar.experiments.settings import ExperimentSettings
from mosar.experiments.work import (
    count_cells,
    duration_text,
    evaluation_work,
    guess_seconds,
    training_work,
)
from mosar.files import parse_json, replace_synced
from mosar.records import Cell, Record, TrainingRecord, environment, read_records, record_line
from mosar.training.batches import data_fingerprint
from mosar.training.checkpoints import list_steps
from mosar.training.config import NEUTRAL
from mosar.training.loop import train
from mosar.training.run_folder import CHECKPOINTS, foreign_file, has_run, locked

CELLS, RECORDS, FAILURES, ASKED = "cells", "records", "failures", "experiment.json"
# The sections of a configuration that decide what a cell's records say.
COMPARED = ("model", "attention", "data", "train")
SCHEMA_VERSION = 1


@dataclass(frozen=True)
class ExperimentResult:
    """How an experiment ended."""

    out: Path
    finished: tuple[Cell, ...]
    failed: dict[str, str]
    """Cell -> reason."""


def run_experiment(
    settings: ExperimentSettings,
    out: Path | str,
    *,
    jobs: int | None = 1,
    threads: int | None = None,
    progress: bool = True,
) -> ExperimentResult:
    """Runs what is missing of the experiment in `out`.

    jobs: cells that run side by side, each in its own process; None: as many as cores and memory
    allow. threads: torch threads of each cell; None: one, or more if there are fewer cells than
    cores. Neither the number of jobs nor an interruption changes a cell's results.

    A TrainingError says why it cannot start. After TrainingInterrupted or KeyboardInterrupt the
    same call resumes. A folder may grow: the same settings with other variants, more seeds or an
    axis add cells.
    """
    out = Path(out)
    settings.check_cells()
    threads_before = torch.get_num_threads()
    try:
        _refuse_foreign(out)
        with locked(out):
            _open(settings, out)
            return _run(settings, out, jobs, threads, progress)
    except OSError as error:
        raise TrainingError(f"{error.filename or out}: {error.strerror or error}") from None
    finally:
        torch.set_num_threads(threads_before)


def _refuse_foreign(out: Path) -> None:
    if (out / ASKED).exists():
        return
    other = foreign_file(out, (CELLS, RECORDS, FAILURES))
    if other is not None:
        what = "holds a run" if has_run(out) else f"is no experiment, and holds {other}"
        raise TrainingError(f"{out} {what}; give another --out")


def _run(
    settings: ExperimentSettings, out: Path, jobs: int | None, threads: int | None, progress: bool
) -> ExperimentResult:
    cells = settings.cells()
    finished = [cell for cell in cells if is_finished(settings, cell, out)]
    waiting = [cell for cell in cells if cell not in finished]
    jobs = min(fitting_jobs(settings, waiting) if jobs is None else jobs, max(len(waiting), 1))
    threads = default_threads(settings) if threads is None else threads
    if threads is not None:
        torch.set_num_threads(threads)
    guess = guess_seconds(settings, waiting, lambda cell: _steps_done(out, cell)) / jobs
    work = {cell.name: _work(settings, cell) for cell in cells}
    display = Display(sum(work.values()), guess, enabled=progress)
    if finished:
        display.say(f"{len(finished)} of {count_cells(len(cells))} finished already")
    if waiting:
        where = f" on {_named_data(settings.data)}" if settings.reads_text else ""
        aside = "" if jobs == 1 else f", {jobs} at a time"
        display.say(
            f"{count_cells(len(waiting))} to run{where}{aside}, {duration_text(guess)} on this "
            "machine"
        )
    display.skip(sum(work[cell.name] for cell in finished))
    labelled = [(cell, f"[{cells.index(cell) + 1}/{len(cells)}] {cell.name}") for cell in waiting]
    failed: dict[str, str] = {}

    def ended(cell: Cell, label: str, why: str) -> None:
        if not why:
            finished.append(cell)
            return
        failed[cell.name] = why
        _write_failure(out, cell, why)
        display.say(f"{label} failed: {why}")

    with display.running():
        if jobs > 1:
            run_side_by_side(
                *(run_cell, settings, labelled, out, display),
                jobs=jobs,
                threads=threads or 1,
                work=work,
                ended=ended,
            )
            labelled = []
        for cell, number in labelled:
            before, failure = display.done, ""
            try:
                run_cell(settings, cell, out, display, number)
            except TrainingInterrupted:
                raise
            # torch raises RuntimeError too, for example without memory.
            except (RuntimeError, MemoryError, ValueError) as error:
                failure = " ".join(str(error).split()) or type(error).__name__
            ended(cell, number, failure)
            count_rest(display, before + work[cell.name] - display.done, failure)
            display.show(number, now=True)
    return ExperimentResult(out, tuple(finished), failed)


def _named_data(folder: Path) -> str:
    return f"{folder} ({Manifest.read(folder).tokenizer.origin})"


def run_cell(
    settings: ExperimentSettings, cell: Cell, out: Path, display: Display, label: str
) -> None:
    """Trains and evaluates one cell, then writes its records."""
    config, run = settings.config(cell), out / CELLS / cell.name
    per_step = training_work(config) // config.train.steps
    reporter = CellReporter(display, f"{label}: training", config.train.steps, per_step)
    stopped_by = train(config, run, reporter=reporter).signal_number
    if stopped_by is not None:
        raise TrainingInterrupted("stopped after the last step of a cell", stopped_by)
    display.show(f"{label}: evaluating", now=True)
    records: list[Record] = [training_record(run, cell, data=settings.data)]
    for step in settings.evaluated_steps(config):
        records += evaluate(
            run,
            lengths=settings.lengths,
            data=settings.data if config.data.task == "text" else None,
            tokens=settings.eval_tokens,
            step=step,
            progress=False,
            cell=cell,
        )
    (out / RECORDS).mkdir(exist_ok=True)
    replace_synced(_records_path(out, cell), b"".join(map(record_line, records)))
    (out / FAILURES / f"{cell.name}.json").unlink(missing_ok=True)


def is_finished(settings: ExperimentSettings, cell: Cell, out: Path) -> bool:
    """Whether the records of a cell exist, with the same configuration."""
    path = _records_path(out, cell)
    if not path.exists():
        return False
    try:
        records = read_records(path)
    except ValueError as error:
        raise TrainingError(str(error)) from None
    trained = next((record for record in records if isinstance(record, TrainingRecord)), None)
    if trained is None or trained.cell != cell:
        raise TrainingError(f"{path} does not hold the records of {cell.name}; remove it")
    config = settings.config(cell)
    asked = replace(config, data=replace(config.data, folder=trained.config["data"]["folder"]))
    there = {section: dict(trained.config[section]) for section in COMPARED}
    # A record of an earlier version lacks settings that the geometry has got since.
    defaults = asdict(type(config.attention.own)())
    there["attention"]["own"] = defaults | there["attention"].get("own", {})
    differing = [
        f"{section}.{key} is {there[section].get(key)!r}, not {value!r}"
        for section in COMPARED
        for key, value in asked.to_dict()[section].items()
        if there[section].get(key, value) != value and f"{section}.{key}" not in NEUTRAL
    ]
    if differing:
        raise TrainingError(
            f"{out} holds {cell.name} of another configuration: {'; '.join(differing[:3])}; "
            "give another --out"
        )
    if config.data.task == "text":
        now = data_fingerprint(Manifest.read(settings.data))
        _check_data(settings, out, trained.data.get("fingerprint", now), now)
    return True


def _steps_done(out: Path, cell: Cell) -> int:
    return max(list_steps(out / CELLS / cell.name / CHECKPOINTS), default=0)


def _records_path(out: Path, cell: Cell) -> Path:
    return out / RECORDS / f"{cell.name}.jsonl"


def _work(settings: ExperimentSettings, cell: Cell) -> int:
    config = settings.config(cell)
    return training_work(config) + evaluation_work(settings, config)


def _open(settings: ExperimentSettings, out: Path) -> None:
    """Makes `out` the folder of this experiment, or checks that it is."""
    path = out / ASKED
    asked: dict[str, Any] = json.loads(json.dumps(settings.shared()))
    cells = [cell.name for cell in settings.cells()]
    fingerprint = settings.data_fingerprint()
    if path.exists():
        try:
            # An earlier version evaluated all milestones.
            there = {"milestones": None, **parse_json(path.read_bytes())}
            differing = [key for key in asked if there[key] != asked[key]]
            names = list(there["cells"])
            known = there.get("data_fingerprint")
        except (ValueError, KeyError, TypeError):
            raise TrainingError(f"{path} is not an experiment's; give another --out") from None
        if differing:
            key = differing[0]
            raise TrainingError(
                f"{out} holds an experiment with {key} {there[key]!r}, not {asked[key]!r}; give "
                "another --out"
            )
        _check_data(settings, out, known or fingerprint, fingerprint or known)
        fingerprint = fingerprint or known
        cells = names + [name for name in cells if name not in names]
    content = {
        "schema": SCHEMA_VERSION,
        **asked,
        "data": settings.data.name,
        "data_fingerprint": fingerprint,
        "cells": cells,
        "environment": environment(),
    }
    replace_synced(path, json.dumps(content, indent=1).encode() + b"\n")


def _check_data(
    settings: ExperimentSettings, out: Path, there: str | None, now: str | None
) -> None:
    if there != now:
        raise TrainingError(
            f"{out} holds an experiment on other data than {settings.data}: the contents differ; "
            "give the --data it was made with, or another --out"
        )


def _write_failure(out: Path, cell: Cell, error: str) -> None:
    folder = out / FAILURES
    folder.mkdir(exist_ok=True)
    when = datetime.now(UTC).isoformat(timespec="seconds")
    content = {"cell": cell.name, "error": error, "when": when}
    replace_synced(folder / f"{cell.name}.json", json.dumps(content).encode() + b"\n")
