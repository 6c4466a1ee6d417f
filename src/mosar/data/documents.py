"""Reads documents piece by piece: text, JSON Lines, parquet and Hugging Face datasets.

A text file is one document and is read in blocks. In the other formats each line or row is one
document. Pieces are cut before white space, where most tokenizers split anyway.
"""

from __future__ import annotations

import codecs
import gzip
import logging
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from io import BufferedIOBase
from pathlib import Path
from typing import Any

from mosar.errors import DataError
from mosar.files import parse_json
from mosar.lazy import install_line

PIECE_LENGTH = 1 << 18
"""The most characters in a piece."""

_BLOCK_BYTES = 1 << 18
_PARQUET_ROWS = 64
_SURROGATES = re.compile("[\ud800-\udfff]")


@dataclass
class Document:
    """One document. Read it before you ask for the next one."""

    name: str
    """Where it comes from, for messages."""
    pieces: Iterator[str]
    """Its text; each piece has 1 to PIECE_LENGTH characters."""
    opening: str = ""
    """The first piece."""
    source: int = 0
    """The index of its source."""
    replaced: bool = False
    """Whether some bytes were not UTF-8; known once all pieces have been read."""


@dataclass
class ReadReport:
    """What has been read so far."""

    bytes_read: int = 0
    """Bytes of the files on disk, compressed or not."""
    documents: list[int] = field(default_factory=list)
    """Number of documents in each source."""
    empty: int = 0
    """Documents skipped because they hold nothing but white space."""
    replaced: int = 0
    """Documents in which something was not UTF-8 and became U+FFFD."""
    first_replaced: str | None = None


def cut_pieces(chunks: Iterable[str], length: int = PIECE_LENGTH) -> Iterator[str]:
    """The text in pieces of at most `length` characters, cut before white space if possible.

    The cuts depend only on the text, not on how it was chunked.
    """
    buffer = ""
    for chunk in chunks:
        for start in range(0, len(chunk), length):
            buffer += chunk[start : start + length]
            while len(buffer) > length:
                cut = _last_cut(buffer, length)
                yield buffer[:cut]
                buffer = buffer[cut:]
    if buffer:
        yield buffer


