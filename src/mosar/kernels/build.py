"""Compiles csrc/ on first use and caches the result, one per source, torch, compiler and CPU.

The library is written to a temporary file and renamed, under a lock: several processes that start
together build it once, and none sees half a file. Its checksum is stored beside it. Loading a file
that a full disk or a crash cut short would kill the process, so such a file is built again.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import platform
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import torch

_SOURCES = Path(__file__).parent / "csrc"
_FLAGS = (
    "-O3",
    "-std=c++17",
    "-fPIC",
    "-shared",
    "-fno-math-errno",
    "-fno-trapping-math",
    # The oldest torch whose stable interface has everything that the binding calls.
    "-DTORCH_TARGET_VERSION=0x020a000000000000",
)
# Instruction sets for the compiler, and the flags in /proc/cpuinfo of a CPU that can run them.
_MACHINES = {
    "native": ("-march=native", ()),
    "portable": ("-march=x86-64", ("sse2",)),
    "avx2": ("-march=x86-64-v3", ("avx2", "fma", "f16c", "bmi2")),
    "avx512": ("-march=x86-64-v4", ("avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")),
}


class NativeBuildError(RuntimeError):
    """The native kernels cannot be built or loaded here; the message says why."""


@lru_cache
def load_library(isa: str = "native") -> Path:
    """The path of the library compiled for an instruction set; builds it if necessary.

    `isa` is "native" (everything that this CPU has) or one of `instruction_sets()`. Raises
    NativeBuildError.
    """
    compiler = find_compiler()
    if compiler is None:
        raise NativeBuildError("no C++ compiler found (looked for $CXX, c++, g++, clang++)")
    target = cache_folder() / f"mosar-{_fingerprint(compiler, isa)}.so"
    if not _is_whole(target):
        with _locked(target.with_suffix(".lock")):
            if not _is_whole(target):
                print(f"mosar: compiling its CPU kernels once, into {target}", file=sys.stderr)
                compile_library(compiler, target, isa=isa)
    return target


def instruction_sets() -> list[str]:
    """The instruction sets that this CPU can run, from the narrowest to the widest."""
    flags = set(_cpu_flags().split())
    return [isa for isa, (_, needed) in _MACHINES.items() if needed and flags.issuperset(needed)]


def find_compiler() -> str | None:
    """The C++ compiler to use: $CXX, else the first of c++, g++, clang++ on the path."""
    for name in (os.environ.get("CXX"), "c++", "g++", "clang++"):
        if name and (path := shutil.which(name)):
            return path
    return None


def compile_library(
    compiler: str, target: Path, extra_flags: tuple[str, ...] = (), *, isa: str = "native"
) -> None:
    """Compiles the sources to `target`, which appears completely or not at all."""
    torch_folder = Path(torch.__file__).parent
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        result = Path(folder) / target.name
        command = [
            compiler,
            *_FLAGS,
            _MACHINES[isa][0],
            *extra_flags,
            str(_SOURCES / "binding.cpp"),
            "-o",
            str(result),
        ]
        command += [f"-I{torch_folder / 'include'}", f"-L{torch_folder / 'lib'}"]
        command += ["-ltorch", "-ltorch_cpu", "-lc10"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if "error" in line]
            reason = lines[0] if lines else done.stderr.strip()[-500:]
            raise NativeBuildError(f"{compiler} could not compile the CPU kernels: {reason}")
        checksum = Path(folder) / "checksum"
        checksum.write_bytes(_checksum(result))
        os.replace(result, target)
        os.replace(checksum, target.with_suffix(".sha256"))


def _checksum(path: Path) -> bytes:
    return hashlib.sha256(path.read_bytes()).hexdigest().encode()


def _is_whole(target: Path) -> bool:
    try:
        return target.with_suffix(".sha256").read_bytes() == _checksum(target)
    except OSError:
        return False


def cache_folder() -> Path:
    """The folder for compiled libraries: in the user's cache, else a temporary folder."""
    base = os.environ.get("XDG_CACHE_HOME")
    home = Path(base) if base else Path.home() / ".cache"
    user = str(os.getuid()) if hasattr(os, "getuid") else "user"
    refused = []
    for folder in (home / "mosar", Path(tempfile.gettempdir()) / f"mosar-{user}"):
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            # Links in the path are resolved once, here, so that nobody can redirect them later.
            folder = folder.parent.resolve() / folder.name
            if not os.access(folder, os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
            if (danger := _danger(folder)) is None:
                return folder
            print(f"mosar: compiled kernels are not kept in {folder}: {danger}", file=sys.stderr)
            refused.append(f"{folder} ({danger})")
        except OSError as error:
            refused.append(f"{folder} ({error.strerror})")
    raise NativeBuildError(
        f"compiled kernels cannot be kept in {' or '.join(refused)}; "
        "set XDG_CACHE_HOME to a folder that only you can write to"
    )


def _danger(folder: Path) -> str | None:
    """How someone else could put a library into `folder`; None if nobody can."""
    if not hasattr(os, "getuid"):
        return None
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode):
        return "it is a symbolic link"
    if status.st_uid != os.getuid():
        return "it belongs to someone else"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return "others can write to it"
    for parent in folder.parents:
        # With the sticky bit, others cannot rename our folder and put theirs in its place.
        mode = parent.stat().st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            return f"others can replace it in {parent}"
    return None


def _fingerprint(compiler: str, isa: str) -> str:
    """What the library depends on: a build for another CPU must not be loaded here."""
    digest = hashlib.sha256()
    for source in sorted(_SOURCES.iterdir()):
        digest.update(source.read_bytes())
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True).stdout
    flags = (*_FLAGS, _MACHINES[isa][0])
    for part in (*flags, version, torch.__version__, platform.machine(), _cpu_flags()):
        digest.update(part.encode())
    return f"{torch.__version__}-{digest.hexdigest()[:16]}"


def _cpu_flags() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("flags", "Features")):
                return " ".join(sorted(line.partition(":")[2].split()))
    return platform.processor()


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    try:
        import fcntl
    except ImportError:  # This system has no file locks; the rename alone keeps the file complete.
        yield
        return
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
