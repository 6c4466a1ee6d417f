"""`mosar train`: starts or resumes a run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from mosar.cli.app import command
from mosar.cli.options import (
    DATASET,
    Changes,
    Dataset,
    Preset,
    Progress,
    Threads,
    Variant,
    check_dataset,
    check_names,
    use_threads,
)
from mosar.errors import TrainingError

if TYPE_CHECKING:
    from mosar.training.config import RunConfig

VARIANT, PRESET = "mosar", "quick"


@command("train")
def train(
    out: Annotated[Path, Option(help="The run folder; an existing run is resumed.")],
    variant: Variant = None,
    preset: Preset = None,
    data: Dataset = None,
    changes: Changes = None,
    threads: Threads = None,
    resume: Annotated[
        bool, Option(help="With --no-resume, it is an error if --out holds a run.")
    ] = True,
    progress: Progress = True,
) -> None:
    """Train a variant, or resume the run in --out.

    Ctrl-C saves the run. A resumed run gives the same numbers as a run that was never stopped.
    Without --variant and --preset, the run in --out is resumed with its own configuration. A new
    run uses variant mosar and preset quick by default.

    Example: mosar train --variant mosar --preset quick --data data/stdlib --out runs/mosar

    Example: mosar train --out runs/mosar

    Example: mosar train --variant rope --preset smoke --out runs/try --set train.steps=60
    """
    check_names(variant, preset)
    if variant is None and preset is None and data is None and not out.is_dir():
        raise _no_run(out)
    # An existing run knows its own data, and a task needs none.
    needs_default = data is None and not out.is_dir() and not _is_task(preset, changes or [])
    check_dataset(Path(DATASET) if needs_default else data)
    from mosar.training import loop
    from mosar.training.distributed.environment import launched

    use_threads(threads)
    config = choose_config(out, variant, preset, data, changes or [])
    result = loop.train(config, out, progress=progress, resume=resume)
    if launched()[0]:
        # Only the first process prints.
        return
    # The perplexity of a very high loss would overflow.
    perplexity = math.exp(min(result.valid_loss, 700))
    print(
        f"{out}: {config.variant or config.attention.geometry}, step {result.step}, "
        f"loss {result.loss:.4f}, validation loss {result.valid_loss:.4f} "
        f"(perplexity {perplexity:.2f})"
    )


def choose_config(
    out: Path, variant: str | None, preset: str | None, data: Path | None, changes: Sequence[str]
) -> RunConfig:
    """The configuration that the options ask for; without options, that of the run in `out`.

    Without options and without a run, the folder was probably mistyped: a TrainingError.
    """
    from mosar.data.config import DataConfig
    from mosar.training.config import changed_config, resolve_config
    from mosar.training.run_folder import has_run, read_config

    # Absolute: the run may be resumed from another folder.
    if has_run(out) and variant is None and preset is None:
        moved = [] if data is None else [f"data.folder={data.absolute()}"]
        return changed_config(read_config(out), [*moved, *changes])
    if variant is None and preset is None and data is None:
        raise _no_run(out)
    folder = Path(DataConfig().folder if data is None else data).absolute()
    return resolve_config(
        variant=variant or VARIANT, preset=preset or PRESET, data=folder, changes=changes
    )


def _is_task(preset: str | None, changes: Sequence[str]) -> bool:
    from mosar.training.presets import PRESETS

    is_changed = any(change.strip().startswith("data.task") for change in changes)
    return is_changed or "data.task" in PRESETS[preset or PRESET]


def _no_run(out: Path) -> TrainingError:
    from mosar.training.distributed.environment import launched

    error = TrainingError(
        f"there is no run in {out} to resume; start one with --variant, --preset or --data: "
        f"mosar train --variant {VARIANT} --preset {PRESET} --out {out}"
    )
    error.reported_by_peer = launched()[0] > 0
    return error
