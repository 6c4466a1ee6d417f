"""The first use on a machine: one build, whole or not at all, and a clear word where there is none.

Real processes with a cache of their own. Where the build itself is not the point, the compiler is a
script that copies the library this test run has already built.
"""

import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from mosar.kernels.build import (
    NativeBuildError,
    cache_folder,
    compile_library,
    find_compiler,
    load_library,
)
from processes import finish, start

KEPT = [".lock", ".sha256", ".so"]
BUILDING = "mosar: compiling its CPU kernels once"
SLOWER = "mosar uses only torch operators"
FIRST_USE = """
import sys
import torch
from mosar import distance_attention, mosar_attention

q = torch.arange(24.0).reshape(1, 1, 6, 4)
expected = distance_attention(q, q, q, impl="reference")
for impl in sys.argv[1:]:
    try:
        for _ in range(2):
            torch.testing.assert_close(distance_attention(q, q, q, impl=impl), expected)
        print(impl, "serves")
    except ValueError as error:
        print(impl, "refuses:", error)
"""


class Machine:
    """A home, a temporary folder and a compiler that nobody else uses."""

    def __init__(self, folder: Path):
        self.cache, self.temporary = folder / "cache", folder / "tmp"
        self.temporary.mkdir()
        self.log = folder / "compiled"
        self.folder = folder
        self.environment = {
            **os.environ,
            "XDG_CACHE_HOME": str(self.cache),
            "TMPDIR": str(self.temporary),
            "OMP_NUM_THREADS": "1",
        }

    def compiler(self, body: str) -> None:
        """Makes `body` the compiler; it may use $target, the file to write, and notes each call."""
        path = self.folder / "compiler"
        path.write_text(
            "#!/bin/sh\n"
            'if [ "$1" = --version ]; then echo compiler 1.0; exit 0; fi\n'
            f"echo called >> {self.log}\n"
            'while [ "$1" != -o ]; do shift; done; target=$2\n'
            f"{body}\n"
        )
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        self.environment["CXX"] = str(path)

    def copying_compiler(self, seconds: int = 0) -> None:
        self.compiler(f'sleep {seconds}; cp "{load_library()}" "$target"')

    def start(self, *impls: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", FIRST_USE, *impls]
        return start(command, env=self.environment)

    def use(self, *impls: str) -> tuple[str, str]:
        process = self.start(*impls)
        output, errors = finish(process)
        assert process.returncode == 0, errors
        return output, errors

    @property
    def compilations(self) -> int:
        return self.log.read_text().count("called") if self.log.exists() else 0


def suffixes(folder: Path) -> list[str]:
    return sorted(path.suffix for path in folder.iterdir())


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


def test_processes_that_start_together_build_once(machine):
    machine.copying_compiler(seconds=1)
    processes = [machine.start("native") for _ in range(3)]
    results = [finish(process) for process in processes]
    assert [process.returncode for process in processes] == [0] * 3, results
    assert all(output == "native serves\n" for output, _ in results)
    assert sum(errors.count(BUILDING) for _, errors in results) == 1
    assert machine.compilations == 1
    assert suffixes(machine.cache / "mosar") == KEPT
    # Torch itself leaves an empty folder there.
    assert not any(path.is_file() for path in machine.temporary.rglob("*"))


def test_the_second_use_builds_nothing_unless_the_library_is_damaged(machine):
    machine.copying_compiler()
    _, errors = machine.use("native")
    assert [line.startswith(BUILDING) for line in errors.splitlines()] == [True]
    output, errors = machine.use("auto", "native")
    assert output == "auto serves\nnative serves\n"
    assert "mosar" not in errors
    assert machine.compilations == 1
    # Loading what is left of a library cut short would kill the process with a bus error.
    (library,) = (machine.cache / "mosar").glob("*.so")
    whole = library.read_bytes()
    library.write_bytes(whole[: len(whole) // 2])
    output, errors = machine.use("native")
    assert output == "native serves\n"
    assert errors.count(BUILDING) == 1
    assert machine.compilations == 2
    assert library.read_bytes() == whole


def test_without_a_compiler(machine):
    machine.environment |= {"PATH": "", "CXX": "no-such-compiler"}
    output, errors = machine.use("auto", "native", "tiled")
    served, refused, tiles = output.splitlines()
    assert (served, tiles) == ("auto serves", "tiled serves")
    assert refused.startswith("native refuses: impl='native' cannot serve: no C++ compiler found")
    assert errors.count(SLOWER) == 1
    assert BUILDING not in errors


@pytest.fixture
def temporary_cache(tmp_path, monkeypatch):
    """Where the cache is if the user's own folder cannot be used."""
    (tmp_path / "cache").write_text("a file where the folder should be")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "all").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "all"))
    return tmp_path / "all" / f"mosar-{os.getuid()}"


