"""The run folder: its lock, its configuration, its metrics, its checkpoints.

RUN/config.json     the resolved configuration, complete, with versions and the data's fingerprint
RUN/metrics.jsonl   one object per line, by step; each checksum covers the lines before it too
RUN/checkpoints/    see checkpoints.py
RUN/.lock           locked by the process that trains, until it ends
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Self, TypeVar

from mosar.errors import TrainingError
from mosar.files import (
    CHECKSUM,
    LINE_DIGITS,
    checksum,
    make_folder,
    parse_json,
    replace_synced,
    sealed,
    take_lock,
    unsealed,
)
from mosar.records import environment
from mosar.training import checkpoints
from mosar.training.config import NEUTRAL, ROUNDING, RunConfig

CONFIG, METRICS, CHECKPOINTS, LOCK = "config.json", "metrics.jsonl", "checkpoints", ".lock"
SCHEMA_VERSION = 1
_AFTER = "after"
_BATCH = {"train.micro_batch", "train.accumulation"}
_WITHOUT = "restore the file, or remove it to continue without its lines"


class SavedConfig(Protocol):
    """A configuration that a run folder keeps."""

    def to_dict(self) -> dict[str, Any]: ...
    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self: ...
    def fingerprint(self) -> str: ...


Config = TypeVar("Config", bound=SavedConfig)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Makes and locks the run folder; a TrainingError if another process has locked it."""
    make_folder(folder)
    descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        if not take_lock(descriptor):
            holder = os.read(descriptor, 100).decode(errors="replace").strip() or "unknown"
            raise TrainingError(
                f"another process trains into {folder} (process {holder}); wait for it or stop it"
            )
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(descriptor)


def read_config(folder: Path) -> RunConfig:
    """The configuration of a run; a TrainingError if it cannot be read."""
    return read_saved(folder, RunConfig)[0]


def read_data_fingerprint(folder: Path) -> str:
    """The fingerprint of the data that a run was trained on."""
    return read_saved(folder, RunConfig)[1]


def has_run(folder: Path) -> bool:
    return (folder / CONFIG).exists()


def has_made_a_step(folder: Path) -> bool:
    """Whether the run in `folder` has made a step, so that no other run may take its folder."""
    metrics = folder / METRICS
    # The first line is the evaluation before the first step.
    recorded = metrics.exists() and metrics.read_bytes().count(b"\n") > 1
    return recorded or bool(checkpoints.list_steps(folder / CHECKPOINTS))


def foreign_file(folder: Path, own: Iterable[str] = ()) -> str | None:
    """A file in `folder` that is neither hidden nor one of its `own`, or None."""
    names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    return next((n for n in names if not n.startswith(".") and n not in set(own)), None)


def read_saved(folder: Path, kind: type[Config]) -> tuple[Config, str]:
    """The configuration, which must be of type `kind`, and the fingerprint of the data."""
    path = folder / CONFIG
    try:
        saved = parse_json(path.read_bytes())
        if saved.get("schema") != SCHEMA_VERSION:
            raise ValueError(f"its schema is {saved.get('schema')!r}, not {SCHEMA_VERSION}")
        head = ("schema", "environment", "data_fingerprint")
        values = {key: value for key, value in saved.items() if key not in head}
        return kind.from_dict(values), saved["data_fingerprint"]
    except OSError as error:
        raise TrainingError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise TrainingError(f"{path} is not a run's configuration: {error}") from None


def write_config(folder: Path, config: SavedConfig, data_fingerprint: str) -> None:
    saved = {
        "schema": SCHEMA_VERSION,
        **config.to_dict(),
        "data_fingerprint": data_fingerprint,
        "environment": environment(),
    }
    replace_synced(folder / CONFIG, json.dumps(saved, indent=1).encode() + b"\n")


def check_same_run(
    folder: Path, config: RunConfig, data_fingerprint: str, report: Callable[[str], None]
) -> None:
    """A TrainingError that names the keys in which the run in `folder` differs."""
    saved, saved_fingerprint = read_saved(folder, RunConfig)
    old, new = saved.flat(), config.flat()
    differing = {key for key in new if old.get(key) != new[key]}
    # A different task is reported below, as a key that differs.
    if data_fingerprint != saved_fingerprint and config.data.task == saved.data.task:
        if config.data.task != "text":
            raise TrainingError(
                f"{folder} learnt {config.data.task} from windows that this version no longer "
                "makes; give another --out"
            )
        raise TrainingError(
            f"{folder} was trained on other data than {config.data.folder} holds now; give the "
            "data it was made with, or another --out"
        )
    refused = differing - NEUTRAL - ROUNDING - {"train.steps"}
    if config.train.windows_per_step != saved.train.windows_per_step:
        refused |= differing & _BATCH
    if refused:
        listed = ", ".join(
            f"{key} is {old.get(key)!r}, not {new[key]!r}" for key in sorted(refused)
        )
        advice = "drop the change, or give another --out"
        if refused == {"train.decay_steps"} and "train.steps" in differing:
            advice = (
                "the schedule ends with the steps; to train on at the minimum rate add --set "
                f"train.decay_steps={saved.train.decay_steps}, or give another --out"
            )
        raise TrainingError(f"{folder} holds a run of another configuration: {listed}; {advice}")
    rounding = sorted(differing & ROUNDING)
    if rounding:
        report(f"{', '.join(rounding)} changed: sums are taken in another order from here on")


