"""The command line: `mosar COMMAND --help` teaches each command.

Exit codes: 0 done; 1 it failed, and one line on stderr says why; 2 wrong usage.
Heavy modules are imported inside the commands, so that help is immediate.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mosar.version import __version__

if TYPE_CHECKING:
    from mosar.core.config import MoSARConfig

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
figure_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
app.add_typer(
    figure_app,
    name="figure",
    help="Draw a figure.\n\nExample: mosar figure decay-kernels --out kernels.png",
)
bench_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
app.add_typer(
    bench_app,
    name="bench",
    help="Measure speed and memory.\n\nExample: mosar bench attention --lengths 2048,8192",
)


class CommandFailed(Exception):
    """A failure the user can act on; its text is the one line they see."""


@contextmanager
def _one_line_errors() -> Iterator[None]:
    try:
        yield
    except CommandFailed as error:
        line = " ".join(str(error).split())
        typer.echo(f"mosar: error: {line}", err=True)
        raise typer.Exit(1) from None


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"mosar {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Attention that learns how far each token needs to look.

    Example: mosar figure decay-kernels --out kernels.png
    """


@app.command("prepare")
def prepare(
    sources: Annotated[
        list[str] | None,
        typer.Argument(
            help="Text (.txt, .md, …), .jsonl, either with .gz, .parquet, folders of these, stdlib "
            "(the sources of Python's standard library, the default), or hf:NAME[:CONFIG][:SPLIT].",
            show_default=False,
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder to make.")] = None,
    tokenizer: Annotated[
        str,
        typer.Option(
            help="byte; bpe:VOCAB, trained on the training documents; or the path of a "
            "tokenizer.json or of another dataset."
        ),
    ] = "byte",
    valid: Annotated[
        list[str] | None,
        typer.Option(help="A source of validation text; may be given again.", show_default=False),
    ] = None,
    valid_fraction: Annotated[
        float, typer.Option(help="Without --valid: the share of documents for validation.")
    ] = 0.05,
    seed: Annotated[int, typer.Option(min=0, help="Of the choice of validation documents.")] = 0,
    text_field: Annotated[
        str, typer.Option(help="The field with the text, in JSON, parquet and hf: sources.")
    ] = "text",
    end_of_text: Annotated[
        str | None, typer.Option(help="The token of a tokenizer.json that ends documents.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a dataset in --out.")] = False,
    check: Annotated[
        Path | None, typer.Option(help="Make nothing: compare this dataset with its checksums.")
    ] = None,
) -> None:
    """Make a dataset: text to tokens, packed, split into training and validation.

    Documents are joined by an end-of-text token. --out appears when it is complete, not before.

    Example: mosar prepare stdlib --out data/stdlib --tokenizer bpe:4096

    Example: mosar prepare book.txt articles.jsonl.gz --valid held_out.jsonl --out data/mine

    Example: mosar prepare hf:wikitext:wikitext-103-raw-v1 --tokenizer bpe:16384 --out data/wiki

    Example: mosar prepare --check data/stdlib
    """
    with _one_line_errors():
        from mosar.data.errors import DataError
        from mosar.data.prepare import prepare_command

        try:
            prepare_command(
                sources or (),
                out,
                check=check,
                tokenizer=tokenizer,
                valid=valid or (),
                valid_fraction=valid_fraction,
                seed=seed,
                text_field=text_field,
                end_of_text=end_of_text,
                force=force,
            )
        except DataError as error:
            raise CommandFailed(str(error)) from None
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None
        except OSError as error:
            reason = f"{error.filename}: {error.strerror}" if error.filename else str(error)
            raise CommandFailed(reason) from None
        except KeyboardInterrupt:
            raise CommandFailed("stopped; nothing was left behind") from None


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
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="A change like train.steps=60; may be given again. Keys: docs/training.md.",
            show_default=False,
        ),
    ] = None,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Threads of torch; by default as torch chooses.")
    ] = None,
    resume: Annotated[
        bool, typer.Option(help="With --no-resume, a folder that holds a run is refused.")
    ] = True,
    progress: Annotated[bool, typer.Option(help="Show progress on stderr.")] = True,
) -> None:
    """Train a variant, or go on with the run in --out, bit for bit as if it had never stopped.

    Ctrl-C saves first. With neither --variant nor --preset, a run that is there goes on as it was
    configured.

    Example: mosar train --variant mosar --preset quick --data data/stdlib --out runs/mosar

    Example: mosar train --out runs/mosar

    Example: mosar train --variant rope --preset smoke --out runs/try --set train.steps=60
    """
    with _one_line_errors():
        import torch

        from mosar.data.errors import DataError
        from mosar.training.command import choose_config, run_train_command
        from mosar.training.errors import TrainingError, TrainingInterrupted

        if threads is not None:
            torch.set_num_threads(threads)
        try:
            config = choose_config(out, variant, preset, data, changes or [])
            run_train_command(config, out, progress=progress, resume=resume)
        except TrainingInterrupted as error:
            if not error.is_told_elsewhere:
                typer.echo(f"mosar: {error}", err=True)
            raise typer.Exit(error.exit_code) from None
        except (DataError, TrainingError) as error:
            if isinstance(error, TrainingError) and error.is_told_elsewhere:
                raise typer.Exit(1) from None
            raise CommandFailed(str(error)) from None
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None


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
    with _one_line_errors():
        from mosar.training.consolidate import consolidate as make_plain
        from mosar.training.errors import TrainingError

        try:
            made = make_plain(run, out, step)
        except TrainingError as error:
            raise CommandFailed(str(error)) from None
        except OSError as error:
            reason = f"{error.filename}: {error.strerror}" if error.filename else str(error)
            raise CommandFailed(reason) from None
        typer.echo(f"{out}: step {made} of {run}")


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
    threads: Annotated[
        int | None, typer.Option(min=1, help="Threads of torch; by default as torch chooses.")
    ] = None,
    progress: Annotated[bool, typer.Option(help="Show progress on stderr.")] = True,
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
    with _one_line_errors():
        import torch

        from mosar.data.errors import DataError
        from mosar.evaluation.command import run_evaluate_command
        from mosar.evaluation.errors import EvaluationError

        if threads is not None:
            torch.set_num_threads(threads)
        if (run / "adapter.json").is_file():
            options = {"lengths": lengths, "routing": routing, "data": data, "tokens": tokens}
            options |= {"documents": documents, "windows": baseline_windows, "timing": timing}
            options |= {"force": force, "json": json, "progress": progress}
            foreign = {"--step": step, "--against": against, "--details": details or None}
            _refuse_options(foreign, "is for runs of mosar train, and this was retrofitted")
            _evaluate_retrofitted(run, **options)
            return
        own = {"--documents": documents, "--baseline-windows": baseline_windows, "--timing": timing}
        _refuse_options(own, "is for retrofitted models")
        try:
            run_evaluate_command(
                run,
                lengths=_listed(lengths),
                routings=None if routing is None else _listed(routing),
                step=step,
                data=data,
                tokens=tokens,
                against=against,
                force=force,
                details=details,
                json=json,
                progress=progress,
            )
        except (DataError, EvaluationError) as error:
            raise CommandFailed(str(error)) from None
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None
        except OSError as error:
            reason = f"{error.filename}: {error.strerror}" if error.filename else str(error)
            raise CommandFailed(reason) from None
        except KeyboardInterrupt:
            raise CommandFailed("stopped; what was finished is in the run folder") from None


