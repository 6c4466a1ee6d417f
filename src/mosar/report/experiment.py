"""An experiment folder as its records: all that a report is made of.

DIR/records/**/*.jsonl   what the cells gave (or DIR/*.jsonl, where there is no such folder)
DIR/benchmarks/*.jsonl   optional
DIR/failures/*.json      cells that failed
DIR/experiment.json      what was asked for
DIR/looks/<cell>.html    optional: pages of the microscope, which a report links

Or a run folder of mosar train: DIR/evaluations/*.json, what mosar evaluate found.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mosar.errors import ReportError
from mosar.files import parse_json
from mosar.records import (
    AttentionBenchmark,
    Cell,
    DecodeBenchmark,
    EvaluationRecord,
    Record,
    RetrievalRecord,
    TrainingBenchmark,
    TrainingRecord,
    read_records,
)
from mosar.report.checks import check_record
from mosar.schema import decode

LOOKS = "looks"


@dataclass(frozen=True, kw_only=True)
class Failure:
    """A cell that failed."""

    cell: str
    error: str
    when: str


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """The records of an experiment, the last of each kind where one was made twice."""

    folder: Path
    asked: dict[str, Any]
    """experiment.json; empty where there is none."""
    trainings: dict[str, TrainingRecord]
    """By the name of the cell; with the task, where the same cell also learnt text."""
    evaluations: tuple[EvaluationRecord, ...]
    """One for each cell, length and routing: of the latest step."""
    milestones: tuple[EvaluationRecord, ...]
    """The same of every step that was evaluated."""
    retrievals: tuple[RetrievalRecord, ...]
    retrieval_milestones: tuple[RetrievalRecord, ...]
    benchmarks: tuple[AttentionBenchmark, ...]
    decode_benchmarks: tuple[DecodeBenchmark, ...]
    training_benchmarks: tuple[TrainingBenchmark, ...]
    failures: tuple[Failure, ...]
    looks: dict[str, Path]
    """By the name of the cell: a page of the microscope."""

    @property
    def name(self) -> str:
        return self.folder.absolute().name

    @property
    def records(self) -> tuple[Record, ...]:
        return (
            *self.trainings.values(),
            *self.evaluations,
            *self.retrievals,
            *self.benchmarks,
            *self.decode_benchmarks,
            *self.training_benchmarks,
        )

    @property
    def unfinished(self) -> list[str]:
        """Cells that were asked for and have neither a record nor failed."""
        asked, preset = self.asked.get("cells"), self.asked.get("preset")
        known = {failure.cell for failure in self.failures}
        for record in (*self.trainings.values(), *self.evaluations, *self.retrievals):
            # Records of another experiment may lie here, for cells with the same names.
            if preset in (None, record.cell.preset):
                known.add(record.cell.name)
        return [str(name) for name in asked if name not in known] if isinstance(asked, list) else []

    @property
    def cells(self) -> tuple[Cell, ...]:
        """Cells with a record, in the order of their names."""
        found = [*self.trainings.values(), *self.evaluations, *self.retrievals]
        by_name = {record.cell.name: record.cell for record in found}
        return tuple(by_name[name] for name in sorted(by_name))


def load_experiment(folder: Path | str) -> Experiment:
    """Reads a folder; a ReportError names what is missing, or the file and line that is damaged."""
    folder = Path(folder)
    if not folder.is_dir():
        raise ReportError(f"there is no folder {folder}")
    try:
        records = list(_read_all(_record_files(folder)))
        failures = tuple(_read_failures(folder))
        asked = _read_object(folder / "experiment.json")
    except OSError as error:
        raise ReportError(f"cannot read {error.filename}: {error.strerror}") from None
    if not records:
        raise ReportError(_nothing_there(folder, failures))
    return Experiment(
        folder=folder,
        asked=asked,
        trainings=_by_cell([record for record in records if isinstance(record, TrainingRecord)]),
        evaluations=_latest(
            (record for record in records if isinstance(record, EvaluationRecord)),
            lambda record: (record.cell.name, record.length, record.routing),
        ),
        milestones=_latest(
            (record for record in records if isinstance(record, EvaluationRecord)),
            lambda record: (record.cell.name, record.length, record.routing, record.step),
        ),
        retrievals=_latest(
            (record for record in records if isinstance(record, RetrievalRecord)),
            lambda record: (record.cell.name, record.task, record.length, record.routing),
        ),
        retrieval_milestones=_latest(
            (record for record in records if isinstance(record, RetrievalRecord)),
            lambda r: (r.cell.name, r.task, r.length, r.routing, r.step),
        ),
        benchmarks=tuple(r for r in records if isinstance(r, AttentionBenchmark)),
        decode_benchmarks=tuple(r for r in records if isinstance(r, DecodeBenchmark)),
        training_benchmarks=tuple(r for r in records if isinstance(r, TrainingBenchmark)),
        failures=failures,
        looks={path.stem: path for path in sorted((folder / LOOKS).glob("*.html"))},
    )


def run_folder(folder: Path, cell: Cell) -> Path:
    """Where the checkpoints of a cell are, if they are still there."""
    return folder if _is_run(folder) else folder / "cells" / cell.name


def look_path(folder: Path, cell: Cell) -> Path:
    """Where an experiment keeps the page of the microscope for a cell."""
    return folder / LOOKS / f"{cell.name}.html"


def _record_files(folder: Path) -> list[Path]:
    inside = folder / "records"
    if inside.is_dir():
        found = inside.rglob("*.jsonl")
    elif _is_run(folder):
        # Its metrics.jsonl does not hold records.
        found = (folder / "evaluations").glob("*.json")
    else:
        found = folder.glob("*.jsonl")
    return [
        *sorted(found),
        *sorted((folder / "benchmarks").glob("*.jsonl")),
    ]


def _is_run(folder: Path) -> bool:
    """Whether it is a folder of `mosar train`."""
    return (folder / "checkpoints").is_dir()


def _read_all(paths: Iterable[Path]) -> Iterable[Record]:
    for path in paths:
        try:
            records = read_records(path)
        except ValueError as error:
            raise ReportError(str(error)) from None
        for line, record in enumerate(records, start=1):
            try:
                check_record(record)
            except ValueError as error:
                raise ReportError(f"{path}, line {line}: {error}") from None
            yield record


def _read_failures(folder: Path) -> Iterable[Failure]:
    for path in sorted((folder / "failures").glob("*.json")):
        values = _read_object(path)
        cell = values.get("cell", path.stem)
        if isinstance(cell, dict):
            try:
                cell = decode(Cell, cell, "cell", loose=True).name
            except (ValueError, TypeError, AttributeError):
                cell = path.stem
        error = " ".join(str(values.get("error", "unknown")).split())
        yield Failure(cell=str(cell), error=error, when=str(values.get("when", "")))


def _read_object(path: Path) -> dict[str, Any]:
    try:
        values = parse_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise ReportError(f"{path} is damaged: {error}") from None
    if not isinstance(values, dict):
        raise ReportError(f"{path} must hold a JSON object, got {type(values).__name__}")
    return values


def _latest(records: Iterable[Any], key: Any) -> tuple[Any, ...]:
    """One record per key: that of the latest step, or the last in the file."""
    kept: dict[Any, Any] = {}
    for record in records:
        known = kept.get(key(record))
        if known is None or record.step >= known.step:
            kept[key(record)] = record
    return tuple(kept[name] for name in sorted(kept))


def _by_cell(records: list[TrainingRecord]) -> dict[str, TrainingRecord]:
    """By name. Where a cell learnt text and a task, the task's run has it in its name."""
    found: dict[str, TrainingRecord] = {}
    for record in sorted(records, key=lambda r: (r.cell.name, task_of(r) != "text")):
        name, task = record.cell.name, task_of(record)
        if name in found and task_of(found[name]) != task:
            name = f"{name} ({task})"
        found[name] = record
    return found


def task_of(record: TrainingRecord) -> str:
    """What it learnt: "text", or a task of retrieval."""
    data = record.config.get("data")
    return str(data.get("task", "text")) if isinstance(data, dict) else "text"


def _nothing_there(folder: Path, failures: tuple[Failure, ...]) -> str:
    if failures:
        first = failures[0]
        return (
            f"no records in {folder}: all its cells failed, {first.cell} with: {first.error} "
            f"(mosar reproduce --out {folder} tries again)"
        )
    if _is_run(folder):
        return (
            f"no records in {folder}: it is a run that was not evaluated; "
            f"do that with: mosar evaluate {folder}"
        )
    return (
        f"no records in {folder}: there is no records/*.jsonl; "
        f"make them with: mosar reproduce --out {folder}"
    )
