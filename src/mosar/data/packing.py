"""Packs documents: for each split, one file of tokens and one of document starts."""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from mosar.data.manifest import SplitEntry, documents_file, token_dtype, tokens_file
from mosar.data.tokenizer import Tokenizer

_BATCH_CHARACTERS = 1 << 20
_STARTS_HELD = 1 << 16


class SplitWriter:
    """Writes one split: the tokens of its documents, each followed by end-of-text."""

    def __init__(self, folder: Path, split: str, tokenizer: Tokenizer) -> None:
        self._dtype = np.dtype(token_dtype(tokenizer.vocab_size)).newbyteorder("<")
        self._end = np.array([tokenizer.end_of_text], dtype=self._dtype).tobytes()
        self._tokens_file = open(folder / tokens_file(split), "wb")  # noqa: SIM115
        self._starts_file = open(folder / documents_file(split), "wb")  # noqa: SIM115
        self._starts = array("q")
        self._start = self.tokens = self.documents = self.text_bytes = 0
        # The header has the same size for any number of documents; it is rewritten at the end.
        self._write_header()

    def write(self, ids: np.ndarray) -> None:
        self._tokens_file.write(ids.astype(self._dtype).tobytes())
        self.tokens += len(ids)

    def end_document(self) -> None:
        self._tokens_file.write(self._end)
        self.tokens += 1
        self._starts.append(self._start)
        self._start = self.tokens
        self.documents += 1
        if len(self._starts) == _STARTS_HELD:
            self._flush_starts()

    def finish(self) -> SplitEntry:
        """Flushes both files to the disk."""
        self._flush_starts()
        body = self._starts_file.tell() - 8 * self.documents
        self._starts_file.seek(0)
        self._write_header()
        assert self._starts_file.tell() == body
        for file in (self._tokens_file, self._starts_file):
            file.flush()
            os.fsync(file.fileno())
            file.close()
        return SplitEntry(documents=self.documents, tokens=self.tokens, text_bytes=self.text_bytes)

    def close(self) -> None:
        self._tokens_file.close()
        self._starts_file.close()

    def _flush_starts(self) -> None:
        self._starts_file.write(np.array(self._starts, dtype="<i8").tobytes())
        self._starts = array("q")

    def _write_header(self) -> None:
        header = {"descr": "<i8", "fortran_order": False, "shape": (self.documents,)}
        np.lib.format.write_array_header_1_0(self._starts_file, header)


def pack(pieces: Iterable[tuple[SplitWriter, str | None]], tokenizer: Tokenizer) -> None:
    """Encodes pieces in batches and writes each with its writer; None ends a document."""
    batch: list[tuple[SplitWriter, str | None]] = []
    held = 0
    for writer, piece in pieces:
        batch.append((writer, piece))
        held += 1 if piece is None else len(piece)
        if held >= _BATCH_CHARACTERS:
            _write_batch(batch, tokenizer)
            batch, held = [], 0
    _write_batch(batch, tokenizer)


def _write_batch(batch: list[tuple[SplitWriter, str | None]], tokenizer: Tokenizer) -> None:
    encoded = iter(tokenizer.encode_batch([piece for _, piece in batch if piece is not None]))
    for writer, piece in batch:
        if piece is None:
            writer.end_document()
        else:
            writer.write(next(encoded))
            writer.text_bytes += len(piece) if piece.isascii() else len(piece.encode())
