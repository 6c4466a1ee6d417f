"""The command line: `mosar COMMAND --help` teaches each command.

Exit codes: 0 done; 1 it failed, and one line on stderr says why; 2 wrong usage.
Heavy modules are imported inside the commands, so that help is immediate.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

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
        try:
            from mosar.report.figures import FORMATS, draw_decay_kernels, render_figure
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] != "matplotlib":
                raise
            raise CommandFailed(
                'figures need matplotlib, which is not installed: pip install "mosar[report]"'
            ) from None
        suffix = out.suffix.lower().removeprefix(".")
        if suffix not in FORMATS:
            known = ", ".join(f".{name}" for name in FORMATS)
            raise CommandFailed(f"--out must end in one of {known}, got {str(out)!r}")
        _write_whole(out, render_figure(draw_decay_kernels(geometry, max_distance), suffix))


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