def _last_cut(text: str, length: int) -> int:
    # GPT-2's pattern always starts a new match before a blank that follows a word, so the cut does
    # not change the tokens of a byte-level BPE.
    for cut in range(length, length // 2, -1):
        if text[cut] in " \n\r\t" and not text[cut - 1].isspace():
            return cut
    return length


def cut_document(document: Document, position: int) -> Iterator[Document]:
    """The document as two, cut before the first white space from character `position` on.

    Without white space there it is cut at `position` itself. The first part must be read first.
    """
    pieces, left = document.pieces, position
    tail = ""

    def head() -> Iterator[str]:
        nonlocal left, tail
        for piece in pieces:
            if left < len(piece):
                cut = _next_cut(piece, left)
                tail = piece[cut:]
                if cut:
                    yield piece[:cut]
                return
            left -= len(piece)
            yield piece

    def rest() -> Iterator[str]:
        yield tail
        yield from pieces

    yield replace(document, pieces=head())
    yield replace(document, pieces=rest())


def _next_cut(text: str, start: int) -> int:
    """The first cut from `start` on that leaves text on its right; `start` if there is none."""
    for cut in range(start, len(text.rstrip())):
        if text[cut].isspace() and not text[cut - 1 : cut].isspace():
            return cut
    return start


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{path} is not a complete gzip file: {error}") from None
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from None


@contextmanager
def _opened(path: Path, report: ReadReport) -> Iterator[tuple[BufferedIOBase, Callable[[], None]]]:
    """The file, unpacked, and a function that updates the number of bytes read."""
    with open(path, "rb") as raw:
        last_position = 0

        def update() -> None:
            nonlocal last_position
            position = raw.tell()
            report.bytes_read += position - last_position
            last_position = position

        if path.suffix.lower() == ".gz":
            with gzip.GzipFile(fileobj=raw) as unpacked:
                yield unpacked, update
        else:
            yield raw, update
        update()


def text_document(path: Path, report: ReadReport) -> Iterator[Document]:
    def chunks() -> Iterator[str]:
        decoder = codecs.getincrementaldecoder("utf-8")()
        with _reading(path), _opened(path, report) as (file, update):
            first = True
            while True:
                block = file.read(_BLOCK_BYTES)
                update()
                final = not block
                if first:
                    if b"\0" in block[:8192]:
                        raise DataError(f"{path} holds NUL bytes: it is not text in UTF-8")
                    block, first = block.removeprefix(codecs.BOM_UTF8), False
                try:
                    text = decoder.decode(block, final)
                except UnicodeDecodeError:
                    # A failed decoder keeps its state, so it can decode the same block again.
                    decoder.errors, document.replaced = "replace", True
                    text = decoder.decode(block, final)
                if text:
                    yield text
                if final:
                    return

    document = Document(str(path), chunks())
    yield document


def line_documents(path: Path, text_field: str, report: ReadReport) -> Iterator[Document]:
    with _reading(path), _opened(path, report) as (file, update):
        for number, line in enumerate(file, start=1):
            update()
            if number == 1:
                line = line.removeprefix(codecs.BOM_UTF8)
            if not line.strip():
                continue
            name = f"{path}, line {number}"
            text, replaced = _decode(line)
            try:
                row = parse_json(text)
            except ValueError as error:
                raise DataError(f"{name}: not JSON ({error})") from None
            if not isinstance(row, dict):
                raise DataError(
                    f"{name}: each line must be a JSON object with the field {text_field!r}, "
                    f"got {type(row).__name__}"
                )
            yield _row_document(row, text_field, name, replaced)


def parquet_documents(path: Path, text_field: str, report: ReadReport) -> Iterator[Document]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ModuleNotFoundError:
        raise DataError(
            f"{path}: parquet needs pyarrow, which is missing: {install_line('data')}"
        ) from None
    rows = 0
    try:
        with _reading(path), parquet.ParquetFile(path) as file:
            size = path.stat().st_size
            columns = file.schema_arrow.names
            if text_field not in columns:
                raise _no_field(str(path), text_field, columns)
            for batch in file.iter_batches(batch_size=_PARQUET_ROWS, columns=[text_field]):
                for value in batch.column(0).to_pylist():
                    rows += 1
                    yield _row_document({text_field: value}, text_field, f"{path}, row {rows}")
                report.bytes_read += size * len(batch) // max(file.metadata.num_rows, 1)
    except pyarrow.ArrowException as error:
        raise DataError(f"{path} is not a complete parquet file: {_one_line(error)}") from None


def parse_hf(spec: str) -> tuple[str, str | None, str]:
    name, config, split = (*spec.removeprefix("hf:").split(":", 2), "", "")[:3]
    if not name:
        raise DataError(f"{spec} names no dataset; write hf:NAME, hf:NAME:CONFIG or hf:NAME::SPLIT")
    return name, config or None, split or "train"


def hf_documents(spec: str, text_field: str) -> Iterator[Document]:
    name, config, split = parse_hf(spec)
    try:
        import datasets
    except ModuleNotFoundError:
        raise DataError(
            f"{spec} needs datasets, which is missing: {install_line('data')}"
        ) from None
    # Five attempts to reach the hub print ten lines of warnings; the error below says enough.
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    try:
        rows = datasets.load_dataset(name, config, split=split, streaming=True)
        for number, row in enumerate(rows, start=1):
            yield _row_document(dict(row), text_field, f"{spec}, row {number}")
    except DataError:
        raise
    except ConnectionError as error:
        raise DataError(
            f"cannot reach the Hugging Face hub for {spec}: check the connection and the name, or "
            f"download the dataset's files and give their paths ({_one_line(error)})"
        ) from None
    # The hub, the network and file formats raise exceptions without a common class.
    except Exception as error:
        raise DataError(f"cannot read {spec}: {type(error).__name__}: {_one_line(error)}") from None


def _row_document(
    row: dict[str, Any], text_field: str, name: str, replaced: bool = False
) -> Document:
    if text_field not in row:
        raise _no_field(name, text_field, row)
    text = "" if row[text_field] is None else row[text_field]
    if not isinstance(text, str):
        raise DataError(f"{name}: {text_field!r} must be text, got {type(text).__name__}")
    # JSON can hold half of a surrogate pair, which UTF-8 cannot encode.
    if not text.isascii() and _SURROGATES.search(text):
        text, replaced = _SURROGATES.sub("\ufffd", text), True
    return Document(name, iter((text,)), replaced=replaced)


def _no_field(name: str, text_field: str, known: Iterable[str]) -> DataError:
    return DataError(
        f"{name}: no field {text_field!r}; there are {sorted(map(str, known))}: "
        "name one with --text-field"
    )


def _decode(data: bytes) -> tuple[str, bool]:
    try:
        return data.decode(), False
    except UnicodeDecodeError:
        return data.decode(errors="replace"), True


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
