"""The run folder: its lock, its configuration, its metrics, its checkpoints.

RUN/config.json     the resolved configuration, complete, with versions and the data's fingerprint
RUN/metrics.jsonl   one object a line, by step
RUN/checkpoints/    see checkpoints.py
RUN/.lock           held by the process that trains; the system releases it when that dies
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mosar.records import environment
from mosar.training.checkpoints import replace_synced
from mosar.training.config import NEUTRAL, ROUNDING, RunConfig
from mosar.training.errors import TrainingError

CONFIG, METRICS, CHECKPOINTS, LOCK = "config.json", "metrics.jsonl", "checkpoints", ".lock"
SCHEMA_VERSION = 1
_BATCH = {"train.micro_batch", "train.accumulation"}


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Holds the run folder, made if need be; a TrainingError where another process does."""
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(descriptor, 100).decode(errors="replace").strip() or "unknown"
            raise TrainingError(
                f"another process trains into {folder} (process {holder}); wait for it or stop it"
            ) from None
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(descriptor)


def read_config(folder: Path) -> RunConfig:
    """The configuration of a run; a TrainingError where it cannot be read."""
    return _read(folder)[0]


def read_data_fingerprint(folder: Path) -> str:
    """The fingerprint of the data that a run was made with."""
    return _read(folder)[1]


def has_run(folder: Path) -> bool:
    return (folder / CONFIG).exists()


def foreign_file(folder: Path, own: Iterable[str] = ()) -> str | None:
    """A file or folder, not hidden, that lies in `folder` and is none of its `own`."""
    names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    return next((n for n in names if not n.startswith(".") and n not in set(own)), None)


def _read(folder: Path) -> tuple[RunConfig, str]:
    """The configuration and the fingerprint of the data."""
    path = folder / CONFIG
    try:
        saved = json.loads(path.read_bytes())
        if saved.get("schema") != SCHEMA_VERSION:
            raise ValueError(f"its schema is {saved.get('schema')!r}, not {SCHEMA_VERSION}")
        head = ("schema", "environment", "data_fingerprint")
        values = {key: value for key, value in saved.items() if key not in head}
        return RunConfig.from_dict(values), saved["data_fingerprint"]
    except OSError as error:
        raise TrainingError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise TrainingError(f"{path} is not a run's configuration: {error}") from None


def write_config(folder: Path, config: RunConfig, data_fingerprint: str) -> None:
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
    """A TrainingError that names the keys in which the run in `folder` is another one."""
    saved, saved_fingerprint = _read(folder)
    old, new = saved.flat(), config.flat()
    differing = {key for key in new if old.get(key) != new[key]}
    # Another task is said below, as a key that differs.
    if data_fingerprint != saved_fingerprint and config.data.task == saved.data.task:
        if config.data.task != "text":
            raise TrainingError(
                f"{folder} learnt {config.data.task} from windows that this version does not make "
                "any more; give another --out"
            )
        raise TrainingError(
            f"{folder} was trained on other data than {config.data.folder} holds now; give the "
            "data it was made with, or another --out"
        )
    refused = differing - NEUTRAL - ROUNDING - {"train.steps"}
    if config.train.windows_per_step != saved.train.windows_per_step:
        refused |= differing & _BATCH
    if refused:
        listed = ", ".join(f"{key} is {old[key]!r}, not {new[key]!r}" for key in sorted(refused))
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


def truncate_metrics(path: Path, step: int) -> None:
    """Keeps the whole lines up to `step`: what comes later will be written again."""
    if not path.exists():
        return
    data = path.read_bytes()
    kept = b"".join(line for line in data.splitlines(keepends=True) if _is_kept(line, step))
    if kept != data:
        replace_synced(path, kept)


def _is_kept(line: bytes, step: int) -> bool:
    if not line.endswith(b"\n"):
        return False
    try:
        return json.loads(line)["step"] <= step
    except (ValueError, KeyError, TypeError):
        return False


def read_metrics(folder: Path, split: str | None = None) -> list[dict[str, Any]]:
    """The lines of a run's metrics, of one split or all; an unfinished last line is left out."""
    lines = (folder / METRICS).read_bytes().split(b"\n")[:-1]
    values = [json.loads(line) for line in lines]
    return [line for line in values if split is None or line["split"] == split]


class MetricsFile:
    """Appends lines to the metrics; whole ones, and on the disk once `sync` returns."""

    def __init__(self, path: Path):
        self.path = path
        self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def append(self, values: Mapping[str, Any]) -> None:
        line = json.dumps(values, allow_nan=False).encode() + b"\n"
        try:
            written = os.write(self._descriptor, line)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path)) from None
        if written != len(line):
            raise OSError(f"{self.path} took only a part of a line; is the disk full?")

    def sync(self) -> None:
        os.fsync(self._descriptor)

    def close(self) -> None:
        os.close(self._descriptor)
