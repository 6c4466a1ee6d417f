"""`mosar look`: makes a page that shows what every token of a text chose."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from typer import Option

from mosar.cli.app import command
from mosar.cli.options import (
    Adapter,
    Model,
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
    text: Annotated[str, Option(help="A file with the text; - reads stdin.")],
    model: Model = None,
    adapter: Adapter = None,
    out: Annotated[Path, Option(help="The page to write.")] = Path("look.html"),
    tokens: Annotated[
        int, Option(min=1, max=1 << 16, help="Read at most this many tokens of the text.")
    ] = 4096,
    picture: Annotated[
        Path | None,
        Option(help="Also take a picture of the page, as PNG; this needs Chromium or Chrome."),
    ] = None,
    view: Annotated[
        str | None,
        Option(
            help="What the picture shows: the part of the page's address after the #, for example "
            "'reading?alone&token=30&layer=0'. The address changes in your browser when you choose "
            "a token or a layer. The word alone hides the other sections. By default "
            "reading?alone.",
        ),
    ] = None,
    step: Step = None,
    data: MovedData = None,
    threads: Threads = None,
    progress: Progress = True,
) -> None:
    """Show which regime every token of a text chose: one page with text, map and attention.

    The page is one file and works offline. It contains only the largest attention weights, and it
    shows the share of the pairs that is read. Long texts fit into memory: no tensor has the size
    tokens x tokens.

    Example: mosar look runs/mosar --text article.txt --out look.html

    Example: mosar look --adapter smollm2-135m --text article.txt
    """
    check_model(model, adapter)
    check_folder_of(out, picture)
    if view is not None and picture is None:
        raise ValueError("--view says what --picture shows; give --picture too")
    if picture is not None:
        from mosar.microscope.picture import checked_view, require_browser

        view = checked_view(view or "reading?alone")
        if picture.suffix.lower() != ".png":
            raise MosarError(f"--picture must end in .png, got {str(picture)!r}")
        require_browser()
    content = _read(text)
    from mosar.evaluation.progress import length_progress, say
    from mosar.generation.source import open_source
    from mosar.microscope.look import look as look_at

    use_threads(threads)
    source = open_source(model, adapter=adapter, step=step, data=data)
    layers, name = len(source.reader.label_logs), Path(adapter or model or "").name
    with length_progress(f"{name}: layers", layers, enabled=progress) as advance:
        seen = look_at(source, content, name=name, max_tokens=tokens, advance=advance)
    for note in seen.notes:
        say(note)
    page = seen.to_html()
    write_file(out, page.encode())
    print(f"The page: {out}")
    if picture is not None and view is not None:
        from mosar.microscope.picture import take_picture

        write_file(picture, take_picture(page, view))
        print(f"The picture: {picture}")


def _read(text: str) -> bytes:
    if text != "-":
        return Path(text).read_bytes()
    if sys.stdin is None:
        raise ValueError("--text - reads stdin, which is closed")
    return sys.stdin.buffer.read()
