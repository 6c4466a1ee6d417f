"""A folder that appears whole or not at all: built beside its place, flushed, then renamed.

Beside OUT there may be `.OUT.partial` (being built; what a killed process leaves is removed by the
next one) and, for an instant while OUT is replaced, `.OUT.replaced`.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from mosar.errors import DataError
from mosar.files import make_folder, sync


@contextmanager
def staged_folder(
    out: Path | str, *, replace: bool, replaceable: Callable[[Path], bool]
) -> Iterator[Path]:
    """An empty folder to fill; when the block ends well it is `out`, otherwise it is gone.

    An existing `out` is replaced only if `replace` is set and `replaceable` knows it.
    """
    # A link stays, and what it leads to is replaced.
    out = Path(os.path.realpath(out))
    staging, replaced = (out.with_name(f".{out.name}.{end}") for end in ("partial", "replaced"))
    make_folder(out.parent, named=out)
    with _owned(staging, out):
        try:
            _finish_replacement(out, replaced)
            _check_target(out, replace, replaceable)
            _clear(staging)
            yield staging
            sync(staging)
            if out.is_dir() and any(out.iterdir()):
                _check_target(out, replace, replaceable)
                os.rename(out, replaced)
            os.rename(staging, out)
            sync(out.parent)
            shutil.rmtree(replaced, ignore_errors=True)
        except BaseException:
            shutil.rmtree(staging, ignore_errors=True)
            _finish_replacement(out, replaced)
            raise


def _check_target(out: Path, replace: bool, replaceable: Callable[[Path], bool]) -> None:
    if not os.path.lexists(out) or (out.is_dir() and not any(out.iterdir())):
        return
    if not out.is_dir() or not replaceable(out):
        raise DataError(f"{out} holds something else than a dataset; choose another --out")
    if not replace:
        raise DataError(f"{out} holds a dataset already; --force replaces it")


def _finish_replacement(out: Path, replaced: Path) -> None:
    """Undoes or completes a replacement that was cut short between its two renames."""
    if not replaced.exists():
        return
    if out.exists():
        shutil.rmtree(replaced)
    else:
        os.rename(replaced, out)


def _clear(folder: Path) -> None:
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


@contextmanager
def _owned(staging: Path, out: Path) -> Iterator[None]:
    """Makes the folder and holds a lock on it, which ends with this process however it ends."""
    try:
        import fcntl
    except ModuleNotFoundError:
        make_folder(staging, named=out)
        yield
        return
    busy = DataError(f"another process is preparing {out}; wait for it or choose another --out")
    make_folder(staging, named=out)
    try:
        descriptor = os.open(staging, os.O_RDONLY)
    except FileNotFoundError:
        raise busy from None
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise busy from None
        except OSError:
            # A file system without locks: nothing can be told about others.
            pass
        if not staging.exists() or not os.path.samestat(os.fstat(descriptor), os.stat(staging)):
            # Another process finished between our two looks at the folder.
            raise busy
        yield
    finally:
        os.close(descriptor)