def linked(folder):
    (folder.parent / "elsewhere").mkdir(mode=0o700)
    folder.symlink_to("elsewhere")


def of_someone_else(folder):
    folder.mkdir(mode=0o700)
    os.chown(folder, 12345, -1)


def writable(folder):
    folder.mkdir()
    folder.chmod(0o770)


def replaceable(folder):
    folder.mkdir(mode=0o700)
    folder.parent.chmod(0o777)


def replaceable_above(folder):
    folder.mkdir(mode=0o700)
    folder.parents[1].chmod(0o777)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (linked, r"\(it is a symbolic link\)"),
        pytest.param(
            of_someone_else,
            r"\(it belongs to someone else\)",
            marks=pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away"),
        ),
        (writable, r"\(others can write to it\)"),
        (replaceable, r"\(others can replace it in .*all\)"),
        (replaceable_above, r"\(others can replace it in .*\)"),
    ],
)
def test_a_folder_that_others_control_is_refused(temporary_cache, capfd, make, reason):
    make(temporary_cache)
    with pytest.raises(NativeBuildError, match=f"mosar-{os.getuid()} {reason}; set XDG_CACHE_HOME"):
        cache_folder()
    assert capfd.readouterr().err.count("mosar: compiled kernels are not kept in ") == 1
    assert not any(path.is_file() for path in temporary_cache.parent.rglob("*"))


@pytest.mark.parametrize("is_folder", [False, True])
def test_a_temporary_folder_serves_where_the_cache_cannot(
    temporary_cache, tmp_path, monkeypatch, capfd, is_folder
):
    """A file where the folder should be, or a folder that others can replace; sticky ones serve."""
    temporary_cache.parent.chmod(0o1777)
    if is_folder:
        (tmp_path / "open").mkdir()
        (tmp_path / "open").chmod(0o777)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "open"))
    assert cache_folder() == temporary_cache
    assert stat.S_IMODE(temporary_cache.stat().st_mode) == 0o700
    said = capfd.readouterr().err
    assert ("others can replace it" in said) == is_folder
    assert not list(tmp_path.glob("open/mosar/*"))


def test_links_on_the_way_are_followed_once(tmp_path, monkeypatch):
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to("disk")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "link"))
    assert cache_folder() == tmp_path / "disk" / "mosar"


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("echo 'In x.h:' >&2; echo 'x.h:7: error: no such thing' >&2; exit 1", "x.h:7: error: no"),
        ("echo 'g++: fatal signal' >&2; exit 4", "g++: fatal signal"),
        ("exit 3", ""),
    ],
)
def test_a_compiler_that_fails(machine, body, reason):
    machine.compiler(body)
    target = machine.temporary / "library.so"
    with pytest.raises(NativeBuildError, match="could not compile the CPU kernels") as caught:
        compile_library(machine.environment["CXX"], target)
    assert reason in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1
    assert not any(machine.temporary.iterdir())


def test_the_compiler_named_in_the_environment_comes_first(machine, monkeypatch):
    machine.compiler("exit 1")
    monkeypatch.setenv("CXX", machine.environment["CXX"])
    assert find_compiler() == machine.environment["CXX"]
