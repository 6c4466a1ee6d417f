"""The manifest of a dataset: what its files hold, and checksums that reveal damage.

    DIR/manifest.json      this; written last
    DIR/tokenizer.json     absent for bytes
    DIR/{train,valid}.bin  tokens, uint16 or uint32, little endian
    DIR/{train,valid}.docs.npy   where each document starts, int64

The same sources, tokenizer and seed give the same manifest, byte for byte.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mosar.errors import DataError
from mosar.files import file_checksum, parse_json, sealed, unsealed
from mosar.schema import decode
from mosar.version import __version__

FORMAT = "mosar-tokens"
VERSION = 1
MANIFEST = "manifest.json"
TOKENIZER = "tokenizer.json"
SPLITS = ("train", "valid")
_AGAIN = "prepare the dataset again (mosar prepare … --force)"


def tokens_file(split: str) -> str:
    return f"{split}.bin"


def documents_file(split: str) -> str:
    return f"{split}.docs.npy"


def token_dtype(vocab_size: int) -> str:
    """The smallest type that holds every token."""
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


@dataclass(frozen=True, kw_only=True)
class TokenizerEntry:
    """Which tokenizer made the tokens."""

    kind: str
    """"byte", or "file": the dataset's tokenizer.json."""
    origin: str
    """As given: "byte", "bpe:4096" or a path."""
    vocab_size: int
    end_of_text: int
    end_of_text_token: str | None
    """The end-of-text token as its file writes it."""


@dataclass(frozen=True, kw_only=True)
class FileEntry:
    """Size and checksum of a file."""

    bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class SplitEntry:
    """What a split holds."""

    documents: int
    tokens: int
    """End-of-text tokens included."""
    text_bytes: int
    """Bytes of the documents in UTF-8."""


@dataclass(frozen=True, kw_only=True)
class SourceEntry:
    """What was read from one source."""

    source: str
    """As given; the standard library with its version."""
    documents: int
    files: int
    files_passed_over: int
    """Files in a folder that are of no known kind."""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Everything about a dataset except its tokens."""

    tokenizer: TokenizerEntry
    dtype: str
    splits: dict[str, SplitEntry]
    files: dict[str, FileEntry]
    """Every file of the dataset except the manifest itself."""
    sources: list[SourceEntry]
    valid_sources: list[SourceEntry]
    """Empty if the sources were split."""
    split_rule: str
    """How the validation text was chosen."""
    valid_fraction: float | None
    seed: int
    text_field: str
    empty_documents: int
    """Documents that were skipped because they were empty."""
    replaced_documents: int
    """Documents with bytes that were not UTF-8 and became U+FFFD."""
    first_replaced: str | None
    """The name of the first of them."""
    made_by: str = f"mosar {__version__}"

    def to_json(self) -> str:
        values = {"format": FORMAT, "version": VERSION} | asdict(self)
        return json.dumps(sealed(values), indent=1) + "\n"

    @classmethod
    def read(cls, folder: Path | str) -> Manifest:
        """Reads the manifest of a dataset; a DataError if it is missing or damaged."""
        folder = Path(folder)
        path = folder / MANIFEST
        if not folder.is_dir():
            raise DataError(
                f"there is no dataset {folder}; "
                f"make one: mosar prepare stdlib --tokenizer bpe:4096 --out {folder}"
            )
        try:
            values = parse_json(path.read_bytes())
        except FileNotFoundError:
            raise DataError(
                f"{folder} is not a dataset (it has no {MANIFEST}); make one with mosar prepare"
            ) from None
        except OSError as error:
            raise DataError(f"cannot read {path}: {error.strerror}") from None
        except ValueError:
            raise DataError(f"{path} is damaged; {_AGAIN}") from None
        return cls._from_values(values, path)

    @classmethod
    def _from_values(cls, values: Any, path: Path) -> Manifest:
        if not isinstance(values, dict) or values.get("format") != FORMAT:
            raise DataError(f"{path} is not the manifest of a dataset made by mosar")
        version = values.get("version")
        if isinstance(version, int) and version > VERSION:
            raise DataError(
                f"{path} has format version {version}, this mosar reads {VERSION}: upgrade mosar, "
                "or prepare the dataset again"
            )
        try:
            values, is_sealed = unsealed(values)
        except ValueError:
            is_sealed = False
        if version != VERSION or not is_sealed:
            raise DataError(f"{path} was altered: its checksum is wrong; {_AGAIN}")
        del values["format"], values["version"]
        return decode(cls, values, str(path))

    def check_sizes(self, folder: Path | str) -> None:
        """Raises a DataError for the first file that is missing or has the wrong size."""
        for name, entry in self.files.items():
            path = Path(folder, name)
            try:
                size = path.stat().st_size
            except FileNotFoundError:
                raise DataError(f"{path} is missing; {_AGAIN}") from None
            except OSError as error:
                raise DataError(f"cannot read {path}: {error.strerror}") from None
            if size != entry.bytes:
                raise DataError(
                    f"{path} has {size} bytes and should have {entry.bytes}: it was cut off or "
                    f"belongs to another dataset; {_AGAIN}"
                )

    def verify(
        self,
        folder: Path | str,
        names: Iterable[str] | None = None,
        report: Callable[[int], None] | None = None,
    ) -> None:
        """Raises a DataError for the first file with a wrong checksum.

        names: check only these files. report: called with the bytes of every block that was read.
        """
        self.check_sizes(folder)
        for name in self.files if names is None else names:
            path = Path(folder, name)
            try:
                digest = file_checksum(path, report)
            except OSError as error:
                raise DataError(f"cannot read {path}: {error.strerror}") from None
            if digest != self.files[name].sha256:
                raise DataError(
                    f"{path} was altered or belongs to another dataset: its checksum is wrong; "
                    f"{_AGAIN}"
                )