def _refuse_options(given: dict[str, object], why: str) -> None:
    for option, value in given.items():
        if value is not None:
            raise typer.BadParameter(f"{option} {why}")


def _evaluate_retrofitted(
    folder: Path,
    *,
    lengths: str,
    routing: str | None,
    data: Path | None,
    tokens: int | None,
    documents: int | None,
    windows: str | None,
    timing: int | None,
    force: bool,
    json: Path | None,
    progress: bool,
) -> None:
    """What `mosar evaluate` does with a folder of `mosar retrofit`."""
    from mosar.data.errors import DataError
    from mosar.integrations.retrofit.errors import RetrofitError

    try:
        from mosar.integrations.retrofit.command import run_evaluate_retrofitted

        run_evaluate_retrofitted(
            folder,
            lengths=_listed(lengths),
            routings=None if routing is None else _listed(routing),
            data=data,
            tokens=tokens,
            documents=documents,
            windows=() if windows is None else _numbers("--baseline-windows", windows),
            rounds=3 if timing is None else timing,
            force=force,
            json=json,
            progress=progress,
        )
        _report_retrofitted(folder)
    except (DataError, RetrofitError) as error:
        raise CommandFailed(str(error)) from None
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    except OSError as error:
        reason = f"{error.filename}: {error.strerror}" if error.filename else str(error)
        raise CommandFailed(reason) from None


