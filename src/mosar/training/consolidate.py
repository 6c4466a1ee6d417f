"""A run that several processes wrote, as the run folder that one process writes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from mosar.training import checkpoints
from mosar.training.checkpoints import DamagedCheckpoint
from mosar.training.config import DistributedConfig
from mosar.training.errors import TrainingError
from mosar.training.run_folder import (
    CHECKPOINTS,
    METRICS,
    locked,
    read_config,
    read_data_fingerprint,
    truncate_metrics,
    write_config,
)


def consolidate(run: Path, out: Path, step: int | None = None) -> int:
    """Writes one checkpoint of `run`, whole, into the new run folder `out`; its step.

    By default the newest. `run` is only read; `out` goes on in one process, or on any mesh.
    """
    steps = checkpoints.list_steps(run / CHECKPOINTS)
    if not steps:
        raise TrainingError(f"{run} has no checkpoint")
    step = steps[-1] if step is None else step
    if step not in steps:
        there = ", ".join(map(str, steps))
        raise TrainingError(f"{run} has no checkpoint of step {step}; there are {there}")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise TrainingError(f"{out} is there already; give another --out")
    config = replace(read_config(run), distributed=DistributedConfig())
    try:
        checkpoint = checkpoints.read_checkpoint(run / CHECKPOINTS, step)
    except DamagedCheckpoint as error:
        raise TrainingError(f"the checkpoint of step {step} is damaged ({error})") from None
    kept = ("config_hash", "rng", "environment")
    with locked(out):
        state = {key: checkpoint.state[key] for key in kept} | {"mesh": None}
        if (run / METRICS).exists():
            checkpoints.replace_synced(out / METRICS, (run / METRICS).read_bytes())
            truncate_metrics(out / METRICS, step)
        checkpoints.write_checkpoint(
            out / CHECKPOINTS, step, checkpoint.model(), checkpoint.optimizer(), state
        )
        # Last: what has a configuration is a run.
        write_config(out, config, read_data_fingerprint(run))
    return step
