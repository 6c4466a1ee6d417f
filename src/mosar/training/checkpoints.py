"""Checkpoints that are either complete or absent: safetensors, JSON, checksums, atomic renames.

    checkpoints/step-00000100/model.safetensors       parameters by name
    checkpoints/step-00000100/optimizer.safetensors   AdamW's state, "exp_avg.<parameter>" and so on
    checkpoints/step-00000100/state.json              written last: step, RNG state, checksums

Several processes write parts of the two tensor files instead, see shards.py; reading joins them.
Everything is written into another folder, flushed to the disk, and renamed. A checkpoint folder is
therefore complete, and checksums reveal later damage. Nothing is ever unpickled.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from mosar.errors import DamagedFile, TrainingError
from mosar.files import (
    checksum,
    file_checksum,
    parse_json,
    rust_os_errors,
    sealed,
    sync,
    unsealed,
    write_synced,
)
from mosar.training.distributed.shards import OPTIMIZER_STATE, PARAMETERS, assemble, shards_of

SCHEMA_VERSION = 1
MODEL, OPTIMIZER, STATE = "model.safetensors", "optimizer.safetensors", "state.json"
Names = Mapping[Tensor, str]
"""The name of each parameter."""
Optimizers = Sequence[torch.optim.Optimizer]
_NAME = re.compile(r"step-(\d{8,})")
_UNFINISHED = ".unfinished-"


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose files have been checked."""

    path: Path
    step: int
    state: dict[str, Any]

    def model(self) -> dict[str, Tensor]:
        return self._tensors(MODEL, PARAMETERS)

    def optimizer(self) -> dict[str, Tensor]:
        return self._tensors(OPTIMIZER, OPTIMIZER_STATE)

    @property
    def model_checksum(self) -> str:
        """sha256 of the parameters, or of the checksums of their parts."""
        checksums = self.state["checksums"]
        if MODEL in checksums:
            return checksums[MODEL]
        return checksum({name: checksums[name] for name in shards_of(checksums, PARAMETERS)})

    def _tensors(self, whole: str, kind: int) -> dict[str, Tensor]:
        checksums = self.state["checksums"]
        if whole in checksums:
            return load_file(self.path / whole)
        try:
            return assemble(self.path / name for name in shards_of(checksums, kind))
        except ValueError as error:
            raise TrainingError(f"{self.path} is not complete: {error}") from None


def checkpoint_path(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}"


def list_steps(folder: Path) -> list[int]:
    """The steps of the checkpoints, complete or damaged, in order."""
    if not folder.is_dir():
        return []
    found = (_NAME.fullmatch(path.name) for path in folder.iterdir())
    return sorted(int(match[1]) for match in found if match)


def write_checkpoint(
    folder: Path,
    step: int,
    model: Mapping[str, Tensor],
    optimizer: Mapping[str, Tensor],
    state: Mapping[str, Any],
) -> Path:
    """Writes a checkpoint; after an OSError the old one is still there, and no partial one."""
    beside = unfinished_path(folder, step)
    try:
        begin_checkpoint(folder, step)
        checksums = {}
        for name, tensors in ((MODEL, model), (OPTIMIZER, optimizer)):
            _write_tensors(beside / name, tensors)
            checksums[name] = file_checksum(beside / name)
        return finish_checkpoint(folder, step, checksums, state)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def unfinished_path(folder: Path, step: int) -> Path:
    """The folder of a checkpoint's files until all of them are written."""
    return folder / f"{_UNFINISHED}{checkpoint_path(folder, step).name}"


def begin_checkpoint(folder: Path, step: int) -> None:
    """Makes an empty folder for the files."""
    beside = unfinished_path(folder, step)
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)


def finish_checkpoint(
    folder: Path, step: int, checksums: Mapping[str, str], state: Mapping[str, Any]
) -> Path:
    """Turns the complete set of files into a checkpoint."""
    beside, final = unfinished_path(folder, step), checkpoint_path(folder, step)
    content = {"schema": SCHEMA_VERSION, "step": step, "checksums": dict(checksums), **state}
    write_synced(beside / STATE, json.dumps(sealed(content), indent=1).encode() + b"\n")
    sync(beside)
    set_aside(final)
    os.rename(beside, final)
    sync(folder)
    return final


