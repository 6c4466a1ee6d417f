"""`mosar retrofit`, and what `mosar evaluate` and `report` do with its folders."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mosar.cli.app import app
from mosar.cli.shared import (
    CommandFailed,
    Progress,
    Threads,
    interruptible,
    listed,
    load_config,
    numbers,
    one_line_errors,
    reported,
    set_option,
    use_threads,
    without_matplotlib,
)


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
        typer.Option(
            help="Tokens of a window; by default 4096, or the model's context if that is shorter.",
            show_default=False,
        ),
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
        set_option("A change like updates=4; may be given again. Keys: docs/retrofit.md."),
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
    threads: Threads = None,
    progress: Progress = True,
) -> None:
    """Give a pretrained model routers: train them alone, the model stays as it is.

    The routers learn from the model's own attention, layer by layer. --out gets an adapter of a few
    MB that mosar evaluate and mosar generate take. Ctrl-C saves first; the same command goes on.

    Example: mosar retrofit HuggingFaceTB/SmolLM2-135M --data articles.jsonl.gz --out runs/smollm2

    Example: mosar retrofit model.gguf --data book.txt --out runs/mine --target-density 0.1

    Example: mosar retrofit models/mine --out runs/try --length 1024 --steps 10 --no-evaluate
    """
    with one_line_errors():
        geometry = None if config is None else load_config(config, None)
        try:
            from mosar.integrations.retrofit.command import resolve_settings, run_retrofit_command
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] != "transformers":
                raise
            raise CommandFailed(
                'retrofitting needs transformers, which is not installed: pip install "mosar[hf]"'
            ) from None
        use_threads(threads)
        with reported(), interruptible("stopped"):
            named = resolve_settings(target_density, length, steps, changes or [])
            run_retrofit_command(
                model,
                data or ["stdlib"],
                out,
                named=named,
                geometry=geometry,
                start_from=start_from,
                text_field=text_field,
                evaluate=evaluate,
                progress=progress,
            )
            if evaluate:
                report_retrofitted(out)


def evaluate_retrofitted(
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

    with reported():
        from mosar.integrations.retrofit.command import run_evaluate_retrofitted

        run_evaluate_retrofitted(
            folder,
            lengths=listed(lengths),
            routings=None if routing is None else listed(routing),
            data=data,
            tokens=tokens,
            documents=documents,
            windows=() if windows is None else numbers("--baseline-windows", windows),
            rounds=3 if timing is None else timing,
            force=force,
            json=json,
            progress=progress,
        )
        report_retrofitted(folder)


def report_retrofitted(folder: Path) -> None:
    """Writes and prints the report of a retrofitted run, or of a folder that holds some."""
    from mosar.report.retrofit import write_retrofit_report

    try:
        path = write_retrofit_report(folder)
    except ModuleNotFoundError as error:
        raise without_matplotlib(error) from None
    typer.echo(path.read_text(encoding="utf-8"))
    typer.echo(f"report in {path}")