def _report_retrofitted(folder: Path) -> None:
    """Writes and prints the report of a retrofitted run, or of a folder that holds some."""
    from mosar.report.retrofit import write_retrofit_report

    try:
        path = write_retrofit_report(folder)
    except ModuleNotFoundError as error:
        raise _without_matplotlib(error) from None
    typer.echo(path.read_text(encoding="utf-8"))
    typer.echo(f"report in {path}")


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
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="A change to every cell, like train.steps=60; may be given again.",
            show_default=False,
        ),
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
    threads: Annotated[
        int | None, typer.Option(min=1, help="Threads of torch; by default as torch chooses.")
    ] = None,
    progress: Annotated[bool, typer.Option(help="Show progress on stderr.")] = True,
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
    with _one_line_errors():
        import torch

        from mosar.data.errors import DataError
        from mosar.experiments.command import run_reproduce_command
        from mosar.experiments.run import ExperimentError
        from mosar.experiments.work import count_cells
        from mosar.training.errors import TrainingError, TrainingInterrupted

        if threads is not None:
            torch.set_num_threads(threads)
        try:
            result = run_reproduce_command(
                out,
                preset=preset,
                variants=None if variants is None else _listed(variants),
                seeds=seeds,
                data=data,
                grid=grid,
                changes=tuple(changes or ()),
                lengths=_listed(lengths),
                eval_tokens=eval_tokens,
                progress=progress,
            )
        except TrainingInterrupted as error:
            typer.echo("mosar: stopped and saved; the same command goes on", err=True)
            raise typer.Exit(error.exit_code) from None
        except KeyboardInterrupt:
            typer.echo("mosar: stopped; the same command goes on", err=True)
            raise typer.Exit(130) from None
        except (DataError, ExperimentError, TrainingError) as error:
            raise CommandFailed(str(error)) from None
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None
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
    with _one_line_errors():
        if any(folder.glob("adapter.json")) or any(folder.glob("*/adapter.json")):
            if out is not None:
                raise typer.BadParameter("--out is for experiments; a retrofit's is in its folder")
            try:
                _report_retrofitted(folder)
            except (OSError, ValueError, KeyError) as error:
                raise CommandFailed(" ".join(str(error).split())) from None
            return
        _show_report(folder, out)


def _show_report(folder: Path, out: Path | None) -> None:
    """Writes the report of an experiment folder; prints its main table and its path."""
    try:
        from mosar.report.experiment import ReportError, load_experiment
        from mosar.report.terminal import main_table_renderable
        from mosar.report.write import write_report
    except ModuleNotFoundError as error:
        raise _without_matplotlib(error) from None
    from rich.console import Console

    try:
        page = write_report(folder, out)
        experiment = load_experiment(folder)
    except ReportError as error:
        raise CommandFailed(str(error)) from None
    console = Console()
    if experiment.evaluations:
        console.print(main_table_renderable(experiment, console.width))
    typer.echo(f"The report: {page}")


@app.command("plan")
def plan(
    preset: Annotated[str, typer.Option(help="smoke, quick, small, retrieval or paper.")] = "paper",
    variant: Annotated[
        str,
        typer.Option(
            help="rope, alibi, p-rope, fixed-s, fixed-m, rope-m-mask, mosar or mosar-cost."
        ),
    ] = "mosar",
    context: Annotated[
        int | None,
        typer.Option(
            min=1, help="Tokens of a window; by default the preset's.", show_default=False
        ),
    ] = None,
    gpus: Annotated[
        int | None,
        typer.Option(
            min=1, help="Ranks; by default --data x --shard x --tensor.", show_default=False
        ),
    ] = None,
    data: Annotated[
        int | None,
        typer.Option(min=1, help="Copies of the model (DDP).", show_default="chosen"),
    ] = None,
    shard: Annotated[
        int | None,
        typer.Option(
            min=1, help="Ranks that divide parameters and optimizer (FSDP).", show_default="chosen"
        ),
    ] = None,
    tensor: Annotated[
        int | None,
        typer.Option(
            min=1, help="Ranks that divide heads and feed-forward.", show_default="chosen"
        ),
    ] = None,
    windows: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Windows of an update, on all ranks; by default the preset's, or one a rank.",
            show_default=False,
        ),
    ] = None,
    memory: Annotated[
        float, typer.Option(min=0.001, help="GiB that a rank has; chooses the mesh.")
    ] = 80.0,
    density: Annotated[
        str | None,
        typer.Option(
            help="Which support density: paper or small (packaged figures), a number, or a folder "
            "with records of mosar evaluate.",
            show_default=False,
        ),
    ] = None,
    changes: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="A change like train.precision=bf16; may be given again. Keys: docs/training.md.",
            show_default=False,
        ),
    ] = None,
    json_file: Annotated[
        Path | None,
        typer.Option("--json", help="Write the plan as JSON; - for stdout, without the tables."),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(help="Draw how attention's cost grows: FILE.png, .svg or .pdf."),
    ] = None,
) -> None:
    """Estimate a run before it runs: parameters, operations, memory, communication, context.

    Pencil and paper: nothing is trained or timed. Every line says whether it is exact, measured or
    modelled, and by which rule. Sizes of the mesh that are not given are chosen: the simplest one
    whose memory fits. The regimes stay those of the preset's training length, as in an evaluation
    at a longer context; --set model.max_length=8192 scales them.

    Example: mosar plan --preset paper --context 8192 --gpus 64

    Example: mosar plan --preset paper --gpus 8 --tensor 8 --memory 40 --set train.precision=bf16

    Example: mosar plan --preset small --variant mosar-cost --density results/small --json plan.json

    Example: mosar plan --preset paper --context 16384 --plot plan.png
    """
    with _one_line_errors():
        import json

        from mosar.planning.command import plan_command
        from mosar.planning.errors import PlanError

        suffix = None if plot is None else _figure_suffix("--plot", plot)
        try:
            made = plan_command(
                preset=preset,
                variant=variant,
                context=context,
                gpus=gpus,
                data=data,
                shard=shard,
                tensor=tensor,
                windows=windows,
                memory=memory,
                density=density,
                changes=changes or [],
            )
        except PlanError as error:
            raise CommandFailed(str(error)) from None
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None
        values = made.to_dict()
        if plot is not None and suffix is not None:
            from mosar.report.figures import render_figure
            from mosar.report.plan_chart import draw_plan

            section = "operations of a token"
            rest = sum(made.value(section, f"{name}, forward") for name in ("matrices", "routers"))
            title = f"{variant}, preset {preset}, training length {made.config.model.max_length:,}"
            figure = draw_plan(values["attention_by_context"], rest, title)
            _write_whole(plot, render_figure(figure, suffix))
        if json_file is not None and str(json_file) != "-":
            _write_whole(json_file, (json.dumps(values, indent=1) + "\n").encode())
        if str(json_file) == "-":
            typer.echo(json.dumps(values, indent=1))
            return
        from rich.console import Console

        from mosar.planning.text import print_plan

        print_plan(made, Console())


