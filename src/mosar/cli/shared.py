"""What several commands need: errors as one line, options that are lists, files written whole."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mosar.errors import MosarError, TrainingInterrupted
from mosar.files import replace_synced

if TYPE_CHECKING:
    from mosar.core.config import MoSARConfig


class CommandFailed(Exception):
    """A failure the user can act on; its text is the one line they see."""


@contextmanager
def one_line_errors() -> Iterator[None]:
    try:
        yield
    except CommandFailed as error:
        line = " ".join(str(error).split())
        typer.echo(f"mosar: error: {line}", err=True)
        raise typer.Exit(1) from None
    except KeyboardInterrupt as stop:
        typer.echo(f"mosar: {str(stop) or 'stopped'}", err=True)
        raise typer.Exit(130) from None


@contextmanager
def reported(*failures: type[Exception]) -> Iterator[None]:
    """`failures` and files that cannot be used as one line; other wrong values as wrong usage."""
    try:
        yield
    except (*failures, MosarError) as error:
        if getattr(error, "reported_by_peer", False):
            raise typer.Exit(1) from None
        raise CommandFailed(str(error)) from None
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    except OSError as error:
        reason = f"{error.filename}: {error.strerror}" if error.filename else str(error)
        raise CommandFailed(reason) from None


@contextmanager
def interruptible(stopped: str, saved: str | None = None) -> Iterator[None]:
    """Ctrl-C and SIGTERM as one line, with the exit code that shells expect.

    `stopped` is said where nothing was saved; `saved`, by default what the run says, where it was.
    """
    try:
        yield
    except TrainingInterrupted as error:
        if not error.reported_by_peer:
            typer.echo(f"mosar: {saved or error}", err=True)
        raise typer.Exit(error.exit_code) from None
    except KeyboardInterrupt:
        typer.echo(f"mosar: {stopped}", err=True)
        raise typer.Exit(130) from None


Threads = Annotated[
    int | None, typer.Option(min=1, help="Threads of torch; by default as torch chooses.")
]
Progress = Annotated[bool, typer.Option(help="Show progress on stderr.")]


def set_option(help: str) -> Any:
    return typer.Option("--set", metavar="KEY=VALUE", help=help, show_default=False)


def use_threads(threads: int | None) -> None:
    import torch

    if threads is not None:
        torch.set_num_threads(threads)


def listed(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def numbers(option: str, text: str) -> tuple[int, ...]:
    parts = listed(text)
    if not parts or not all(part.isdecimal() for part in parts):
        raise ValueError(f"{option} takes numbers like 2048,8192, got {text!r}")
    return tuple(int(part) for part in parts)


def figure_suffix(option: str, path: Path) -> str:
    """The format that a figure's file name asks for."""
    try:
        from mosar.report.figures import FORMATS
    except ModuleNotFoundError as error:
        raise without_matplotlib(error) from None
    suffix = path.suffix.lower().removeprefix(".")
    if suffix not in FORMATS:
        known = ", ".join(f".{name}" for name in FORMATS)
        raise CommandFailed(f"{option} must end in one of {known}, got {str(path)!r}")
    return suffix


def without_matplotlib(error: ModuleNotFoundError) -> Exception:
    """What to raise where a module is missing: matplotlib is ours to explain."""
    if (error.name or "").partition(".")[0] != "matplotlib":
        return error
    return CommandFailed(
        'figures need matplotlib, which is not installed: pip install "mosar[report]"'
    )


def load_config(path: Path | None, length: int | None) -> MoSARConfig:
    from mosar.core.config import MoSARConfig

    if path is None:
        return MoSARConfig() if length is None else MoSARConfig.scaled(length)
    try:
        return MoSARConfig.from_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CommandFailed(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise CommandFailed(f"{path}: {error}") from None


def write_whole(path: Path, data: bytes) -> None:
    """Writes a file at once; where that fails, one line says so."""
    try:
        replace_synced(path, data)
    except OSError as error:
        raise CommandFailed(f"cannot write {path}: {error.strerror}") from None
