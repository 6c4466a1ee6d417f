"""`mosar reproduce`: runs the paper's comparison, from data to report."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from typer import Option

from mosar.cli.app import command
from mosar.cli.options import (
    DATASET,
    VARIANTS,
    Changes,
    Lengths,
    PredictedTokens,
    Preset,
    Progress,
    check_dataset,
    check_names,
    listed,
    numbers,
)
from mosar.errors import TrainingError, TrainingInterrupted

_TOKENIZER = "bpe:4096"


@command("reproduce", stopped="stopped; the same command resumes")
def reproduce(
    out: Annotated[Path, Option(help="The experiment folder; an existing experiment is resumed.")],
    preset: Preset = "quick",
    variants: Annotated[
        str | None,
        Option(
            help=f"One or more of {VARIANTS}, or all; by default the paper's eight, mosar-hard and "
            "mosar-plus."
        ),
    ] = None,
    seeds: Annotated[int, Option(min=1, help="Number of seeds, starting from 0.")] = 1,
    data: Annotated[
        Path | None,
        Option(
            help="A dataset made by mosar prepare; by default data/stdlib, which is created from "
            "Python's standard library if it is missing. A task needs no dataset."
        ),
    ] = None,
    grid: Annotated[
        list[str] | None,
        Option(
            metavar="KEY=VALUE,VALUE",
            help="Run once for each value, like attention.barrier=4,6,8. Can be repeated: each "
            "cell then changes one key, and the unchanged variant runs too. Keys: "
            "docs/training.md.",
        ),
    ] = None,
    changes: Changes = None,
    lengths: Lengths = "1x,2x,4x",
    eval_tokens: PredictedTokens = None,
    milestones: Annotated[
        str | None,
        Option(
            metavar="STEP,STEP",
            help="Steps that are evaluated besides the last, or none; by default all whose "
            "checkpoints train.keep_every keeps.",
        ),
    ] = None,
    jobs: Annotated[
        int | None,
        Option(
            min=1,
            help="Number of cells to run in parallel, each in a process; by default as many as "
            "cores and memory allow.",
        ),
    ] = None,
    threads: Annotated[
        int | None,
        Option(
            min=1,
            help="Number of torch threads per cell; by default one, or more if there are fewer "
            "cells than cores.",
        ),
    ] = None,
    progress: Progress = True,
) -> None:
    """Run the paper's comparison: train the variants, evaluate them, make the report.

    A cell is one variant with one seed. Finished cells are not run again, interrupted cells are
    resumed, and a failed cell does not stop the others. Ctrl-C saves; the same command resumes. You
    can add variants and seeds to the folder later.

    Example: mosar reproduce --preset quick --out runs/quick

    Example: mosar reproduce --preset small --data data/wiki --variants rope,mosar --seeds 3
    --out runs/small

    Example: mosar reproduce --variants mosar --grid attention.barrier=4,6,8 --out runs/barrier

    Example: mosar reproduce --variants mosar-plus --grid attention.ladder=2,8 --grid
    attention.composition=min,max --out runs/ablation
    """
    chosen = None if variants is None else listed(variants)
    check_names(None, preset)
    for variant in chosen or ():
        check_names(None if variant == "all" else variant, None)
    check_dataset(data)
    from mosar.data.prepare import prepare
    from mosar.experiments.run import run_experiment
    from mosar.experiments.settings import Axis, ExperimentSettings
    from mosar.experiments.work import count_cells
    from mosar.geometries import MATCHED_VARIANTS
    from mosar.geometries import VARIANTS as ALL_VARIANTS

    default = Path(DATASET)
    if chosen == ("all",):
        chosen = tuple(ALL_VARIANTS)
    settings = ExperimentSettings(
        preset=preset or "quick",
        variants=MATCHED_VARIANTS if chosen is None else chosen,
        seeds=seeds,
        data=default if data is None else data,
        grid=tuple(map(Axis.parse, grid or ())),
        changes=tuple(changes or ()),
        lengths=listed(lengths),
        eval_tokens=eval_tokens,
        milestones=_parse_milestones(milestones),
    )
    if data is None and settings.reads_text and not default.exists():
        print(f"mosar: preparing {default} from Python's standard library", file=sys.stderr)
        prepare(["stdlib"], default, tokenizer=_TOKENIZER, progress=progress)
    try:
        result = run_experiment(settings, out, jobs=jobs, threads=threads, progress=progress)
    except TrainingInterrupted as error:
        saved = "stopped and saved; the same command resumes"
        raise TrainingInterrupted(saved, error.signal_number) from None
    if result.finished:
        from mosar.cli.report import report_experiment

        report_experiment(out)
    if result.failed:
        first, why = next(iter(result.failed.items()))
        raise TrainingError(f"{count_cells(len(result.failed))} failed; {first}: {why}")


def _parse_milestones(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    return () if text == "none" else tuple(sorted(set(numbers("--milestones", text))))
