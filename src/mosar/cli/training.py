"""`mosar train` and `mosar consolidate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mosar.cli.app import app
from mosar.cli.shared import (
    Progress,
    Threads,
    interruptible,
    one_line_errors,
    reported,
    set_option,
    use_threads,
)


@app.command("train")
def train(
    out: Annotated[
        Path, typer.Option(help="The run folder; one that holds a run is gone on with.")
    ],
    variant: Annotated[
        str | None,
        typer.Option(
            help="rope, alibi, p-rope, fixed-s, fixed-m, rope-m-mask, mosar (the default) or "
            "mosar-cost.",
            show_default=False,
        ),
    ] = None,
    preset: Annotated[
        str | None,
        typer.Option(
            help="smoke (seconds), quick (the default, minutes), small, retrieval or paper.",
            show_default=False,
        ),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            help="A dataset of mosar prepare; by default data/stdlib.", show_default=False
        ),
    ] = None,
    changes: Annotated[
        list[str] | None,
        set_option("A change like train.steps=60; may be given again. Keys: docs/training.md."),
    ] = None,
    threads: Threads = None,
    resume: Annotated[
        bool, typer.Option(help="With --no-resume, a folder that holds a run is refused.")
    ] = True,
    progress: Progress = True,
) -> None:
    """Train a variant, or go on with the run in --out, bit for bit as if it had never stopped.

    Ctrl-C saves first. With neither --variant nor --preset, a run that is there goes on as it was
    configured; where there is none, --variant, --preset or --data starts a new one.

    Example: mosar train --variant mosar --preset quick --data data/stdlib --out runs/mosar

    Example: mosar train --out runs/mosar

    Example: mosar train --variant rope --preset smoke --out runs/try --set train.steps=60
    """
    with one_line_errors():
        from mosar.training.command import choose_config, run_train_command

        use_threads(threads)
        with reported(), interruptible("stopped"):
            config = choose_config(out, variant, preset, data, changes or [])
            run_train_command(config, out, progress=progress, resume=resume)


@app.command("consolidate")
def consolidate(
    run: Annotated[Path, typer.Argument(help="A run folder of mosar train.", show_default=False)],
    out: Annotated[Path, typer.Option(help="The run folder to make.")],
    step: Annotated[
        int | None,
        typer.Option(min=0, help="A checkpoint; by default the newest.", show_default=False),
    ] = None,
) -> None:
    """Make a plain run folder of one that several processes wrote.

    Evaluating and going on read either kind; this one is for tools that expect a checkpoint as
    model.safetensors. It takes one machine with room for the parameters.

    Example: mosar consolidate runs/cluster --out runs/plain
    """
    with one_line_errors():
        from mosar.training.distributed.consolidate import consolidate as make_plain

        with reported(), interruptible("stopped; nothing was left behind"):
            made = make_plain(run, out, step)
        typer.echo(f"{out}: step {made} of {run}")
