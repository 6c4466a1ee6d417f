"""A run that several processes wrote, as the run folder that one process writes."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from mosar.errors import TrainingError
from mosar.files import make_folder, replace_synced
from mosar.training import checkpoints
from mosar.training.checkpoints import DamagedCheckpoint
from mosar.training.config import DistributedConfig
from mosar.training.run_folder import (
    CHECKPOINTS,
    METRICS,
    locked,
    read_config,
    read_data_fingerprint,
    read_metrics,
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
    state = {key: checkpoint.state[key] for key in kept} | {"mesh": None}
    with _made_beside(out) as folder:
        if (run / METRICS).exists():
            # Checked as a whole here; the copy is cut to the checkpoint.
            read_metrics(run)
            replace_synced(folder / METRICS, (run / METRICS).read_bytes())
            state["metrics"] = truncate_metrics(folder / METRICS, step)
        checkpoints.write_checkpoint(
            folder / CHECKPOINTS, step, checkpoint.model(), checkpoint.optimizer(), state
        )
        write_config(folder, config, read_data_fingerprint(run))
    return step


@contextmanager
def _made_beside(out: Path) -> Iterator[Path]:
    """A folder to fill, which takes the place of `out` when all of it is there, or never."""
    folder = out.absolute().with_name(f".{out.absolute().name}.unfinished")
    make_folder(folder, named=out)
    with locked(folder):
        try:
            # What a process that was killed left here.
            shutil.rmtree(folder / CHECKPOINTS, ignore_errors=True)
            (folder / METRICS).unlink(missing_ok=True)
            yield folder
            os.rename(folder, out.absolute())
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