@app.command("retrofit")
def retrofit(
    model: Annotated[
        str,
        typer.Argument(
            help="A causal model of transformers: a folder, a GGUF file or a name on the hub.",
            show_default=False,
        ),
    ],
    out: Annotated[
        Path, typer.Option(help="The run folder; one that holds this run is gone on with.")
    ],
    data: Annotated[
        list[str] | None,
        typer.Option(
            help="Text as mosar prepare takes it, or a dataset it made with the model's tokenizer; "
            "may be given again. By default stdlib.",
            show_default=False,
        ),
    ] = None,
    target_density: Annotated[
        float | None,
        typer.Option(
            help="The share of pairs that sparse routing should read; by default 0.25.",
            show_default=False,
        ),
    ] = None,
    length: Annotated[
        int | None,
        typer.Option(help="Tokens of a window; by default 4096.", show_default=False),
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(help="Windows to learn from; by default 20.", show_default=False),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            help="A MoSARConfig as JSON: reaches, groups, sinks. By default by the model.",
            show_default=False,
        ),
    ] = None,
    changes: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="A change like updates=4; may be given again. Keys: docs/retrofit.md.",
            show_default=False,
        ),
    ] = None,
    start_from: Annotated[
        Path | None,
        typer.Option(
            help="Another run to begin with the routers of: for another density, fewer steps do.",
            show_default=False,
        ),
    ] = None,
    text_field: Annotated[
        str, typer.Option(help="The field with the text, in JSON, parquet and hf: sources.")
    ] = "text",
    evaluate: Annotated[
        bool, typer.Option(help="Afterwards: perplexity, prefill time and cache.")
    ] = True,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Threads of torch; by default as torch chooses.")
    ] = None,
    progress: Annotated[bool, typer.Option(help="Show progress on stderr.")] = True,
) -> None:
    """Give a pretrained model routers: train them alone, the model stays as it is.

    The routers learn from the model's own attention, layer by layer. --out gets an adapter of a few
    MB that mosar evaluate and mosar generate take. Ctrl-C saves first; the same command goes on.

    Example: mosar retrofit HuggingFaceTB/SmolLM2-135M --data articles.jsonl.gz --out runs/smollm2

    Example: mosar retrofit model.gguf --data book.txt --out runs/mine --target-density 0.1

    Example: mosar retrofit models/mine --out runs/try --length 1024 --steps 10 --no-evaluate
    """
    with _one_line_errors():
        import torch

        from mosar.data.errors import DataError
        from mosar.training.errors import TrainingError, TrainingInterrupted

        geometry = None if config is None else _load_config(config, None)
        try:
            from mosar.integrations.retrofit.command import resolve_settings, run_retrofit_command
            from mosar.integrations.retrofit.errors import RetrofitError
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] != "transformers":
                raise
            raise CommandFailed(
                'retrofitting needs transformers, which is not installed: pip install "mosar[hf]"'
            ) from None
        if threads is not None:
            torch.set_num_threads(threads)
        try:
            settings = resolve_settings(target_density, length, steps, changes or [])
            run_retrofit_command(
                model,
                data or ["stdlib"],
                out,
                settings=settings,
                geometry=geometry,
                start_from=start_from,
                text_field=text_field,
                evaluate=evaluate,
                progress=progress,
            )
            if evaluate:
                _report_retrofitted(out)
        except TrainingInterrupted as error:
            typer.echo(f"mosar: {error}", err=True)
            raise typer.Exit(error.exit_code) from None
        except (DataError, RetrofitError, TrainingError) as error:
            raise CommandFailed(str(error)) from None
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None
        except OSError as error:
            reason = f"{error.filename}: {error.strerror}" if error.filename else str(error)
            raise CommandFailed(reason) from None


