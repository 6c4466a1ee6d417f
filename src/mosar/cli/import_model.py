"""`mosar import`: a run folder from an exported model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from mosar.cli.app import command
from mosar.files import check_folder


@command("import")
def import_model(
    folder: Annotated[
        Path, Argument(help="A folder of mosar export, or of save_pretrained.", show_default=False)
    ],
    out: Annotated[Path, Option(help="The run folder to make.")],
    data: Annotated[
        Path | None,
        Option(help="The dataset of the run; needed where the model was not exported from one."),
    ] = None,
) -> None:
    """Make a run folder from an exported model, with the same parameters to the bit.

    mosar evaluate, train and generate take it from there; the optimizer starts anew.

    Example: mosar import exported --out runs/again --data data/stdlib
    """
    check_folder(folder, "folder", "mosar export")
    from mosar.integrations.hf import run_import

    print(f"The run: {run_import.import_model(folder, out, data=data)}")
