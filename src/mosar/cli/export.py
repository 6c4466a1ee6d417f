"""`mosar export`: exports a checkpoint for transformers."""

from __future__ import annotations

from typing import Annotated

from typer import Option

from mosar.cli.app import command
from mosar.cli.options import MovedData, NewFolder, Run, Step, check_run


@command("export")
def export(
    run: Run,
    out: NewFolder,
    step: Step = None,
    dtype: Annotated[
        str, Option(help="float32, bfloat16 or float16, for all parameters except the routers.")
    ] = "float32",
    routing: Annotated[
        str, Option(help="The routing of the loaded model: soft, top1 or sparse.")
    ] = "soft",
    data: MovedData = None,
    force: Annotated[bool, Option("--force", help="Replace an existing model in --out.")] = False,
) -> None:
    """Export a checkpoint for transformers: weights, tokenizer, model card.

    The folder --out is created only when the export is complete. docs/huggingface.md shows how to
    load it.

    Example: mosar export runs/mosar --out exported

    Example: mosar export runs/mosar --out exported --dtype bfloat16 --routing sparse
    """
    check_run(run)
    from mosar.integrations.hf.export import export_run

    made = export_run(run, out, step=step, dtype=dtype, routing=routing, data=data, force=force)
    print(f"The model: {made}")
