"""Sources of text, read as a stream of documents that is never in memory as a whole.

A source is a file, a folder, `stdlib` or `hf:NAME[:CONFIG][:SPLIT]`. Documents keep the order of
the sources; the files of a folder are sorted by path.
"""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path

from mosar.data.documents import (
    Document,
    ReadReport,
    cut_pieces,
    hf_documents,
    line_documents,
    parquet_documents,
    parse_hf,
    text_document,
)
from mosar.errors import DataError

TEXT_SUFFIXES = (".txt", ".text", ".md", ".rst", ".py")
LINES_SUFFIXES = (".jsonl", ".ndjson")
_COMPRESSED = (".bz2", ".xz", ".zst", ".zip", ".tar", ".tgz", ".7z")


@dataclass(frozen=True, kw_only=True)
class Source:
    """One source, found but not yet read."""

    spec: str
    """As it was given."""
    kind: str
    """"file", "folder", "stdlib" or "hf"."""
    files: tuple[Path, ...] = ()
    """The files to read, in this order; empty for "hf"."""
    passed_over: int = 0
    """Number of files in a folder that are of no known kind."""


def find_source(spec: str) -> Source:
    """The source that `spec` names; a DataError if there is none."""
    if spec == "stdlib":
        return Source(spec=spec, kind="stdlib", files=_stdlib_files())
    if spec.startswith("hf:"):
        parse_hf(spec)
        return Source(spec=spec, kind="hf")
    path = Path(spec)
    if path.is_dir():
        listed = list(_walk(path))
        files = tuple(file for file in listed if _is_known(file))
        if not files:
            known = ", ".join((*TEXT_SUFFIXES, *LINES_SUFFIXES, ".parquet"))
            raise DataError(f"{spec} has no file that ends in {known}, also with .gz")
        return Source(spec=spec, kind="folder", files=files, passed_over=len(listed) - len(files))
    if path.is_file():
        if path.suffix.lower() in _COMPRESSED:
            raise DataError(
                f"{spec} is compressed in a format that mosar does not read; unpack it first"
            )
        return Source(spec=spec, kind="file", files=(path,))
    if path.exists():
        raise DataError(f"{spec} is neither a file nor a folder; a source is read twice")
    raise DataError(f"{spec} does not exist; a source is a file, a folder, stdlib or hf:NAME")


def total_bytes(sources: Sequence[Source]) -> int | None:
    """Bytes on disk; None if a source does not know."""
    if any(source.kind == "hf" for source in sources):
        return None
    return sum(file.stat().st_size for source in sources for file in source.files)


def read_documents(
    sources: Sequence[Source], report: ReadReport, *, text_field: str = "text"
) -> Iterator[Document]:
    """Every document that is not empty, in order; updates `report`."""
    report.documents = [0] * len(sources)
    for number, source in enumerate(sources):
        for document in _documents_of(source, text_field, report):
            pieces = cut_pieces(document.pieces)
            head = list(islice(pieces, 2))
            if len(head) < 2 and not "".join(head).strip():
                report.empty += 1
                continue
            document.opening, document.pieces = head[0], chain(head, pieces)
            document.source = number
            report.documents[number] += 1
            yield document
            if document.replaced:
                report.replaced += 1
                report.first_replaced = report.first_replaced or document.name


def _stdlib_files() -> tuple[Path, ...]:
    folder = Path(sysconfig.get_path("stdlib"))
    # Leave out installed packages, and the tests, which not every system installs.
    left_out = {"site-packages", "dist-packages", "test", "tests"}
    files = tuple(file for file in _walk(folder, left_out) if file.suffix == ".py")
    if not files:
        raise DataError(
            f"this Python has no sources of its standard library in {folder}; give text files"
        )
    return files


def _walk(folder: Path, left_out: Iterable[str] = ()) -> Iterator[Path]:
    """The files below a folder, sorted by path, without hidden ones."""
    skipped = {"__pycache__", *left_out}

    def visible(names: list[str]) -> list[str]:
        return sorted(name for name in names if name not in skipped and not name.startswith("."))

    def fail(error: OSError) -> None:
        raise DataError(f"cannot read {error.filename}: {error.strerror}")

    for parent, folders, files in os.walk(folder, onerror=fail):
        folders[:] = visible(folders)
        for name in visible(files):
            path = Path(parent, name)
            if path.is_file():
                yield path


def _format(path: Path) -> tuple[str, bool]:
    """The suffix of the format, and whether the file is gzipped."""
    suffix = path.suffix.lower()
    if suffix == ".gz":
        return Path(path.stem).suffix.lower(), True
    return suffix, False


def _is_known(path: Path) -> bool:
    suffix, gzipped = _format(path)
    return suffix in (*TEXT_SUFFIXES, *LINES_SUFFIXES) or (suffix == ".parquet" and not gzipped)


def _documents_of(source: Source, text_field: str, report: ReadReport) -> Iterator[Document]:
    if source.kind == "hf":
        yield from hf_documents(source.spec, text_field)
    for file in source.files:
        suffix, gzipped = _format(file)
        if suffix == ".parquet":
            if gzipped:
                raise DataError(f"{file}: parquet must not be compressed again; unpack it first")
            yield from parquet_documents(file, text_field, report)
        elif suffix in (*LINES_SUFFIXES, ".json"):
            yield from line_documents(file, text_field, report)
        else:
            yield from text_document(file, report)
