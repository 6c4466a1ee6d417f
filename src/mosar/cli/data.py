"""`mosar prepare`: text to token streams."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mosar.cli.app import app
from mosar.cli.shared import (
    interruptible,
    one_line_errors,
    reported,
)


@app.command("prepare")
def prepare(
    sources: Annotated[
        list[str] | None,
        typer.Argument(
            help="Text (.txt, .md, …), .jsonl, either with .gz, .parquet, folders of these, stdlib "
            "(the sources of Python's standard library, the default), or hf:NAME[:CONFIG][:SPLIT].",
            show_default=False,
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder to make.")] = None,
    tokenizer: Annotated[
        str,
        typer.Option(
            help="byte; bpe:VOCAB, trained on the training documents; or the path of a "
            "tokenizer.json or of another dataset."
        ),
    ] = "byte",
    valid: Annotated[
        list[str] | None,
        typer.Option(help="A source of validation text; may be given again.", show_default=False),
    ] = None,
    valid_fraction: Annotated[
        float, typer.Option(help="Without --valid: the share of documents for validation.")
    ] = 0.05,
    seed: Annotated[int, typer.Option(min=0, help="Of the choice of validation documents.")] = 0,
    text_field: Annotated[
        str, typer.Option(help="The field with the text, in JSON, parquet and hf: sources.")
    ] = "text",
    end_of_text: Annotated[
        str | None, typer.Option(help="The token of a tokenizer.json that ends documents.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a dataset in --out.")] = False,
    check: Annotated[
        Path | None, typer.Option(help="Make nothing: compare this dataset with its checksums.")
    ] = None,
) -> None:
    """Make a dataset: text to tokens, packed, split into training and validation.

    Documents are joined by an end-of-text token. --out appears when it is complete, not before.

    Example: mosar prepare stdlib --out data/stdlib --tokenizer bpe:4096

    Example: mosar prepare book.txt articles.jsonl.gz --valid held_out.jsonl --out data/mine

    Example: mosar prepare hf:wikitext:wikitext-103-raw-v1 --tokenizer bpe:16384 --out data/wiki

    Example: mosar prepare --check data/stdlib
    """
    with one_line_errors():
        from mosar.data.prepare import prepare_command

        with reported(), interruptible("stopped; nothing was left behind"):
            prepare_command(
                sources or (),
                out,
                check=check,
                tokenizer=tokenizer,
                valid=valid or (),
                valid_fraction=valid_fraction,
                seed=seed,
                text_field=text_field,
                end_of_text=end_of_text,
                force=force,
            )
