"""What several commands need: errors as one line, options that are lists, files written whole."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import typer

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
