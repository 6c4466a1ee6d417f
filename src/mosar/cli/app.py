"""The program and its groups of commands; the modules beside this one add the commands."""

from __future__ import annotations

from typing import Annotated

import typer

from mosar.version import __version__

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