class _Line(NamedTuple):
    """A line of the metrics."""

    data: bytes
    values: dict[str, Any]
    before: str
    """The link of the line before it; for the first line that of lost lines, or ""."""
    link: str
    """Its checksum, which depends on all lines up to it."""


def _read_lines(path: Path) -> Iterator[_Line]:
    """The complete lines; a TrainingError names the first one that was altered."""
    before, expected = "", False
    for number, data in enumerate(path.read_bytes().split(b"\n")[:-1], start=1):
        try:
            content = parse_json(data)
            if number == 1 and isinstance(content, dict):
                before = str(content.get(_AFTER, ""))
            values, found = unsealed(content, before)
            if not {"step", "split"} <= values.keys():
                raise ValueError("it has no step or no split")
            if expected and not found:
                raise ValueError("its checksum is missing")
        except ValueError as error:
            raise TrainingError(
                f"{path}, line {number} or one before it was changed: {error}; {_WITHOUT}"
            ) from None
        # Earlier versions wrote no checksums; later lines cover theirs.
        expected, link = found, checksum(values, before)[:LINE_DIGITS]
        values.pop(_AFTER, None)
        yield _Line(data, values, before, link)
        before = link


def truncate_metrics(
    path: Path, step: int, report: Callable[[str], None] = lambda message: None
) -> str:
    """Drops incomplete lines and lines after `step`; returns the link of the rest.

    A TrainingError if the lines do not match the checkpoint of `step`. `report` gets a message if
    there is no file.
    """
    link = _promised_link(path.parent / CHECKPOINTS, step)
    if not path.exists():
        if link:
            report(f"{path} is missing; continuing without the lines up to step {step}")
        return link or ""
    kept: list[_Line] = []
    last = ""
    for line in _read_lines(path) if step >= 0 else ():
        if line.before == link or line.values["step"] > step:
            last = line.before
            break
        kept.append(line)
        last = line.link
        if last == link:
            # The checkpoint says nothing about what follows, which may not even be lines.
            break
    if link not in (None, last):
        raise TrainingError(f"{path} lacks lines up to step {step}; {_WITHOUT}")
    data = b"".join(line.data + b"\n" for line in kept)
    if data != path.read_bytes():
        replace_synced(path, data)
    return last


def read_metrics(folder: Path, split: str | None = None) -> list[dict[str, Any]]:
    """The lines of a run's metrics, of one split or all, without an incomplete last line.

    A TrainingError if they were altered or do not match the newest checkpoint.
    """
    # Read the checkpoint first: a process that trains writes the lines before the checkpoint.
    steps = checkpoints.list_steps(folder / CHECKPOINTS)
    link = _promised_link(folder / CHECKPOINTS, steps[-1]) if steps else None
    lines = list(_read_lines(folder / METRICS))
    if link and not any(link in (line.before, line.link) for line in lines):
        raise TrainingError(
            f"{folder / METRICS} lacks lines up to the newest checkpoint; {_WITHOUT}"
        )
    return [line.values for line in lines if split is None or line.values["split"] == split]


def _promised_link(folder: Path, step: int) -> str | None:
    """The link of the last line before a checkpoint; None if the checkpoint has none."""
    try:
        return checkpoints.open_checkpoint(folder, step).state.get("metrics")
    except (OSError, ValueError, AttributeError):
        # There is no such checkpoint, or it is damaged, which is reported elsewhere.
        return None


class MetricsFile:
    """Appends complete lines to the metrics; `sync` flushes them to the disk."""

    def __init__(self, path: Path, link: str = ""):
        """`link`: as `truncate_metrics` returned it."""
        self.path, self.link = path, link
        self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        self._is_empty = os.fstat(self._descriptor).st_size == 0

    def append(self, values: Mapping[str, Any]) -> None:
        # Earlier lines were lost: the first line names the link of the last of them.
        lost = {_AFTER: self.link} if self._is_empty and self.link else {}
        content = sealed({**values, **lost}, self.link, LINE_DIGITS)
        line = json.dumps(content).encode() + b"\n"
        try:
            written = os.write(self._descriptor, line)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path)) from None
        if written != len(line):
            raise OSError(f"{self.path} took only a part of a line; is the disk full?")
        self.link, self._is_empty = content[CHECKSUM], False

    def sync(self) -> None:
        os.fsync(self._descriptor)

    def close(self) -> None:
        os.close(self._descriptor)
