"""`mosar figure`: pictures of the geometry."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from mosar.cli.app import figure_app
from mosar.cli.shared import (
    figure_suffix,
    load_config,
    one_line_errors,
    write_whole,
)


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
    with one_line_errors():
        geometry = load_config(config, length)
        try:
            geometry = replace(geometry, **changes)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None
        suffix = figure_suffix("--out", out)
        from mosar.report.figures import draw_decay_kernels, render_figure

        write_whole(out, render_figure(draw_decay_kernels(geometry, max_distance), suffix))