@app.command("generate")
def generate(
    model: Annotated[
        Path,
        typer.Argument(
            help="A run folder of mosar train, a folder of mosar export, or a retrofitted model.",
            show_default=False,
        ),
    ],
    prompt: Annotated[
        str, typer.Option(help="The text to go on with; - reads it from stdin; empty: a new text.")
    ],
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Where to stop at the latest.")] = 200,
    temperature: Annotated[
        float, typer.Option(min=0.0, help="0: always the likeliest token.")
    ] = 0.8,
    top_k: Annotated[
        int | None,
        typer.Option(
            min=1, help="Only the k likeliest tokens; by default all.", show_default=False
        ),
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(
            help="Only the likeliest tokens with this probability together; by default all.",
            show_default=False,
        ),
    ] = None,
    seed: Annotated[
        int, typer.Option(min=0, max=2**63 - 1, help="Equal seeds write equal texts.")
    ] = 0,
    routing: Annotated[
        str | None,
        typer.Option(
            help="soft, top1 or sparse (the default, with a bounded cache); native for variants "
            "without routers.",
            show_default=False,
        ),
    ] = None,
    step: Annotated[
        int | None,
        typer.Option(
            min=0, help="A checkpoint of a run; by default the newest.", show_default=False
        ),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(help="Where the data of the run lies, if it was moved.", show_default=False),
    ] = None,
    echo: Annotated[bool, typer.Option("--echo", help="Show the prompt, too.")] = False,
    stats: Annotated[
        bool, typer.Option("--stats", help="Speed, cache size and density, on stderr.")
    ] = False,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Threads of torch; by default as torch chooses.")
    ] = None,
) -> None:
    """Write text with a trained model, token by token on stdout.

    Example: mosar generate runs/mosar --prompt "def main(" --stats

    Example: mosar generate exported --prompt - --temperature 0 --max-new-tokens 50 < prompt.txt
    """
    with _one_line_errors():
        import torch

        from mosar.generation.command import run_generate_command
        from mosar.generation.source import GenerationError

        if threads is not None:
            torch.set_num_threads(threads)
        try:
            run_generate_command(
                model,
                prompt,
                max_new_tokens=max_new_tokens,
                temperature=temperature,
                top_k=top_k,
                top_p=top_p,
                seed=seed,
                routing=routing,
                step=step,
                data=data,
                echo=echo,
                stats=stats,
            )
        except GenerationError as error:
            raise CommandFailed(str(error)) from None
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None
        except BrokenPipeError:
            # Whoever read the text has read enough.
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        except OSError as error:
            # What could not be written must not be tried again at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            raise CommandFailed(error.strerror or str(error)) from None
        except KeyboardInterrupt:
            typer.echo()
            raise typer.Exit(130) from None


@app.command("export")
def export(
    run: Annotated[Path, typer.Argument(help="A run folder of mosar train.", show_default=False)],
    out: Annotated[Path, typer.Option(help="Folder to make.")],
    step: Annotated[
        int | None,
        typer.Option(min=0, help="A checkpoint; by default the newest.", show_default=False),
    ] = None,
    dtype: Annotated[
        str, typer.Option(help="Of the parameters but the routers: float32, bfloat16 or float16.")
    ] = "float32",
    routing: Annotated[
        str, typer.Option(help="What the loaded model starts with: soft, top1 or sparse.")
    ] = "soft",
    data: Annotated[
        Path | None,
        typer.Option(help="Where the data of the run lies, if it was moved.", show_default=False),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Replace an exported model in --out.")
    ] = False,
) -> None:
    """Export a checkpoint for transformers: weights, tokenizer, model card.

    --out appears when it is complete, not before. Loading it: docs/huggingface.md.

    Example: mosar export runs/mosar --out exported

    Example: mosar export runs/mosar --out exported --dtype bfloat16 --routing sparse
    """
    with _one_line_errors(), _hf_errors():
        from mosar.integrations.hf.export import export_run

        made = export_run(run, out, step=step, dtype=dtype, routing=routing, data=data, force=force)
        typer.echo(f"The model: {made}")


