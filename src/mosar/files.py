"""Atomic writes, locks, checksums and JSON, so that files are complete and damage is found.

    checksum = sha256(before + JSON of the values, keys sorted)

An object holds it in its field `checksum`; a line of a JSONL file holds its first 16 digits.
`before` is "", except where a line's checksum also covers the lines before it. Data without a
checksum is accepted.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mosar.errors import ModelError, MosarError

CHECKSUM = "checksum"
LINE_DIGITS = 16
# Far deeper than anything we write; Python's own limit is about 1,000.
_DEEPEST = 100


def parse_json(data: bytes | str) -> Any:
    """Parses JSON; a ValueError if it is invalid or nested too deeply."""
    try:
        values = json.loads(data)
    except RecursionError:
        raise ValueError(f"it is nested more than {_DEEPEST} deep") from None
    openings = ("[", "{") if isinstance(data, str) else (b"[", b"{")
    if sum(map(data.count, openings)) > _DEEPEST and _is_deep(values):  # pyright: ignore[reportArgumentType]
        raise ValueError(f"it is nested more than {_DEEPEST} deep")
    return values


def _is_deep(values: Any) -> bool:
    level = [values]
    for _ in range(_DEEPEST + 1):
        holders = [v.values() if isinstance(v, dict) else v for v in level if _holds(v)]
        level = [value for holder in holders for value in holder]
    return bool(level)


def _holds(value: Any) -> bool:
    return isinstance(value, dict | list)


def checksum(values: Mapping[str, Any], before: str = "") -> str:
    return hashlib.sha256((before + json.dumps(values, sort_keys=True)).encode()).hexdigest()


def sealed(
    values: Mapping[str, Any], before: str = "", digits: int | None = None
) -> dict[str, Any]:
    """The values as JSON, with their checksum; NaN is a ValueError."""
    plain = json.loads(json.dumps(values, allow_nan=False))
    return plain | {CHECKSUM: checksum(plain, before)[:digits]}


def unsealed(values: Any, before: str = "") -> tuple[dict[str, Any], bool]:
    """The values without their checksum, and whether there was one; a ValueError if it is wrong."""
    if not isinstance(values, dict):
        raise ValueError(f"it must be a JSON object, got {type(values).__name__}")
    plain = {key: value for key, value in values.items() if key != CHECKSUM}
    if CHECKSUM not in values:
        return plain, False
    found = values[CHECKSUM]
    if not isinstance(found, str) or len(found) < LINE_DIGITS:
        raise ValueError(f"its checksum is {found!r:.80}")
    if not checksum(plain, before).startswith(found):
        raise ValueError("it was altered after it was written (its checksum is wrong)")
    return plain, True


def file_checksum(path: Path, report: Callable[[int], None] | None = None) -> str:
    """sha256 of a file; `report` is called with the bytes of every block that was read."""
    digest = hashlib.sha256()
    with open(path, "rb", buffering=0) as file:
        while block := file.read(1 << 20):
            digest.update(block)
            if report is not None:
                report(len(block))
    return digest.hexdigest()


def write_synced(path: Path, data: bytes) -> None:
    """Writes a file and flushes it to the disk."""
    try:
        with open(path, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise _naming(error, path) from None


def replace_synced(path: Path, data: bytes) -> None:
    """Replaces a file atomically."""
    beside = path.with_name(f".{path.name}.unfinished")
    try:
        write_synced(beside, data)
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)
    sync(path.parent)


def sync(path: Path) -> None:
    """Flushes a file or the entries of a folder to the disk."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except PermissionError:
        if os.name == "nt":  # Windows opens no folders.
            return
        raise
    try:
        os.fsync(descriptor)
    except OSError as error:
        raise _naming(error, path) from None
    finally:
        os.close(descriptor)


def check_folder(folder: Path, what: str, command: str) -> None:
    """A ModelError where there is no such folder; `command` makes one."""
    if not folder.is_dir():
        raise ModelError(f"there is no {what} {folder}; make one with {command}")


def make_folder(folder: Path, named: Path | None = None) -> None:
    """Makes a folder if it is missing; an OSError names `named`, by default the folder itself."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        shown = folder if named is None else named
        reason = f"the folder cannot be made ({error.strerror})"
        if isinstance(error, FileExistsError | NotADirectoryError):
            reason = "a file is in the place of a folder"
        raise OSError(error.errno, f"{reason}; give another --out", str(shown)) from None


def take_lock(descriptor: int) -> bool:
    """Locks an open file or folder until it is closed; False if another process has the lock.

    Always True on systems and file systems without locks.
    """
    try:
        import fcntl
    except ModuleNotFoundError:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


@contextmanager
def staged_folder(out: Path | str, refuse: Callable[[Path], None]) -> Iterator[Path]:
    """An empty folder to fill. It becomes `out` if the block succeeds, and is removed otherwise.

    `refuse` raises if an existing file or folder must not be replaced. Next to OUT there may be
    `.OUT.partial` (being built; the next process removes what a killed one left) and, for an
    instant while OUT is replaced, `.OUT.replaced`.
    """
    # If `out` is a link, replace its target.
    out = Path(os.path.realpath(out))
    staging, replaced = (out.with_name(f".{out.name}.{end}") for end in ("partial", "replaced"))
    make_folder(out.parent, named=out)
    with _held(staging, out):
        try:
            _finish_replacement(out, replaced)
            if _holds_something(out):
                refuse(out)
            for path in staging.iterdir():
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
            yield staging
            sync(staging)
            if _holds_something(out):
                refuse(out)
                os.rename(out, replaced)
            os.rename(staging, out)
            sync(out.parent)
            shutil.rmtree(replaced, ignore_errors=True)
        except BaseException:
            shutil.rmtree(staging, ignore_errors=True)
            _finish_replacement(out, replaced)
            raise


def _holds_something(out: Path) -> bool:
    return os.path.lexists(out) and not (out.is_dir() and not any(out.iterdir()))


def _finish_replacement(out: Path, replaced: Path) -> None:
    """Undoes or completes a replacement that was interrupted between its two renames."""
    if not replaced.exists():
        return
    if out.exists():
        shutil.rmtree(replaced)
    else:
        os.rename(replaced, out)


@contextmanager
def _held(staging: Path, out: Path) -> Iterator[None]:
    """Makes the folder and holds its lock."""
    busy = MosarError(f"another process is making {out}; wait for it or choose another --out")
    make_folder(staging, named=out)
    try:
        descriptor = os.open(staging, os.O_RDONLY)
    except FileNotFoundError:
        raise busy from None
    except PermissionError:
        if os.name != "nt":  # Windows opens no folders.
            raise
        yield
        return
    try:
        taken = take_lock(descriptor)
        # Another process may have finished between our two looks at the folder.
        same = staging.exists() and os.path.samestat(os.fstat(descriptor), os.stat(staging))
        if not taken or not same:
            raise busy
        yield
    finally:
        os.close(descriptor)


@contextmanager
def rust_os_errors(path: Path) -> Iterator[None]:
    """Turns errors of Rust packages, like "… (os error 28)", into an OSError."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        number = re.search(r"\(os error (\d+)\)", str(error))
        if number is None:
            raise
        code = int(number[1])
        raise OSError(code, os.strerror(code), str(path)) from None


def _naming(error: OSError, path: Path) -> OSError:
    """The same error with the name of its file."""
    return OSError(error.errno, error.strerror or str(error), str(path))
