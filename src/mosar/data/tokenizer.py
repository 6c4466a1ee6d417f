"""Tokenizers: bytes, or a BPE that is trained or loaded with the `tokenizers` package.

Every tokenizer has an end-of-text token. It ends each document, and no text encodes to it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from mosar.data.manifest import MANIFEST, TOKENIZER, Manifest, TokenizerEntry
from mosar.errors import DataError
from mosar.lazy import install_line

END_OF_TEXT = "<|endoftext|>"
# Names of the end-of-text token in other tokenizer files.
_END_OF_TEXT_NAMES = (END_OF_TEXT, "<|end_of_text|>", "<eos>", "</s>", "<|eot_id|>", "[EOS]")
SMALLEST_BPE = 257
"""The bytes and end-of-text."""
LARGEST_BPE = 1 << 20
"""Four times the paper's; training allocates memory for all of it at its start."""


class Tokenizer(Protocol):
    """What every tokenizer offers."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def end_of_text(self) -> int:
        """The token that ends a document."""
        ...

    def encode(self, text: str) -> list[int]: ...

    def encode_batch(self, texts: Sequence[str]) -> Iterator[np.ndarray]:
        """The tokens of each text."""
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """The text without end-of-text; bytes that are not UTF-8 become U+FFFD."""
        ...

    def file_bytes(self) -> bytes | None:
        """The content of its tokenizer.json, if it needs one."""
        ...


class ByteTokenizer:
    """One token per byte of UTF-8; 256 is end-of-text."""

    vocab_size = 257
    end_of_text = 256

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_batch(self, texts: Sequence[str]) -> Iterator[np.ndarray]:
        for text in texts:
            yield np.frombuffer(text.encode(), dtype=np.uint8)

    def decode(self, ids: Iterable[int]) -> str:
        return bytes(i for i in ids if i != self.end_of_text).decode(errors="replace")

    def file_bytes(self) -> None:
        return None


class FileTokenizer:
    """A tokenizer of the `tokenizers` package, from the content of its tokenizer.json."""

    def __init__(self, content: bytes, name: str, end_of_text: str | None = None) -> None:
        """`name` is for messages; without `end_of_text` the usual names are tried."""
        self._content = content
        try:
            self._tokenizer = _tokenizers().Tokenizer.from_str(content.decode())
        except Exception as error:  # The package raises plain Exception.
            raise DataError(f"{name} is not a tokenizer.json: {error}") from None
        # The file may set truncation and padding for another model.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        # "<|endoftext|>" written in a document is ordinary text.
        self._tokenizer.encode_special_tokens = True
        names = _END_OF_TEXT_NAMES if end_of_text is None else (end_of_text,)
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        found = [token for token in names if token in vocabulary]
        if not found:
            raise DataError(
                f"{name} has no token {' or '.join(names)} to end documents with; "
                "name one with --end-of-text"
            )
        self.end_of_text_token = found[0]
        self.end_of_text = vocabulary[found[0]]
        # Ids may have gaps; the embedding needs a row for the largest one.
        self.vocab_size = max(vocabulary.values()) + 1

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> Iterator[np.ndarray]:
        # The fast variant omits offsets, which are not needed here.
        for encoding in self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False):
            yield np.array(encoding.ids, dtype=np.uint32)

    def decode(self, ids: Iterable[int]) -> str:
        return self._tokenizer.decode([int(i) for i in ids if i != self.end_of_text])

    def file_bytes(self) -> bytes:
        return self._content


def describe(tokenizer: Tokenizer, origin: str) -> TokenizerEntry:
    """Its entry in a manifest."""
    token = tokenizer.end_of_text_token if isinstance(tokenizer, FileTokenizer) else None
    return TokenizerEntry(
        kind="byte" if token is None else "file",
        origin=origin,
        vocab_size=tokenizer.vocab_size,
        end_of_text=tokenizer.end_of_text,
        end_of_text_token=token,
    )


def train_bpe(texts: Iterable[str], vocab_size: int) -> FileTokenizer:
    """A byte-level BPE of at most `vocab_size` tokens, end-of-text among them."""
    package = _tokenizers()
    tokenizer = package.Tokenizer(package.models.BPE())
    tokenizer.pre_tokenizer = package.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = package.decoders.ByteLevel()
    trainer = package.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=package.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(iter(texts), trainer)
    return FileTokenizer(tokenizer.to_str(pretty=True).encode(), "the trained tokenizer")


def load_tokenizer(folder: Path | str) -> Tokenizer:
    """The tokenizer of a dataset, checked against its manifest."""
    manifest = Manifest.read(folder)
    if manifest.tokenizer.kind == "byte":
        return ByteTokenizer()
    manifest.verify(folder, (TOKENIZER,))
    path = Path(folder, TOKENIZER)
    return FileTokenizer(path.read_bytes(), str(path), manifest.tokenizer.end_of_text_token)


def read_tokenizer(path: Path | str, end_of_text: str | None = None) -> Tokenizer:
    """The tokenizer of a tokenizer.json, of a folder with one, or of a dataset."""
    path = Path(path)
    if path.is_dir():
        if (path / MANIFEST).is_file():
            return load_tokenizer(path)
        path = path / TOKENIZER
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise DataError(
            f"there is no tokenizer {path}: give byte, bpe:VOCAB, or the path of a tokenizer.json, "
            "of a folder with one or of a dataset; names on a hub are not looked up: download "
            "the model's tokenizer.json and give its path"
        ) from None
    except OSError as error:
        raise DataError(f"cannot read the tokenizer {path}: {error.strerror}") from None
    return FileTokenizer(content, str(path), end_of_text)


def parse_bpe(spec: str) -> int | None:
    """The vocabulary size in `bpe:VOCAB`; None if `spec` is something else."""
    kind, _, size = spec.partition(":")
    if kind != "bpe":
        return None
    number = int(size) if size.isascii() and size.isdecimal() and len(size) < 20 else 0
    if not SMALLEST_BPE <= number <= LARGEST_BPE:
        raise ValueError(
            f"tokenizer must be byte, bpe:VOCAB with VOCAB from {SMALLEST_BPE} to {LARGEST_BPE}, "
            f"or a path, got {spec!r}"
        )
    return number


def _tokenizers() -> Any:
    try:
        import tokenizers
        import tokenizers.decoders
        import tokenizers.models
        import tokenizers.pre_tokenizers
        import tokenizers.trainers
    except ModuleNotFoundError:
        raise DataError(
            f"only the byte tokenizer works without tokenizers: {install_line('data')}"
        ) from None
    return tokenizers
