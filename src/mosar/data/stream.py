"""The packed token stream: one long row of documents, read in windows through a memory map.

Window i of length L holds the L + 1 tokens [i·L, (i+1)·L]: the inputs and, shifted by one, their
targets. The windows tile the stream; a rest at the end that is shorter than a window is not read.
The windows of a batch are a pure function of step and seed, so a run resumes without state.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from numbers import Integral
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from mosar.data.manifest import SPLITS, Manifest, documents_file, tokens_file
from mosar.errors import DataError

VERIFY_LIMIT = 2 << 30
"""`verify=None` checks splits of up to this many bytes, which takes a second or two."""

_ROUNDS = 6

Indices = Sequence[int] | NDArray[np.integer] | torch.Tensor


class TokenStream:
    """One split of a dataset; a DataError if a file is missing or has the wrong size."""

    def __init__(
        self, folder: Path | str, split: str = "train", *, verify: bool | None = False
    ) -> None:
        """verify: also compare the checksums; None: only if the split is at most 2 GiB."""
        if split not in SPLITS:
            raise ValueError(f"split must be one of {SPLITS}, got {split!r}")
        self.folder, self.split = Path(folder), split
        self.manifest = Manifest.read(folder)
        names = [tokens_file(split), documents_file(split)]
        self.manifest.check_sizes(folder)
        if verify or (verify is None and self.manifest.files[names[0]].bytes <= VERIFY_LIMIT):
            others = (name for name in self.manifest.files if not name.startswith(SPLITS))
            self.manifest.verify(folder, (*names, *others))
        entry = self.manifest.splits[split]
        self.num_tokens = entry.tokens
        self.num_documents = entry.documents
        self.vocab_size = self.manifest.tokenizer.vocab_size
        self.end_of_text = self.manifest.tokenizer.end_of_text
        dtype = np.dtype(self.manifest.dtype).newbyteorder("<")
        # Slices of a plain array cost less than those of a memmap.
        self._tokens = np.asarray(np.memmap(self.folder / names[0], dtype=dtype, mode="r"))
        self._starts = _load_starts(self.folder / names[1], entry.documents)

    @property
    def checksum(self) -> str:
        """sha256 of the tokens, which identifies the stream."""
        return self.manifest.files[tokens_file(self.split)].sha256

    def num_windows(self, length: int) -> int:
        """How many windows of `length` inputs there are."""
        if not isinstance(length, Integral) or length < 1:
            raise ValueError(f"length must be an integer >= 1, got {length!r}")
        return max(self.num_tokens - 1, 0) // int(length)

    def windows(self, indices: Indices, length: int) -> torch.Tensor:
        """Tokens [B, length + 1], int64: inputs are [:, :-1], targets [:, 1:]."""
        tokens_BT = np.empty((len(indices), length + 1), dtype=np.int64)
        for row, start in zip(tokens_BT, self._window_starts(indices, length), strict=True):
            row[:] = self._tokens[start : start + length + 1]
        return torch.from_numpy(tokens_BT)

    def segments(self, indices: Indices, length: int) -> torch.Tensor:
        """The document of every input [B, length], int64, counted over the split.

        An end-of-text token belongs to the document after it, so that the first token of a document
        is predicted from its own document too.
        """
        starts_B = self._window_starts(indices, length)
        positions_BT = starts_B[:, None] + np.arange(1, length + 1)
        document_BT = np.searchsorted(self._starts, positions_BT, side="right") - 1
        return torch.from_numpy(document_BT.astype(np.int64, copy=False))

    def _window_starts(self, indices: Indices, length: int) -> NDArray[np.int64]:
        number = self.num_windows(length)
        chosen = np.asarray(indices, dtype=np.int64)
        if chosen.ndim != 1:
            raise ValueError(f"indices must have one dimension, got {chosen.ndim}")
        if chosen.size and (chosen.min() < 0 or chosen.max() >= number):
            raise ValueError(
                f"indices must lie in [0, {number}), the windows of length {length}, "
                f"got {chosen.min()} to {chosen.max()}"
            )
        return chosen * int(length)


def batch_indices(step: int, batch_size: int, num_windows: int, seed: int) -> NDArray[np.int64]:
    """The windows of batch `step` (from 0): slice [step·B, (step+1)·B) of all epochs in a row."""
    if num_windows < 1:
        raise ValueError("num_windows must be >= 1: the data is shorter than one window")
    if step < 0 or batch_size < 1:
        raise ValueError(
            f"step must be >= 0 and batch_size >= 1, got step={step}, batch_size={batch_size}"
        )
    first = step * batch_size
    epochs, offsets = np.divmod(np.arange(first, first + batch_size, dtype=np.int64), num_windows)
    indices = np.empty_like(offsets)
    for epoch in np.unique(epochs):
        chosen = epochs == epoch
        indices[chosen] = _permute(offsets[chosen], num_windows, seed, int(epoch))
    return indices


def _permute(offsets: NDArray[np.int64], size: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """A keyed permutation of [0, size), computed per element, without a table of the epoch.

    A Feistel network permutes the next power of four; results outside [0, size) are permuted again
    until they are inside. numpy's shuffle would not do: its order may change with its version.
    """
    half = np.uint64(max((max(size - 1, 1).bit_length() + 1) // 2, 1))
    mask = np.uint64((1 << int(half)) - 1)
    digest = hashlib.blake2b(f"{seed}/{epoch}".encode(), digest_size=8 * _ROUNDS).digest()
    keys = np.frombuffer(digest, dtype="<u8")
    values = offsets.astype(np.uint64)
    is_outside = np.ones(values.shape, dtype=bool)
    while is_outside.any():
        left, right = values[is_outside] >> half, values[is_outside] & mask
        for key in keys:
            left, right = right, left ^ (_mix(right ^ key) & mask)
        values[is_outside] = left << half | right
        is_outside = values >= np.uint64(size)
    return values.astype(np.int64)


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of splitmix64."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _load_starts(path: Path, documents: int) -> NDArray[np.int64]:
    try:
        starts = np.load(path, mmap_mode="r")
    except (OSError, ValueError) as error:
        raise DataError(f"{path} is damaged: {error}; prepare the dataset again") from None
    if starts.shape != (documents,) or starts.dtype != np.dtype("<i8"):
        raise DataError(f"{path} belongs to another dataset; prepare the dataset again")
    return starts