def read_checkpoint(folder: Path, step: int) -> Checkpoint:
    """The checkpoint of a step, with all files checked; DamagedFile says what is wrong."""
    path = checkpoint_path(folder, step)
    try:
        try:
            state, is_sealed = unsealed(parse_json((path / STATE).read_bytes()))
        except ValueError as error:
            raise DamagedFile(f"{STATE}: {error}") from None
        if not is_sealed:
            raise DamagedFile(f"{STATE} has no checksum")
        if state["schema"] != SCHEMA_VERSION:
            raise DamagedFile(f"its schema is {state['schema']!r}, not {SCHEMA_VERSION}")
        if state["step"] != step:
            raise DamagedFile(f"it is the checkpoint of step {state['step']}")
        checksums = state["checksums"]
        if not {MODEL, OPTIMIZER} <= checksums.keys() and not shards_of(checksums, PARAMETERS):
            raise DamagedFile(f"{STATE} names no parameters")
        for name in checksums:
            if file_checksum(path / name) != checksums[name]:
                raise DamagedFile(f"{name} was truncated or altered")
    except FileNotFoundError as error:
        missing = Path(error.filename or path).name
        raise DamagedFile(f"{missing} is missing") from None
    except (KeyError, TypeError, AttributeError):
        raise DamagedFile(f"{STATE} was changed after it was written") from None
    return Checkpoint(path, step, state)


def open_checkpoint(folder: Path, step: int) -> Checkpoint:
    """A checkpoint that this process or another has just checked."""
    path = checkpoint_path(folder, step)
    return Checkpoint(path, step, parse_json((path / STATE).read_bytes()))


def newest_checkpoint(folder: Path, report: Callable[[str], None]) -> Checkpoint | None:
    """The newest undamaged checkpoint; newer, damaged ones are reported and renamed.

    None if there is no checkpoint; DamagedFile if all of them are damaged.
    """
    steps = list_steps(folder)
    problems = []
    for step in reversed(steps):
        try:
            checkpoint = read_checkpoint(folder, step)
        except DamagedFile as error:
            problems.append((step, str(error)))
            continue
        for bad, problem in problems:
            aside = set_aside(checkpoint_path(folder, bad))
            report(f"checkpoint {bad} is damaged ({problem}); set aside as {aside}, using {step}")
        return checkpoint
    if problems:
        listed = "; ".join(f"step {step}: {problem}" for step, problem in problems)
        raise DamagedFile(f"no checkpoint in {folder} is complete ({listed})")
    return None


def set_aside(path: Path) -> Path | None:
    """Renames a checkpoint so that it is no longer used; None if there was none."""
    if not path.exists():
        return None
    number = 1
    while (aside := path.with_name(f"damaged-{path.name}-{number}")).exists():
        number += 1
    os.rename(path, aside)
    return aside


def prune_checkpoints(folder: Path, keep_last: int, keep_every: int) -> None:
    """Removes all but the newest `keep_last` and those at multiples of `keep_every`."""
    for step in list_steps(folder)[:-keep_last]:
        if not keep_every or step % keep_every:
            # Rename it first, so that an interrupted removal does not look like damage.
            doomed = folder / f"{_UNFINISHED}removal-{step}"
            os.rename(checkpoint_path(folder, step), doomed)
            shutil.rmtree(doomed, ignore_errors=True)


def remove_unfinished(folder: Path) -> None:
    """Removes what a killed process left. The caller must hold the run's lock."""
    for path in folder.glob(f"{_UNFINISHED}*"):
        shutil.rmtree(path, ignore_errors=True)


def _write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    with rust_os_errors(path):
        save_file(plain, path)
    sync(path)


def load_parameters(names: Names, checkpoint: Checkpoint) -> None:
    """Copies the parameters of a checkpoint into those with the same names."""
    saved = checkpoint.model()
    if saved.keys() != set(names.values()):
        raise TrainingError(f"{checkpoint.path} has other parameters than the model")
    with torch.no_grad():
        for parameter, name in names.items():
            parameter.copy_(saved[name])


def optimizer_tensors(optimizers: Optimizers, names: Names) -> dict[str, Tensor]:
    """The state of optimizers by the names of their parameters: "<entry>.<parameter>"."""
    return {
        f"{entry}.{names[parameter]}": value
        for optimizer in optimizers
        for parameter, entries in optimizer.state.items()
        for entry, value in entries.items()
    }


def restore_optimizers(optimizers: Optimizers, names: Names, saved: Mapping[str, Tensor]) -> None:
    """Restores what `optimizer_tensors` returned."""
    owners = {
        names[parameter]: (optimizer, parameter, group.get("fused"))
        for optimizer in optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    for key, value in saved.items():
        entry, _, name = key.partition(".")
        optimizer, parameter, fused = owners[name]
        # A fused optimizer keeps its step count on the parameter's device, others on the CPU.
        on_device = value.dim() > 0 or fused
        # Copy it: the loaded tensor may be a view into a file.
        fresh = torch.empty_like(value, device=parameter.device if on_device else "cpu")
        optimizer.state[parameter][entry] = fresh.copy_(value)
