"""What `mosar reproduce` does: find the data, run the cells."""

from __future__ import annotations

import sys
from pathlib import Path

from mosar.data.config import DataConfig
from mosar.experiments.run import ExperimentResult, run_experiment
from mosar.experiments.settings import Axis, ExperimentSettings
from mosar.geometries import PAPER_VARIANTS

_TOKENIZER = "bpe:4096"


def run_reproduce_command(
    out: Path,
    *,
    preset: str,
    variants: tuple[str, ...] | None,
    seeds: int,
    data: Path | None,
    grid: str | None,
    changes: tuple[str, ...],
    lengths: tuple[str, ...],
    eval_tokens: int | None,
    progress: bool,
) -> ExperimentResult:
    """Runs the experiment that the options ask for; the default corpus is made where needed."""
    default = Path(DataConfig().folder)
    settings = ExperimentSettings(
        preset=preset,
        variants=PAPER_VARIANTS if variants is None else variants,
        seeds=seeds,
        data=default if data is None else data,
        grid=None if grid is None else Axis.parse(grid),
        changes=changes,
        lengths=lengths,
        eval_tokens=eval_tokens,
    )
    if data is None and settings.reads_text and not default.exists():
        _prepare_default(default, progress)
    return run_experiment(settings, out, progress=progress)


def _prepare_default(folder: Path, progress: bool) -> None:
    from mosar.data.prepare import prepare

    print(f"mosar: preparing {folder} from Python's standard library", file=sys.stderr)
    prepare(["stdlib"], folder, tokenizer=_TOKENIZER, progress=progress)
