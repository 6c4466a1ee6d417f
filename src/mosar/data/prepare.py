"""`mosar prepare`: turns text into a dataset in one pass, or in two if it trains a BPE first.

Whole documents go to training or to validation. A single document is cut instead: its tail is held
out for validation.
"""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from numbers import Integral, Real
from pathlib import Path

from mosar.data.corpora import Source, find_source, read_documents, total_bytes
from mosar.data.documents import Document, ReadReport, cut_document, parse_hf
from mosar.data.manifest import (
    MANIFEST,
    SPLITS,
    TOKENIZER,
    FileEntry,
    Manifest,
    SourceEntry,
    documents_file,
    token_dtype,
    tokens_file,
)
from mosar.data.packing import SplitWriter, pack
from mosar.data.progress import Display
from mosar.data.tokenizer import (
    ByteTokenizer,
    Tokenizer,
    describe,
    parse_bpe,
    read_tokenizer,
    train_bpe,
)
from mosar.errors import DataError
from mosar.files import file_checksum, staged_folder, write_synced

SAMPLE_CHARACTERS = 1 << 27
"""A BPE is trained on the first characters of the training text, so that memory is bounded."""

_SEPARATE = "separate validation sources"
_BY_DOCUMENT = (
    "blake2b-64 of the document's first 2^18 characters, keyed by the seed, below valid_fraction; "
    "of the first two documents exactly one, chosen by the seed"
)
_TAIL = "the tail of the only document: the last valid_fraction of its characters"


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """What to read, and which of it is for validation."""

    sources: tuple[Source, ...]
    valid: tuple[Source, ...]
    valid_fraction: float
    seed: int
    text_field: str
    tail_start: int | None = None
    """If there is only one document: the character where its held-out tail starts."""

    @property
    def split_rule(self) -> str:
        if self.valid:
            return _SEPARATE
        return _BY_DOCUMENT if self.tail_start is None else _TAIL

    def documents(self, report: ReadReport) -> Iterator[tuple[str, Document]]:
        """Every document with its split, in the order of the sources."""
        every = (*self.sources, *self.valid)
        documents = read_documents(every, report, text_field=self.text_field)
        for index, document in enumerate(documents):
            if self.valid:
                yield SPLITS[document.source >= len(self.sources)], document
            elif self.tail_start is not None:
                yield from zip(SPLITS, cut_document(document, self.tail_start), strict=True)
            else:
                split = split_of(index, document.opening, self.seed, self.valid_fraction)
                yield split, document


def prepare(
    sources: Sequence[str],
    out: Path | str,
    *,
    tokenizer: str = "byte",
    valid: Sequence[str] = (),
    valid_fraction: float = 0.05,
    seed: int = 0,
    text_field: str = "text",
    end_of_text: str | None = None,
    force: bool = False,
    progress: bool = False,
) -> Manifest:
    """Makes the dataset `out` and returns its manifest. A failure leaves nothing behind.

    `tokenizer` is "byte", "bpe:VOCAB" (trained on the training documents) or the path of a
    tokenizer.json or of a dataset. Without `valid` sources, `valid_fraction` of the documents are
    for validation, or the tail of the only document. `end_of_text` names that token of a
    tokenizer.json.
    """
    bpe = _check_arguments(sources, tokenizer, valid_fraction, seed, end_of_text)
    plan = _Plan(
        sources=tuple(find_source(spec) for spec in sources),
        valid=tuple(find_source(spec) for spec in valid),
        valid_fraction=float(valid_fraction),
        seed=int(seed),
        text_field=text_field,
    )
    _check_overlap(plan)
    encoder: Tokenizer | None = None
    if bpe is None:
        encoder = ByteTokenizer() if tokenizer == "byte" else read_tokenizer(tokenizer, end_of_text)
    with (
        staged_folder(out, partial(_refuse, force=force)) as folder,
        Display(progress).open() as display,
    ):
        if not plan.valid:
            plan = replace(plan, tail_start=_find_tail(plan))
        if bpe is not None:
            encoder = _train(plan, bpe, display)
        assert encoder is not None
        return _build(plan, encoder, tokenizer, folder, display)


