"""`mosar import`: makes a run folder from an exported model."""

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
    out: Annotated[Path, Option(help="The run folder to create.")],
    data: Annotated[
        Path | None,
        Option(help="The dataset of the run; needed if the model was not exported from a run."),
    ] = None,
) -> None:
    """Make a run folder from an exported model, with exactly the same parameters.

    mosar evaluate, train and generate can use the run folder. The optimizer state is new.

    Example: mosar import exported --out runs/again --data data/stdlib
    """
    check_folder(folder, "folder", "mosar export")
    from mosar.integrations.hf import run_import

    print(f"The run: {run_import.import_model(folder, out, data=data)}")