@app.command("import")
def import_(
    folder: Annotated[
        Path,
        typer.Argument(help="A folder of mosar export, or of save_pretrained.", show_default=False),
    ],
    out: Annotated[Path, typer.Option(help="The run folder to make.")],
    data: Annotated[
        Path | None,
        typer.Option(
            help="The dataset of the run; needed where the model was not exported from one.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Make a run folder from an exported model, with the same parameters to the bit.

    mosar evaluate, train and generate take it from there; the optimizer starts anew.

    Example: mosar import exported --out runs/again --data data/stdlib
    """
    with _one_line_errors(), _hf_errors():
        from mosar.integrations.hf.run_import import import_model

        typer.echo(f"The run: {import_model(folder, out, data=data)}")


@contextmanager
def _hf_errors() -> Iterator[None]:
    """What goes wrong with a model of transformers, as the command line says it."""
    try:
        from mosar.integrations.hf.errors import ModelFolderError
    except ModuleNotFoundError as error:
        raise CommandFailed(str(error)) from None
    try:
        yield
    except ModelFolderError as error:
        raise CommandFailed(str(error)) from None
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    except OSError as error:
        reason = f"{error.filename}: {error.strerror}" if error.filename else str(error)
        raise CommandFailed(reason) from None


@figure_app.command("decay-kernels")
def decay_kernels(
    out: Annotated[Path, typer.Option(help="File to write: .png, .svg or .pdf.")],
    length: Annotated[
        int | None,
        typer.Option(min=1, help="Training length N; the reaches become N/16, N/4 and N."),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(help="A MoSARConfig as JSON, as MoSARConfig.to_json() writes it."),
    ] = None,
    barrier: Annotated[float | None, typer.Option(help="B: the gates' floor is e^-B.")] = None,
    exponent: Annotated[
        float | None, typer.Option(help="p: how the decay sets in after the plateau.")
    ] = None,
    composition: Annotated[
        str | None, typer.Option(help="A pair's reach from its two: mean, min or max.")
    ] = None,
    max_distance: Annotated[
        int | None,
        typer.Option(min=1, help="Where the distance axis ends; default: beyond the last reach."),
    ] = None,
) -> None:
    """Draw the decay kernels: the gate of every regime pair over distance.

    Example: mosar figure decay-kernels --length 4096 --barrier 4 --out kernels.svg
    """
    if length is not None and config is not None:
        raise typer.BadParameter("--length and --config both set the regimes; give one of them")
    changes = {"barrier": barrier, "exponent": exponent, "composition": composition}
    changes = {name: value for name, value in changes.items() if value is not None}
    with _one_line_errors():
        geometry = _load_config(config, length)
        try:
            geometry = replace(geometry, **changes)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None
        suffix = _figure_suffix("--out", out)
        from mosar.report.figures import draw_decay_kernels, render_figure

        _write_whole(out, render_figure(draw_decay_kernels(geometry, max_distance), suffix))


@bench_app.command("attention")
def bench_attention(
    mode: Annotated[
        str,
        typer.Option(help="Some of sparse, sparse-train, soft-train, distance-train."),
    ] = "sparse",
    shapes: Annotated[
        str, typer.Option(help="Query heads x key/value heads x head dim.")
    ] = "8x1x256,8x8x64,9x3x64",
    lengths: Annotated[
        str | None,
        typer.Option(
            help="Tokens. By default 256 to 8192 for sparse, 2048,8192 for sparse-train, else 2048."
        ),
    ] = None,
    competitors: Annotated[
        str | None,
        typer.Option(
            help="Some of sdpa, flash (GPU), reference, flex, flex-sorted, ours. By default all; "
            "compiling FlexAttention takes ten seconds a length, so on the CPU only from 1024 to "
            "4096 tokens."
        ),
    ] = None,
    labels: Annotated[
        str,
        typer.Option(
            help="independent or clustered (the paper's shares at 8k), or FILE.npz with integer "
            "arrays labels_q and labels_k."
        ),
    ] = "independent",
    memory: Annotated[
        str | None,
        typer.Option(
            help="Tokens at which peak memory is measured, or none. By default 8192, or the "
            "largest of --lengths up to it."
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, or cuda for a GPU (CUDA or HIP).")] = "cpu",
    dtype: Annotated[
        str | None,
        typer.Option(
            help="float32, bfloat16 or float16. By default float32 on the CPU, else bfloat16.",
            show_default=False,
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of labels, queries, keys and values.")] = 0,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Threads of torch; by default as torch chooses.")
    ] = None,
    seconds: Annotated[
        float, typer.Option(help="About how long a row is timed; 5 to 30 rounds in any case.")
    ] = 10.0,
    config: Annotated[
        Path | None,
        typer.Option(help="A MoSARConfig as JSON; by default the paper's geometry."),
    ] = None,
    json: Annotated[
        Path | None, typer.Option(help="Append a record a row to this file, as it is measured.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw speed-up against length: .png, .svg or .pdf.")
    ] = None,
) -> None:
    """Time attention side by side: dense SDPA, FlexAttention, our reference, ours.

    All in one run, interleaved. Ours is checked against float64 first; a wrong result gets no
    speed-up, and the exit code 1. Options that take several values take them with commas.

    Example: mosar bench attention

    Example: mosar bench attention --lengths 4096,8192,16384 --competitors sdpa,ours

    Example: mosar bench attention --mode soft-train,distance-train --shapes 8x1x256

    Example: mosar bench attention --labels clustered --json bench.jsonl --plot speedup.png

    Example: mosar bench attention --device cuda --mode sparse,sparse-train,soft-train
    """
    with _one_line_errors():
        geometry = _load_config(config, None)
        import torch

        from mosar.bench.attention import AttentionBenchmarkSettings
        from mosar.bench.cases import Shape
        from mosar.bench.terminal import show_attention_benchmark

        try:
            settings = AttentionBenchmarkSettings(
                modes=_listed(mode),
                shapes=tuple(Shape.parse(shape) for shape in _listed(shapes)),
                lengths=None if lengths is None else _numbers("--lengths", lengths),
                memory_lengths=_memory_lengths(memory),
                competitors=None if competitors is None else _listed(competitors),
                labels=labels,
                seed=seed,
                seconds=seconds,
                config=geometry,
                device=device,
                dtype=dtype,
            )
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None
        # A long run must not end in a file that cannot be written.
        suffix = None if plot is None else _figure_suffix("--plot", plot)
        for path in (path for path in (json, plot) if path is not None):
            if not path.absolute().parent.is_dir():
                raise CommandFailed(f"cannot write {path}: its folder does not exist")
        if threads is not None:
            torch.set_num_threads(threads)
        try:
            records = show_attention_benchmark(settings, json)
        except OSError as error:
            reason = f"{error.filename}: {error.strerror}" if error.filename else str(error)
            raise CommandFailed(reason) from None
        except (ValueError, RuntimeError) as error:
            raise CommandFailed(str(error)) from None
        if plot is not None and any(record.speedup is not None for record in records):
            from mosar.report.figures import draw_speedup, render_figure

            _write_whole(plot, render_figure(draw_speedup(records), suffix or ""))
        wrong = [record for record in records if not record.correct]
        if wrong:
            raise CommandFailed(f"{len(wrong)} of {len(records)} rows gave a wrong result")


@bench_app.command("train")
def bench_train(
    lengths: Annotated[str, typer.Option(help="Tokens of a window.")] = "512,2048",
    softcap: Annotated[
        str, typer.Option(help="capped (Gemma 2's soft-caps), plain (none), or both.")
    ] = "capped,plain",
    preset: Annotated[str, typer.Option(help="The size of the model.")] = "small",
    memory: Annotated[
        str, typer.Option(help="Tokens at which peak memory is measured, or none.")
    ] = "2048",
    threads: Annotated[
        int | None, typer.Option(min=1, help="Threads of torch; by default as torch chooses.")
    ] = None,
    seconds: Annotated[
        float, typer.Option(help="About how long a row is timed; 5 to 30 rounds in any case.")
    ] = 60.0,
    json: Annotated[
        Path | None, typer.Option(help="Append a record a row to this file, as it is measured.")
    ] = None,
) -> None:
    """Time a training step: our rope and mosar, transformers' Gemma 2, a nanoGPT-style loop.

    All of the same size, in one run, interleaved. Losses are checked first, ours against float64
    and Gemma 2's against ours with the same weights; a wrong result gets no ratio, and the exit
    code 1.

    Example: mosar bench train

    Example: mosar bench train --lengths 512 --softcap plain --seconds 20 --json train.jsonl
    """
    with _one_line_errors():
        import torch

        from mosar.bench.terminal import show_training_benchmark
        from mosar.bench.training import TrainingBenchmarkSettings

        try:
            settings = TrainingBenchmarkSettings(
                lengths=_numbers("--lengths", lengths),
                settings=_listed(softcap),
                preset=preset,
                memory_lengths=_memory_lengths(memory) or (),
                seconds=seconds,
            )
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None
        if json is not None and not json.absolute().parent.is_dir():
            raise CommandFailed(f"cannot write {json}: its folder does not exist")
        if threads is not None:
            torch.set_num_threads(threads)
        try:
            records = show_training_benchmark(settings, json)
        except OSError as error:
            reason = f"{error.filename}: {error.strerror}" if error.filename else str(error)
            raise CommandFailed(reason) from None
        except (ValueError, RuntimeError) as error:
            raise CommandFailed(str(error)) from None
        wrong = [record for record in records if not record.correct]
        if wrong:
            raise CommandFailed(f"{len(wrong)} of {len(records)} rows gave a wrong result")


@bench_app.command("decode")
def bench_decode(
    shapes: Annotated[
        str, typer.Option(help="Query heads x key/value heads x head dim; not with --model.")
    ] = "9x3x64,8x1x256",
    lengths: Annotated[
        str | None,
        typer.Option(
            help="Tokens of context at the last step. By default 2048,4096,8192,16384; with "
            "--model 16384.",
            show_default=False,
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="Time whole models of these sizes instead: smollm2, or tiny to try it out.",
            show_default=False,
        ),
    ] = None,
    labels: Annotated[
        str,
        typer.Option(
            help="independent or clustered (the paper's shares at 8k), or FILE.npz with integer "
            "arrays labels_q and labels_k."
        ),
    ] = "independent",
    seed: Annotated[int, typer.Option(min=0, help="Of labels, queries, keys and values.")] = 0,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Threads of torch; by default as torch chooses.")
    ] = None,
    seconds: Annotated[
        float | None,
        typer.Option(
            help="About how long a row is timed; 5 to 30 passes in any case. By default 5; with "
            "--model 20.",
            show_default=False,
        ),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(help="A MoSARConfig as JSON; by default the paper's geometry."),
    ] = None,
    json: Annotated[
        Path | None, typer.Option(help="Append a record a row to this file, as it is measured.")
    ] = None,
) -> None:
    """Time one decode step's attention: the regime cache against SDPA over a dense cache.

    A step appends a token and attends with its query. Both in one run, interleaved; ours is checked
    against float64 first, and a wrong result gets no speed-up, and the exit code 1.

    With --model, whole models write: our decoder with the regime cache, our decoder with a dense
    one, and transformers' Llama with its DynamicCache and SDPA.

    Example: mosar bench decode

    Example: mosar bench decode --shapes 8x8x64 --lengths 4096,32768 --json decode.jsonl

    Example: mosar bench decode --model smollm2
    """
    with _one_line_errors():
        geometry = _load_config(config, None)
        import torch

        from mosar.bench import terminal
        from mosar.bench.cases import Shape
        from mosar.bench.decode import DecodeBenchmarkSettings
        from mosar.bench.decode_model import ModelDecodeSettings

        common: dict[str, Any] = {"labels": labels, "seed": seed, "config": geometry}
        try:
            if lengths is not None:
                common["lengths"] = _numbers("--lengths", lengths)
            if seconds is not None:
                common["seconds"] = seconds
            if model is None:
                common["shapes"] = tuple(Shape.parse(shape) for shape in _listed(shapes))
                run = partial(terminal.show_decode_benchmark, DecodeBenchmarkSettings(**common))
            else:
                settings = ModelDecodeSettings(model=model, **common)
                run = partial(terminal.show_model_decode_benchmark, settings)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None
        if json is not None and not json.absolute().parent.is_dir():
            raise CommandFailed(f"cannot write {json}: its folder does not exist")
        if threads is not None:
            torch.set_num_threads(threads)
        try:
            records = run(json)
        except OSError as error:
            reason = f"{error.filename}: {error.strerror}" if error.filename else str(error)
            raise CommandFailed(reason) from None
        except (ValueError, RuntimeError) as error:
            raise CommandFailed(str(error)) from None
        wrong = [record for record in records if not record.correct]
        if wrong:
            raise CommandFailed(f"{len(wrong)} of {len(records)} rows gave a wrong result")


def _listed(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _numbers(option: str, text: str) -> tuple[int, ...]:
    parts = _listed(text)
    if not parts or not all(part.isdecimal() for part in parts):
        raise ValueError(f"{option} takes numbers like 2048,8192, got {text!r}")
    return tuple(int(part) for part in parts)


def _memory_lengths(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    return () if text == "none" else _numbers("--memory", text)


def _figure_suffix(option: str, path: Path) -> str:
    """The format that a figure's file name asks for."""
    try:
        from mosar.report.figures import FORMATS
    except ModuleNotFoundError as error:
        raise _without_matplotlib(error) from None
    suffix = path.suffix.lower().removeprefix(".")
    if suffix not in FORMATS:
        known = ", ".join(f".{name}" for name in FORMATS)
        raise CommandFailed(f"{option} must end in one of {known}, got {str(path)!r}")
    return suffix


def _without_matplotlib(error: ModuleNotFoundError) -> Exception:
    """What to raise where a module is missing: matplotlib is ours to explain."""
    if (error.name or "").partition(".")[0] != "matplotlib":
        return error
    return CommandFailed(
        'figures need matplotlib, which is not installed: pip install "mosar[report]"'
    )


def _load_config(path: Path | None, length: int | None) -> MoSARConfig:
    from mosar.core.config import MoSARConfig

    if path is None:
        return MoSARConfig() if length is None else MoSARConfig.scaled(length)
    try:
        return MoSARConfig.from_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CommandFailed(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise CommandFailed(f"{path}: {error}") from None


def _write_whole(path: Path, data: bytes) -> None:
    """Writes a file at once: under a temporary name beside it, then renamed."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        try:
            temporary.write_bytes(data)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise CommandFailed(f"cannot write {path}: {error.strerror}") from None


def main() -> None:
    app()


if __name__ == "__main__":
    main()