def check_dataset(folder: Path | str, *, progress: bool = False) -> Manifest:
    """Reads every byte of a dataset; a DataError names the first file with a wrong checksum."""
    manifest = Manifest.read(folder)
    done = 0

    def report(size: int) -> None:
        nonlocal done
        done += size
        display.update(done)

    with Display(progress).open() as display:
        display.begin("checking", sum(entry.bytes for entry in manifest.files.values()))
        manifest.verify(folder, report=report)
    return manifest


def split_of(index: int, opening: str, seed: int, valid_fraction: float) -> str:
    """ "train" or "valid" for a document, by its opening; equal documents go together.

    The seed divides the first two, so two documents are enough for both splits.
    """
    key = str(seed).encode()
    if index < 2:
        return SPLITS[index == hashlib.blake2b(key).digest()[0] % 2]
    digest = hashlib.blake2b(opening.encode(), digest_size=8, salt=b"split", key=key).digest()
    return SPLITS[int.from_bytes(digest, "big") < valid_fraction * 2**64]


def _check_arguments(
    sources: Sequence[str],
    tokenizer: str,
    valid_fraction: float,
    seed: int,
    end_of_text: str | None,
) -> int | None:
    if isinstance(sources, str) or not sources:
        raise ValueError(f"sources must be a list with at least one source, got {sources!r}")
    if not isinstance(valid_fraction, Real) or not 0 < valid_fraction < 1:
        raise ValueError(f"valid_fraction must lie between 0 and 1, got {valid_fraction!r}")
    if not isinstance(seed, Integral) or not 0 <= seed < 1 << 63:
        raise ValueError(f"seed must be an integer >= 0, got {seed!r}")
    bpe = parse_bpe(tokenizer)
    if end_of_text is not None and (bpe is not None or tokenizer == "byte"):
        raise ValueError("end_of_text is for a tokenizer.json; byte and bpe have their own")
    return bpe


def _find_tail(plan: _Plan) -> int | None:
    """Where the held-out tail starts if there is only one document; otherwise None."""
    first = list(islice(read_documents(plan.sources, ReadReport(), text_field=plan.text_field), 2))
    if len(first) != 1:
        return None
    (document,) = read_documents(plan.sources, ReadReport(), text_field=plan.text_field)
    length = sum(len(piece) for piece in document.pieces)
    if length < 2:
        raise DataError(
            f"{document.name} holds a single character; give more text, or name validation text "
            "with --valid"
        )
    return max(1, min(length - 1, round(length * (1 - plan.valid_fraction))))


def _check_overlap(plan: _Plan) -> None:
    train = {file.resolve() for source in plan.sources for file in source.files}
    train_hf = {parse_hf(source.spec) for source in plan.sources if source.kind == "hf"}
    for source in plan.valid:
        for file in source.files:
            if file.resolve() in train:
                raise DataError(f"{file} is among the training and the validation sources")
        if source.kind == "hf" and parse_hf(source.spec) in train_hf:
            raise DataError(f"{source.spec} is among the training and the validation sources")


def _refuse(out: Path, force: bool) -> None:
    """A DataError unless `out` holds a dataset, which may be damaged, and `force` is set."""
    ours = {MANIFEST, TOKENIZER}
    ours |= {name for split in SPLITS for name in (tokens_file(split), documents_file(split))}
    names = {path.name for path in out.iterdir()} if out.is_dir() else set()
    if MANIFEST not in names or not names <= ours:
        raise DataError(f"{out} holds something other than a dataset; choose another --out")
    if not force:
        raise DataError(f"{out} already holds a dataset; --force replaces it")


def _train(plan: _Plan, vocab_size: int, display: Display) -> Tokenizer:
    report = ReadReport()
    display.begin(f"training the tokenizer (bpe:{vocab_size})", total_bytes(plan.sources))

    def texts() -> Iterator[str]:
        left = SAMPLE_CHARACTERS
        for split, document in plan.documents(report):
            if split == "valid":
                if plan.valid:
                    return
                continue
            for piece in document.pieces:
                yield piece
                display.update(report.bytes_read)
                left -= len(piece)
                if left <= 0:
                    return

    return train_bpe(texts(), vocab_size)


