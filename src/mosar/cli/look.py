"""`mosar look`: makes a page that shows what every token of a text chose."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from mosar.cli.app import command
from mosar.cli.options import (
    MovedData,
    Progress,
    Step,
    Threads,
    check_folder_of,
    check_model,
    use_threads,
    write_file,
)
from mosar.errors import MosarError


@command("look")
def look(
    model: Annotated[
        Path,
        Argument(
            help="A folder made by mosar train, mosar export or mosar retrofit.",
            show_default=False,
        ),
    ],
    text: Annotated[str, Option(help="A file with the text; - reads stdin.")],
    out: Annotated[Path, Option(help="The page to write.")] = Path("look.html"),
    tokens: Annotated[
        int, Option(min=1, max=1 << 16, help="Read at most this many tokens of the text.")
    ] = 4096,
    picture: Annotated[
        Path | None,
        Option(help="Also take a picture of the page, as PNG; this needs Chromium or Chrome."),
    ] = None,
    view: Annotated[
        str,
        Option(
            help="The view in the picture. Select a token or layer in your browser, and copy what "
            "follows the # in the page's address. Add alone to hide the other sections.",
        ),
    ] = "reading?alone",
    step: Step = None,
    data: MovedData = None,
    threads: Threads = None,
    progress: Progress = True,
) -> None:
    """Show which regime every token of a text chose: one page with text, map and attention.

    The page is one file and works offline. It contains only the largest attention weights, and it
    shows how many pairs are saved. Long texts fit into memory: no tensor has the size tokens x
    tokens.

    Example: mosar look runs/mosar --text article.txt --out look.html
    """
    check_model(model)
    check_folder_of(out, picture)
    if picture is not None:
        from mosar.microscope.picture import require_browser

        if picture.suffix.lower() != ".png":
            raise MosarError(f"--picture must end in .png, got {str(picture)!r}")
        require_browser()
    content = _read(text)
    from mosar.evaluation.progress import length_progress, say
    from mosar.generation.source import open_source
    from mosar.microscope.look import look as look_at

    use_threads(threads)
    source = open_source(model, step=step, data=data)
    layers = len(source.reader.label_logs)
    with length_progress(f"{model.name}: layers", layers, enabled=progress) as advance:
        seen = look_at(source, content, name=model.name, max_tokens=tokens, advance=advance)
    for note in seen.notes:
        say(note)
    page = seen.to_html()
    write_file(out, page.encode())
    print(f"The page: {out}")
    if picture is not None:
        from mosar.microscope.picture import take_picture

        write_file(picture, take_picture(page, view))
        print(f"The picture: {picture}")


def _read(text: str) -> bytes:
    if text != "-":
        return Path(text).read_bytes()
    if sys.stdin is None:
        raise ValueError("--text - reads stdin, which is closed")
    return sys.stdin.buffer.read()
