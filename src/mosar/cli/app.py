"""The program, and the one place where an error becomes a line on stderr and an exit code."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Annotated, Any

import typer

from mosar.errors import MosarError, TrainingInterrupted
from mosar.lazy import install_line
from mosar.version import __version__

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
# Optional packages, and which of our extras installs them.
_EXTRAS = {"matplotlib": "report", "transformers": "hf"}


def command(
    name: str, group: typer.Typer = app, *, stopped: str = "stopped"
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Adds a command; `stopped` is the message after Ctrl-C."""

    def add(function: Callable[..., None]) -> Callable[..., None]:
        @wraps(function)
        def run(**options: Any) -> None:
            with failures_as_lines(stopped):
                function(**options)

        # Passed in full: otherwise the list of commands cuts it to one line.
        text = inspect.getdoc(function) or ""
        summary = " ".join(text.partition("\n\n")[0].split())
        group.command(name, help=_unwrap_examples(text), short_help=summary)(run)
        return function

    return add


def command_group(name: str, help: str) -> typer.Typer:
    """Adds a command that has subcommands."""
    group = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
    app.add_typer(group, name=name, help=_unwrap_examples(help))
    return group


def _unwrap_examples(text: str) -> str:
    """Puts each example on one line, to be copied; wrapping would break it inside of an option."""
    return "\n\n".join(
        # \b exempts a paragraph from wrapping.
        "\b\n" + " ".join(paragraph.split()) if paragraph.startswith("Example: ") else paragraph
        for paragraph in text.split("\n\n")
    )


@contextmanager
def failures_as_lines(stopped: str) -> Iterator[None]:
    """Turns an error into one line on stderr and its exit code; a ValueError is wrong usage."""
    try:
        yield
    except TrainingInterrupted as error:
        raise _end(error.exit_code, "" if error.reported_by_peer else str(error)) from None
    except MosarError as error:
        line = "" if error.reported_by_peer else f"error: {error}"
        raise _end(error.exit_code, line) from None
    except KeyboardInterrupt as error:
        raise _end(130, str(error) or stopped) from None
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    except BrokenPipeError:
        # The reader of our output, like head, has read enough.
        discard_output()
    except OSError as error:
        reason = f"{error.filename}: {error.strerror}" if error.filename else str(error)
        raise _end(1, f"error: {reason}") from None
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in _EXTRAS:
            raise
        missing = f"this needs {package}, which is not installed"
        raise _end(1, f"error: {missing}: {install_line(_EXTRAS[package])}") from None


def discard_output() -> None:
    """Python flushes stdout at exit; what is left goes nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _end(exit_code: int, line: str) -> typer.Exit:
    if line:
        typer.echo(f"mosar: {' '.join(line.split())}", err=True)
    return typer.Exit(exit_code)


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

    These commands make a first model in a few minutes and need no extra packages:

    Example: mosar prepare stdlib --out data/first

    Example: mosar train --preset smoke --data data/first --out runs/first

    Example: mosar generate runs/first --prompt "def " --stats
    """
