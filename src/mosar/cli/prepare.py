"""`mosar prepare`: turns text into a dataset of tokens."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from mosar.cli.app import command
from mosar.cli.options import TextField


@command("prepare", stopped="stopped; nothing was left behind")
def prepare(
    sources: Annotated[
        list[str] | None,
        Argument(
            help="Text files (.txt, .md, …) or .jsonl, also as .gz; .parquet; folders of these; "
            "stdlib (the sources of Python's standard library, the default); or "
            "hf:NAME[:CONFIG][:SPLIT].",
            show_default=False,
        ),
    ] = None,
    out: Annotated[Path | None, Option(help="Folder to create.")] = None,
    tokenizer: Annotated[
        str,
        Option(
            help="byte; bpe:VOCAB, trained on the training documents; or the path of a "
            "tokenizer.json or of another dataset."
        ),
    ] = "byte",
    valid: Annotated[
        list[str] | None, Option(help="A source of validation text; can be repeated.")
    ] = None,
    valid_fraction: Annotated[
        float,
        Option(help="Without --valid: the share of the text to hold out for validation."),
    ] = 0.05,
    seed: Annotated[int, Option(min=0, help="Seed for choosing validation documents.")] = 0,
    text_field: TextField = "text",
    end_of_text: Annotated[
        str | None,
        Option(help="The token that ends a document, if the tokenizer is a tokenizer.json."),
    ] = None,
    force: Annotated[bool, Option("--force", help="Replace an existing dataset in --out.")] = False,
    check: Annotated[Path | None, Option(help="Only verify the checksums of this dataset.")] = None,
) -> None:
    """Make a dataset from text: tokens for training and for validation.

    Each document ends with an end-of-text token. Without --valid, 5 % of the documents are held out
    for validation. If there is only one document, its last 5 % are held out. The folder --out is
    created only when the dataset is complete.

    Example: mosar prepare book.txt --out data/book

    Example: mosar prepare stdlib --out data/stdlib --tokenizer bpe:4096

    Example: mosar prepare book.txt articles.jsonl.gz --valid held_out.jsonl --out data/mine

    Example: mosar prepare hf:wikitext:wikitext-103-raw-v1 --tokenizer bpe:16384 --out data/wiki

    Example: mosar prepare --check data/stdlib
    """
    from mosar.data import prepare as preparation

    if check is not None:
        if sources or out is not None:
            raise ValueError("--check takes no sources and no --out: it only checks a dataset")
        manifest = preparation.check_dataset(check, progress=True)
        print(preparation.show_dataset(manifest, check))
        print("every file matches its checksum")
        return
    if out is None:
        raise ValueError("--out is missing: the folder to create")
    manifest = preparation.prepare(
        sources or ("stdlib",),
        out,
        tokenizer=tokenizer,
        valid=valid or (),
        valid_fraction=valid_fraction,
        seed=seed,
        text_field=text_field,
        end_of_text=end_of_text,
        force=force,
        progress=True,
    )
    for note in preparation.notes(manifest):
        print(f"note: {note}", file=sys.stderr)
    print(preparation.show_dataset(manifest, out))
    folder = shlex.quote(str(out))
    print(f"next: mosar train --variant mosar --preset quick --data {folder} --out runs/mosar")
