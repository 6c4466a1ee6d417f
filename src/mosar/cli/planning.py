"""`mosar plan`: what a run will need."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mosar.cli.app import app
from mosar.cli.shared import (
    figure_suffix,
    one_line_errors,
    reported,
    set_option,
    write_whole,
)


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
            min=1,
            max=1_000_000,
            help="Ranks; by default --data x --shard x --tensor.",
            show_default=False,
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
        set_option(
            "A change like train.precision=fp32; may be given again. Keys: docs/training.md."
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

    Example: mosar plan --preset paper --gpus 8 --tensor 8 --memory 40 --set train.precision=fp32

    Example: mosar plan --preset small --variant mosar-cost --density results/small --json plan.json

    Example: mosar plan --preset paper --context 16384 --plot plan.png
    """
    with one_line_errors():
        import json

        from mosar.planning.command import plan_command

        suffix = None if plot is None else figure_suffix("--plot", plot)
        with reported():
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
        values = made.to_dict()
        if plot is not None and suffix is not None:
            from mosar.report.figures import render_figure
            from mosar.report.plan_chart import draw_plan

            section = "operations of a token"
            rest = sum(made.value(section, f"{name}, forward") for name in ("matrices", "routers"))
            title = f"{variant}, preset {preset}, training length {made.config.model.max_length:,}"
            figure = draw_plan(values["attention_by_context"], rest, title)
            write_whole(plot, render_figure(figure, suffix))
        if json_file is not None and str(json_file) != "-":
            write_whole(json_file, (json.dumps(values, indent=1) + "\n").encode())
        if str(json_file) == "-":
            typer.echo(json.dumps(values, indent=1))
            return
        from rich.console import Console

        from mosar.planning.terminal import print_plan

        print_plan(made, Console())
