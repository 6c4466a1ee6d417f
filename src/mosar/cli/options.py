"""Options that several commands share, their checks, and parsers of their text."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

import mosar
from mosar.errors import MosarError
from mosar.files import check_folder, replace_synced

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from mosar.core.config import MoSARConfig

# Read from the source file: importing it would load torch.
_SOURCE = Path(mosar.__file__).with_name("geometries") / "__init__.py"
_LISTED = re.compile(r'^    "([\w-]+)": (?:AttentionConfig)?\(', re.M)
DATASET = "data/stdlib"
_FIGURE_SUFFIXES = (".png", ".svg", ".pdf")
VARIANTS = ", ".join(_LISTED.findall(_SOURCE.read_text()))

Run = Annotated[Path, Argument(help="A run folder made by mosar train.", show_default=False)]
Model = Annotated[
    Path | None,
    Argument(
        help="A folder made by mosar train, mosar export or mosar retrofit. With --adapter: the "
        "path of the base model, if it is not where the adapter expects it.",
        show_default=False,
    ),
]
Adapter = Annotated[
    str | None, Option(help="Trained routers: a folder, or an included adapter like smollm2-135m.")
]
NewFolder = Annotated[Path, Option("--out", help="Folder to create.")]
Step = Annotated[
    int | None, Option(min=0, help="Use the checkpoint of this step; by default the newest.")
]
MovedData = Annotated[
    Path | None, Option("--data", help="New path of the run's dataset, if it was moved.")
]
Dataset = Annotated[
    Path | None, Option("--data", help=f"A dataset made by mosar prepare; by default {DATASET}.")
]
Variant = Annotated[str | None, Option(help=f"{VARIANTS}.")]
Preset = Annotated[
    str | None,
    Option(
        help="smoke (takes seconds), quick (minutes a variant), small (half an hour), medium "
        "(hours) or paper (a cluster); retrieval learns a task in minutes."
    ),
]
Lengths = Annotated[str, Option(help="Multiples of the training length (2x), or tokens (2048).")]
PredictedTokens = Annotated[
    int | None,
    Option(
        min=1, help="Tokens to predict at each length; by default the tokens of 64 training steps."
    ),
]
Changes = Annotated[
    list[str] | None,
    Option(
        "--set",
        metavar="KEY=VALUE",
        help="Change a setting, like train.steps=60; can be repeated. Keys: docs/training.md.",
    ),
]
TextField = Annotated[
    str, Option(help="The field with the text, in JSON, parquet and hf: sources.")
]
Geometry = Annotated[
    Path | None,
    Option("--config", help="A file with the JSON text that MoSARConfig.to_json() returns."),
]
Threads = Annotated[
    int | None, Option(min=1, help="Number of torch threads; by default torch decides.")
]
Progress = Annotated[bool, Option(help="Show progress on stderr.")]


# Commands check what they can before they import torch, which takes seconds.


def check_run(run: Path, command: str = "mosar train") -> None:
    check_folder(run, "run folder", command)


def check_model(folder: Path | None, adapter: str | None) -> None:
    """A run, an exported model or a retrofit; a base model may be a name, and is not checked."""
    if folder is not None and adapter is None:
        check_folder(folder, "folder", "mosar train, export or retrofit")


def check_names(variant: str | None, preset: str | None) -> None:
    """A ValueError for an unknown variant or preset."""
    from mosar.schema import check_name
    from mosar.training.presets import PRESETS

    if variant is not None:
        # A program that enters a variant of its own has imported them.
        loaded = sys.modules.get("mosar.geometries")
        check_name("variant", variant, loaded.VARIANTS if loaded else listed(VARIANTS))
    if preset is not None:
        check_name("preset", preset, PRESETS)


def check_dataset(folder: Path | None) -> None:
    """A DataError for a dataset that does not exist."""
    from mosar.data.manifest import Manifest

    if folder is not None and not folder.is_dir():
        Manifest.read(folder)


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


def load_geometry(path: Path) -> MoSARConfig:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise MosarError(f"cannot read {path}: {error.strerror}") from None
    from mosar.core.config import MoSARConfig

    try:
        return MoSARConfig.from_json(text)
    except ValueError as error:
        raise MosarError(f"{path}: {error}") from None


def check_folder_of(*paths: Path | None) -> None:
    """A MosarError before a long run if one of its files could not be written at the end."""
    for path in paths:
        if path is not None and not path.absolute().parent.is_dir():
            raise MosarError(f"cannot write {path}: its folder does not exist")


def check_figure(option: str, path: Path | None) -> None:
    """A MosarError for a figure in an unknown format, or without a folder to write it to."""
    if path is not None and path.suffix.lower() not in _FIGURE_SUFFIXES:
        raise MosarError(
            f"{option} must end in one of {', '.join(_FIGURE_SUFFIXES)}, got {str(path)!r}"
        )
    check_folder_of(path)


def write_figure(path: Path, figure: Figure) -> None:
    from mosar.report.figures import render_figure

    write_file(path, render_figure(figure, path.suffix.lower().removeprefix(".")))


def write_file(path: Path, data: bytes) -> None:
    """Writes a whole file or nothing; a MosarError says why it failed."""
    try:
        replace_synced(path, data)
    except OSError as error:
        raise MosarError(f"cannot write {path}: {error.strerror}") from None
