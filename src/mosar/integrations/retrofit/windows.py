"""Windows of plain text in the model's own tokens.

A document gives as many windows as fit into it, from its beginning; shorter ones and what is left
over are joined, each ended by the end-of-text token. The first windows are for validation.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mosar.data.corpora import find_source, read_documents
from mosar.data.documents import ReadReport
from mosar.data.manifest import MANIFEST
from mosar.data.stream import TokenStream
from mosar.data.tokenizer import load_tokenizer
from mosar.errors import DataError

_PROBE = "The 3 quick brown foxes,\n  naïve & 12.5 % (so they say) jumped over λ-calculus."


@dataclass(frozen=True)
class Windows:
    """Token windows [number, length], int64."""

    train: Tensor
    valid: Tensor

    @property
    def fingerprint(self) -> str:
        digest = hashlib.sha256()
        for part in (self.valid, self.train):
            digest.update(f"{list(part.shape)}".encode())
            digest.update(np.ascontiguousarray(part.numpy()).data)
        return digest.hexdigest()


def read_windows(
    sources: Sequence[str],
    tokenizer: Any,
    length: int,
    *,
    train: int,
    valid: int,
    text_field: str = "text",
) -> Windows:
    """`valid` and then `train` windows; where there are fewer, training windows come again.

    sources: text as `mosar prepare` takes it, or one folder that it made with the same tokenizer.
    """
    folder = Path(sources[0]) if len(sources) == 1 else None
    if folder is not None and (folder / MANIFEST).is_file():
        found = _prepared(folder, tokenizer, length, valid, train)
    else:
        if tokenizer is None:
            raise DataError(
                "text needs the model's tokenizer, and it has none; give a dataset made with it"
            )
        found = _from_text(sources, tokenizer, length, valid + train, text_field)
    needed = valid + (1 if train else 0)
    if len(found) < needed:
        raise DataError(
            f"{', '.join(sources)} gives {len(found)} windows of {length} tokens, and "
            f"{needed} are needed; give more text or a smaller length"
        )
    rest = found[valid:]
    return Windows(rest[torch.arange(train) % max(len(rest), 1)], found[:valid])


def read_beginnings(
    sources: Sequence[str],
    tokenizer: Any,
    length: int,
    number: int,
    *,
    skip: int = 0,
    text_field: str = "text",
) -> Tensor:
    """The first `length` tokens of `number` documents that have as many, after the first `skip`."""
    if tokenizer is None:
        raise DataError("text needs the model's tokenizer, and it has none")
    found = []
    for tokens in _token_documents(sources, tokenizer, text_field, end=False):
        if len(tokens) >= length:
            found.append(tokens[:length])
        if len(found) == skip + number:
            return torch.from_numpy(np.stack(found[skip:]))
    raise DataError(
        f"{', '.join(sources)} has {len(found)} documents of at least {length} tokens, and "
        f"{skip + number} are needed; give more text, fewer documents or a smaller length"
    )


def _prepared(folder: Path, tokenizer: Any, length: int, valid: int, train: int) -> Tensor:
    """Windows of a prepared dataset: its validation split, then its training split."""
    if tokenizer is not None:
        own, theirs = load_tokenizer(folder), tokenizer
        if own.encode(_PROBE) != list(theirs.encode(_PROBE, add_special_tokens=False)):
            raise DataError(
                f"{folder} was made with another tokenizer than the model's; prepare the text with "
                "the model's tokenizer.json, or give the text itself"
            )
    parts = []
    for split, number in (("valid", valid), ("train", train)):
        stream = TokenStream(folder, split, verify=None)
        there = stream.num_windows(length)
        parts.append(stream.windows(range(min(there, number)), length)[:, :-1])
        if split == "valid" and there < number:
            raise DataError(
                f"{folder} has {there} validation windows of {length} tokens, and {number} are "
                "needed; give a smaller length"
            )
    return torch.cat(parts)


def _from_text(
    sources: Sequence[str], tokenizer: Any, length: int, number: int, text_field: str
) -> Tensor:
    windows = []
    for window in _cut(_token_documents(sources, tokenizer, text_field), length):
        windows.append(window)
        if len(windows) == number:
            break
    if not windows:
        return torch.empty(0, length, dtype=torch.int64)
    return torch.from_numpy(np.stack(windows))


def _token_documents(
    sources: Sequence[str], tokenizer: Any, text_field: str, *, end: bool = True
) -> Iterator[np.ndarray]:
    """The tokens of each document, by default with that which ends a text."""
    last = getattr(tokenizer, "eos_token_id", None) if end else None
    found = [find_source(source) for source in sources]
    for document in read_documents(found, ReadReport(), text_field=text_field):
        tokens: list[int] = []
        for piece in document.pieces:
            # Not verbose: a document may be longer than the context of the model.
            tokens += tokenizer.encode(piece, add_special_tokens=False, verbose=False)
        if last is not None:
            tokens.append(last)
        yield np.array(tokens, dtype=np.int64)


def _cut(documents: Iterator[np.ndarray], length: int) -> Iterator[np.ndarray]:
    rest = np.empty(0, dtype=np.int64)
    for tokens in documents:
        whole = len(tokens) // length * length
        yield from tokens[:whole].reshape(-1, length)
        rest = np.concatenate([rest, tokens[whole:]])
        while len(rest) >= length:
            yield rest[:length]
            rest = rest[length:]
