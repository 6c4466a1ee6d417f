"""Turns the run folder of several processes into that of one process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from mosar.errors import DamagedFile, TrainingError
from mosar.files import replace_synced, staged_folder
from mosar.training import checkpoints
from mosar.training.config import DistributedConfig
from mosar.training.run_folder import (
    CHECKPOINTS,
    METRICS,
    read_config,
    read_data_fingerprint,
    read_metrics,
    truncate_metrics,
    write_config,
)


def consolidate(run: Path, out: Path, step: int | None = None) -> int:
    """Writes one checkpoint of `run` into the new run folder `out`; returns its step.

    By default the newest. `run` is only read; `out` can be resumed in one process or on any mesh.
    """
    steps = checkpoints.list_steps(run / CHECKPOINTS)
    if not steps:
        raise TrainingError(f"{run} has no checkpoint")
    step = steps[-1] if step is None else step
    if step not in steps:
        there = ", ".join(map(str, steps))
        raise TrainingError(f"{run} has no checkpoint of step {step}; there are {there}")
    with staged_folder(out, _refuse) as folder:
        config = replace(read_config(run), distributed=DistributedConfig())
        try:
            checkpoint = checkpoints.read_checkpoint(run / CHECKPOINTS, step)
        except DamagedFile as error:
            raise TrainingError(f"the checkpoint of step {step} is damaged ({error})") from None
        kept = ("config_hash", "rng", "environment")
        state = {key: checkpoint.state[key] for key in kept} | {"mesh": None}
        if (run / METRICS).exists():
            # Check all of it here; the copy is truncated to the checkpoint.
            read_metrics(run)
            replace_synced(folder / METRICS, (run / METRICS).read_bytes())
            state["metrics"] = truncate_metrics(folder / METRICS, step)
        checkpoints.write_checkpoint(
            folder / CHECKPOINTS, step, checkpoint.model(), checkpoint.optimizer(), state
        )
        write_config(folder, config, read_data_fingerprint(run))
    return step


def _refuse(out: Path) -> None:
    raise TrainingError(f"{out} already exists; give another --out")
