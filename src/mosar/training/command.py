"""What `mosar train` does: find the configuration, train, say how it ended."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from mosar.data.config import DataConfig
from mosar.errors import TrainingError
from mosar.training.config import RunConfig, changed_config, resolve_config
from mosar.training.distributed.environment import launched
from mosar.training.loop import TrainResult, train
from mosar.training.run_folder import has_run, read_config

VARIANT, PRESET = "mosar", "quick"


def choose_config(
    out: Path, variant: str | None, preset: str | None, data: Path | None, changes: Sequence[str]
) -> RunConfig:
    """The configuration that the options ask for; without any, that of the run in `out`.

    A TrainingError where nothing is asked for and there is no run: a mistyped folder.
    """
    # Absolute: the run may be gone on with from another folder.
    if has_run(out) and variant is None and preset is None:
        moved = [] if data is None else [f"data.folder={data.absolute()}"]
        return changed_config(read_config(out), [*moved, *changes])
    if variant is None and preset is None and data is None:
        error = TrainingError(
            f"there is no run in {out} to go on with; a new one is started with --variant, "
            f"--preset or --data: mosar train --variant {VARIANT} --preset {PRESET} --out {out}"
        )
        error.reported_by_peer = launched()[0] > 0
        raise error
    folder = Path(DataConfig().folder if data is None else data).absolute()
    return resolve_config(
        variant=variant or VARIANT, preset=preset or PRESET, data=folder, changes=changes
    )


def run_train_command(config: RunConfig, out: Path, *, progress: bool, resume: bool) -> TrainResult:
    """Trains and prints a line about the result."""
    result = train(config, out, progress=progress, resume=resume)
    if launched()[0]:
        # Of several processes the first one speaks.
        return result
    # Where a loss is so high that its perplexity overflows, there is nothing to be learnt from it.
    perplexity = math.exp(min(result.valid_loss, 700))
    print(
        f"{out}: {config.variant or config.attention.geometry}, step {result.step}, "
        f"loss {result.loss:.4f}, validation loss {result.valid_loss:.4f} "
        f"(perplexity {perplexity:.2f})"
    )
    return result
