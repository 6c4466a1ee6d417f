"""`mosar evaluate`, `reproduce` and `report`: what models are worth."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mosar.cli.app import app
from mosar.cli.retrofitting import evaluate_retrofitted, report_retrofitted
from mosar.cli.shared import (
    CommandFailed,
    Progress,
    Threads,
    interruptible,
    listed,
    one_line_errors,
    reported,
    set_option,
    use_threads,
    without_matplotlib,
)

KEPT = "stopped; what was finished is in the run folder"


@app.command("evaluate")
def evaluate(
    run: Annotated[Path, typer.Argument(help="A run folder of mosar train.", show_default=False)],
    lengths: Annotated[
        str, typer.Option(help="Times the training length, like 2x, or tokens, like 2048.")
    ] = "1x,2x,4x",
    routing: Annotated[
        str | None,
        typer.Option(
            help="Some of soft, top1, sparse; native for variants without routers. By default all.",
            show_default=False,
        ),
    ] = None,
    step: Annotated[
        int | None,
        typer.Option(min=0, help="A checkpoint; by default the newest.", show_default=False),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(help="Where the data of the run lies, if it was moved.", show_default=False),
    ] = None,
    tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Predicted at each length; by default as many as 64 training steps see.",
            show_default=False,
        ),
    ] = None,
    against: Annotated[
        Path | None,
        typer.Option(
            help="Another run: also show the difference from it, at the same --step if given.",
            show_default=False,
        ),
    ] = None,
    details: Annotated[
        bool, typer.Option("--details", help="Also show positions and layers.")
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Compute again what the run folder already has.")
    ] = False,
    documents: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Retrofitted models: read the beginnings of so many documents, long enough ones.",
            show_default=False,
        ),
    ] = None,
    baseline_windows: Annotated[
        str | None,
        typer.Option(
            metavar="REACHES",
            help="Retrofitted models: fixed windows to compare with, like 128,512.",
            show_default=False,
        ),
    ] = None,
    timing: Annotated[
        int | None,
        typer.Option(
            min=0,
            metavar="ROUNDS",
            help="Retrofitted models: rounds of timing; by default 3, 0: none.",
            show_default=False,
        ),
    ] = None,
    json: Annotated[
        Path | None, typer.Option(help="Append the records to this file.", show_default=False)
    ] = None,
    threads: Threads = None,
    progress: Progress = True,
) -> None:
    """Evaluate a run: perplexity by length and routing, reach, density, discarded mass.

    Every length predicts the same validation text. A run that learnt a task (data.task) is asked
    for its accuracy by distance instead. Records go into RUN/evaluations. A folder of mosar
    retrofit is compared with its base model, also in speed and cache; RUN/report.md says it all.

    Example: mosar evaluate runs/mosar

    Example: mosar evaluate runs/mosar --lengths 1x,8x --routing top1,sparse --details

    Example: mosar evaluate runs/mosar --against runs/rope

    Example: mosar evaluate runs/smollm2 --lengths 2048,8192 --baseline-windows 128,512,1088
    """
    with one_line_errors():
        from mosar.evaluation.command import run_evaluate_command

        use_threads(threads)
        if (run / "adapter.json").is_file():
            options = {"lengths": lengths, "routing": routing, "data": data, "tokens": tokens}
            options |= {"documents": documents, "windows": baseline_windows, "timing": timing}
            options |= {"force": force, "json": json, "progress": progress}
            foreign = {"--step": step, "--against": against, "--details": details or None}
            _refuse_options(foreign, "is for runs of mosar train, and this was retrofitted")
            with interruptible(KEPT):
                evaluate_retrofitted(run, **options)
            return
        own = {"--documents": documents, "--baseline-windows": baseline_windows, "--timing": timing}
        _refuse_options(own, "is for retrofitted models")
        with reported(), interruptible(KEPT):
            run_evaluate_command(
                run,
                lengths=listed(lengths),
                routings=None if routing is None else listed(routing),
                step=step,
                data=data,
                tokens=tokens,
                against=against,
                force=force,
                details=details,
                json=json,
                progress=progress,
            )


def _refuse_options(given: dict[str, object], why: str) -> None:
    for option, value in given.items():
        if value is not None:
            raise typer.BadParameter(f"{option} {why}")


@app.command("reproduce")
def reproduce(
    out: Annotated[
        Path, typer.Option(help="The experiment folder; one that holds this experiment goes on.")
    ],
    preset: Annotated[
        str,
        typer.Option(help="smoke, quick (minutes), small (hours), paper, or retrieval (a task)."),
    ] = "quick",
    variants: Annotated[
        str | None,
        typer.Option(
            help="Some of rope, alibi, p-rope, fixed-s, fixed-m, rope-m-mask, mosar, mosar-cost; "
            "by default all.",
            show_default=False,
        ),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="How many seeds, from 0 on.")] = 1,
    data: Annotated[
        Path | None,
        typer.Option(
            help="A dataset of mosar prepare; by default data/stdlib, which is made from Python's "
            "standard library where it is missing. A task needs none.",
            show_default=False,
        ),
    ] = None,
    grid: Annotated[
        str | None,
        typer.Option(
            metavar="KEY=VALUE,VALUE",
            help="Repeat along one axis, like attention.barrier=4,6,8. Keys: docs/training.md.",
            show_default=False,
        ),
    ] = None,
    changes: Annotated[
        list[str] | None,
        set_option("A change to every cell, like train.steps=60; may be given again."),
    ] = None,
    lengths: Annotated[
        str, typer.Option(help="To evaluate at: times the training length, or tokens.")
    ] = "1x,2x,4x",
    eval_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Predicted at each length; by default as many as 64 training steps see.",
            show_default=False,
        ),
    ] = None,
    threads: Threads = None,
    progress: Progress = True,
) -> None:
    """Run the paper's comparison: train the variants, evaluate them, make the report.

    Each variant and seed is a cell. A finished cell is not run again, an interrupted one goes on
    where it stopped, a failed one is reported and the others go on. Ctrl-C saves first; the same
    command goes on. More variants or seeds may be added to a folder later.

    Example: mosar reproduce --preset quick --out runs/quick

    Example: mosar reproduce --preset small --data data/wiki --variants rope,mosar --seeds 3
    --out runs/small

    Example: mosar reproduce --variants mosar --grid attention.barrier=4,6,8 --out runs/barrier
    """
    with one_line_errors():
        from mosar.experiments.command import run_reproduce_command
        from mosar.experiments.work import count_cells

        use_threads(threads)
        with (
            reported(),
            interruptible(
                "stopped; the same command goes on",
                "stopped and saved; the same command goes on",
            ),
        ):
            result = run_reproduce_command(
                out,
                preset=preset,
                variants=None if variants is None else listed(variants),
                seeds=seeds,
                data=data,
                grid=grid,
                changes=tuple(changes or ()),
                lengths=listed(lengths),
                eval_tokens=eval_tokens,
                progress=progress,
            )
        if result.finished:
            _show_report(out, None)
        if result.failed:
            first, why = next(iter(result.failed.items()))
            raise CommandFailed(f"{count_cells(len(result.failed))} failed; {first}: {why}")


@app.command("report")
def report(
    folder: Annotated[
        Path,
        typer.Argument(
            help="An experiment folder of mosar reproduce, or a run that mosar evaluate has seen."
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(help="Folder to write; by default report in FOLDER.", show_default=False),
    ] = None,
) -> None:
    """Make the report of an experiment: one page, tables, figures.

    index.html needs nothing else and no network; tables.md and tables.tex hold its tables,
    figures/ its figures as .png and .svg. Only records are read; equal records give equal files.

    Of retrofitted models, one or a folder of several, report.md and their frontier are written.

    Example: mosar report runs/small

    Example: mosar report results/small --out small-report
    """
    with one_line_errors():
        if any(folder.glob("adapter.json")) or any(folder.glob("*/adapter.json")):
            if out is not None:
                raise typer.BadParameter("--out is for experiments; a retrofit's is in its folder")
            with reported(ValueError, KeyError):
                report_retrofitted(folder)
            return
        _show_report(folder, out)


def _show_report(folder: Path, out: Path | None) -> None:
    """Writes the report of an experiment folder; prints its main table and its path."""
    try:
        from mosar.report.experiment import load_experiment
        from mosar.report.terminal import main_table_renderable
        from mosar.report.write import write_report
    except ModuleNotFoundError as error:
        raise without_matplotlib(error) from None
    from rich.console import Console

    with reported():
        page = write_report(folder, out)
        experiment = load_experiment(folder)
    console = Console()
    if experiment.evaluations:
        console.print(main_table_renderable(experiment, console.width))
    typer.echo(f"The report: {page}")
