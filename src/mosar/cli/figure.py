"""`mosar figure`: draws the geometry."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

from typer import Option

from mosar.cli.app import command, command_group
from mosar.cli.options import Geometry, check_figure, load_geometry, write_figure

_group = command_group(
    "figure", "Draw a figure.\n\nExample: mosar figure decay-kernels --out kernels.png"
)


@command("decay-kernels", _group)
def decay_kernels(
    out: Annotated[Path, Option(help="File to write: .png, .svg or .pdf.")],
    length: Annotated[
        int | None, Option(min=1, help="Training length N; the reaches become N/16, N/4 and N.")
    ] = None,
    config: Geometry = None,
    barrier: Annotated[float | None, Option(help="B: the gates' floor is e^-B.")] = None,
    exponent: Annotated[
        float | None, Option(help="p: the power of the decay after the plateau.")
    ] = None,
    composition: Annotated[
        str | None, Option(help="How two reaches make a pair's reach: mean, min or max.")
    ] = None,
    max_distance: Annotated[
        int | None,
        Option(min=1, help="The end of the distance axis; by default beyond the last reach."),
    ] = None,
) -> None:
    """Draw the decay kernels: the gate of every regime pair over distance.

    Example: mosar figure decay-kernels --length 4096 --barrier 4 --out kernels.svg
    """
    if length is not None and config is not None:
        raise ValueError("--length and --config both set the regimes; give one of them")
    check_figure("--out", out)
    from mosar.core.config import MoSARConfig

    if config is not None:
        geometry = load_geometry(config)
    else:
        geometry = MoSARConfig() if length is None else MoSARConfig.scaled(length)
    changes = {"barrier": barrier, "exponent": exponent, "composition": composition}
    geometry = replace(geometry, **{n: v for n, v in changes.items() if v is not None})
    from mosar.report.figures import draw_decay_kernels

    write_figure(out, draw_decay_kernels(geometry, max_distance))