def _build(
    plan: _Plan, tokenizer: Tokenizer, origin: str, folder: Path, display: Display
) -> Manifest:
    report = ReadReport()
    writers = {split: SplitWriter(folder, split, tokenizer) for split in SPLITS}
    display.begin("packing", total_bytes((*plan.sources, *plan.valid)))

    def pieces() -> Iterator[tuple[SplitWriter, str | None]]:
        for split, document in plan.documents(report):
            for piece in document.pieces:
                yield writers[split], piece
                tokens = sum(writer.tokens for writer in writers.values())
                display.update(report.bytes_read, f"{tokens:,} tokens")
            yield writers[split], None

    try:
        pack(pieces(), tokenizer)
        _check_found(plan, report)
        splits = {split: writer.finish() for split, writer in writers.items()}
    finally:
        for writer in writers.values():
            writer.close()
    content = tokenizer.file_bytes()
    if content is not None:
        write_synced(folder / TOKENIZER, content)
    every = [
        _source_entry(source, documents)
        for source, documents in zip((*plan.sources, *plan.valid), report.documents, strict=True)
    ]
    manifest = Manifest(
        tokenizer=describe(tokenizer, origin),
        dtype=token_dtype(tokenizer.vocab_size),
        splits=splits,
        files={
            path.name: FileEntry(bytes=path.stat().st_size, sha256=file_checksum(path))
            for path in sorted(folder.iterdir())
        },
        sources=every[: len(plan.sources)],
        valid_sources=every[len(plan.sources) :],
        split_rule=plan.split_rule,
        valid_fraction=None if plan.valid else plan.valid_fraction,
        seed=plan.seed,
        text_field=plan.text_field,
        empty_documents=report.empty,
        replaced_documents=report.replaced,
        first_replaced=report.first_replaced,
    )
    write_synced(folder / MANIFEST, manifest.to_json().encode())
    return manifest


def _check_found(plan: _Plan, report: ReadReport) -> None:
    """Raises a DataError if the training or the validation sources hold no text."""
    num_sources = len(plan.sources)
    for sources, documents in (
        (plan.sources, report.documents[:num_sources]),
        (plan.valid, report.documents[num_sources:]),
    ):
        if sources and not sum(documents):
            names = ", ".join(source.spec for source in sources)
            raise DataError(
                f"there is no text in {names} (skipped: {_count(report.empty, 'empty document')})"
            )


def _source_entry(source: Source, documents: int) -> SourceEntry:
    version = f" of Python {platform.python_version()}" if source.kind == "stdlib" else ""
    return SourceEntry(
        source=source.spec + version,
        documents=documents,
        files=len(source.files),
        files_passed_over=source.passed_over,
    )


def show_dataset(manifest: Manifest, folder: Path | str) -> str:
    """A summary of a dataset in a few lines."""
    rows = [
        (
            split,
            _count(entry.documents, "document"),
            _count(entry.tokens, "token"),
            f"{entry.text_bytes / entry.tokens:.2f} bytes per token",
        )
        for split, entry in manifest.splits.items()
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    ]
    tokenizer = manifest.tokenizer
    lines.append(
        f"{folder}: tokenizer {tokenizer.origin}, vocabulary {tokenizer.vocab_size:,}, "
        f"{manifest.dtype}"
    )
    return "\n".join(lines)


def notes(manifest: Manifest) -> list[str]:
    """Notes for the person who prepared a dataset."""
    found = []
    if manifest.split_rule == _TAIL:
        found.append(
            f"there is one document: its last {100 * (manifest.valid_fraction or 0):g} % are held "
            "out for validation; --valid names other text for it"
        )
    passed_over = sum(
        entry.files_passed_over for entry in (*manifest.sources, *manifest.valid_sources)
    )
    if passed_over:
        found.append(f"ignored: {_count(passed_over, 'file')} of other kinds")
    if manifest.empty_documents:
        found.append(f"skipped: {_count(manifest.empty_documents, 'empty document')}")
    if manifest.replaced_documents:
        found.append(
            f"bytes that are not UTF-8 were replaced by U+FFFD in "
            f"{_count(manifest.replaced_documents, 'document')}, "
            f"the first is {manifest.first_replaced}"
        )
    asked = parse_bpe(manifest.tokenizer.origin)
    if asked is not None and manifest.tokenizer.vocab_size < asked:
        found.append(
            f"the text is too short for a vocabulary of {asked:,}; it gave "
            f"{manifest.tokenizer.vocab_size:,} tokens"
        )
    return found


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
