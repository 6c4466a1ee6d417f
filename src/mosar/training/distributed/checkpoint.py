"""Checkpoints of several processes: torch.distributed.checkpoint with safetensors as storage.

Each process writes its parts, each part once; the first process adds state.json with all checksums
and renames the folder, as for one process. What is read may come from any mesh, or from one
process. No file is a pickle: where the parts lie is in the headers of the files.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from mosar.errors import TrainingError
from mosar.files import file_checksum, sync
from mosar.training.checkpoints import (
    Checkpoint,
    Names,
    Optimizers,
    begin_checkpoint,
    checkpoint_path,
    finish_checkpoint,
    optimizer_tensors,
    unfinished_path,
)
from mosar.training.distributed.shards import OPTIMIZER_STATE, PARAMETERS, shard_prefix

if TYPE_CHECKING:
    from mosar.training.distributed.process_team import ProcessTeam


def write_checkpoint(
    team: ProcessTeam,
    names: Names,
    optimizers: Optimizers,
    folder: Path,
    step: int,
    state: dict[str, Any],
) -> Path:
    """Writes a checkpoint together; if one process fails, all raise and no partial file stays."""
    beside = unfinished_path(folder, step)
    try:
        team.from_first(lambda: begin_checkpoint(folder, step))
        with team.together():
            if not beside.is_dir():
                raise TrainingError(
                    f"{folder} is not the same folder for every process: --out must lie on a disk "
                    "that all of them share"
                )
        _save(names, optimizers, beside)
        checksums: dict[str, str] = {}
        with team.together():
            for path in sorted(beside.glob(f"{shard_prefix(team.rank)}*")):
                checksums[path.name] = file_checksum(path)
            sync(beside)
        everything = {name: s for part in team.gather(checksums) for name, s in part.items()}
        team.from_first(lambda: finish_checkpoint(folder, step, everything, state))
    finally:
        if team.is_first:
            shutil.rmtree(beside, ignore_errors=True)
    return checkpoint_path(folder, step)


def read_checkpoint(names: Names, optimizers: Optimizers, checkpoint: Checkpoint) -> None:
    """Restores parameters and optimizer; each process reads its own part."""
    (optimizer,) = optimizers
    reader = HuggingFaceStorageReader(str(checkpoint.path))
    saved = reader.read_metadata().state_dict_metadata
    by_name = {name: parameter for parameter, name in names.items()}
    if not by_name.keys() <= saved.keys():
        raise TrainingError(f"{checkpoint.path} has other parameters than the model")
    tensors: dict[str, Tensor] = {name: p.detach() for name, p in by_name.items()}
    for key in sorted(saved.keys() - by_name.keys()):
        entry, _, name = key.partition(".")
        parameter = by_name.get(name)
        if parameter is None:
            raise TrainingError(f"{checkpoint.path} has other parameters than the model")
        if saved[key].size == parameter.shape:  # pyright: ignore[reportAttributeAccessIssue]
            value = torch.zeros_like(parameter.detach())
        else:
            # The step count; a fused optimizer keeps it on the parameter's device.
            value = torch.zeros(saved[key].size, device=parameter.device)  # pyright: ignore[reportAttributeAccessIssue]
        optimizer.state[parameter][entry] = tensors[key] = value
    load(tensors, storage_reader=reader)


def _save(names: Names, optimizers: Optimizers, folder: Path) -> None:
    parameters = {name: parameter.detach() for parameter, name in names.items()}
    # Sorted: the order decides which process writes a tensor that several hold.
    state = dict(sorted(optimizer_tensors(optimizers, names).items()))
    tensors = parameters | state
    files = {key: PARAMETERS if key in parameters else OPTIMIZER_STATE for key in tensors}
    writer = HuggingFaceStorageWriter(
        str(folder), fqn_to_index_mapping=files, save_distributed=True
    )
    try:
        save(tensors, storage_writer=writer)
    except CheckpointException as error:
        # All processes raise it, with the reason of each one that failed.
        cause = next(iter(error.failures.values()))[0]
        if isinstance(cause, OSError):
            raise OSError(cause.errno, cause.strerror, cause.filename or str(folder)) from None
        raise TrainingError(f"{folder} could not be written: {cause}") from None
