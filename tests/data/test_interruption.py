"""Interruption: killed, stopped or out of space, a preparation leaves no half-made dataset."""

import gzip
import os
import resource
import signal
import sys

import pytest

from mosar import files
from mosar.data.prepare import check_dataset, prepare
from mosar.errors import DataError, MosarError
from processes import finish, start, stop, wait_for

COMMAND = [sys.executable, "-m", "mosar.cli", "prepare"]


@pytest.fixture
def long_sources(tmp_path):
    """A folder of text, then blank lines that take hours to read and write nothing."""
    folder = tmp_path / "sources"
    (folder / "text").mkdir(parents=True)
    for name in ("a", "b"):
        (folder / "text" / f"{name}.txt").write_text(f"some text {name}\n" * 400_000)
    blank = folder / "blank.jsonl.gz"
    blank.write_bytes(gzip.compress(b"\n" * (1 << 26), 1))
    return [str(folder / "text")] + [str(blank)] * 1000


def prepare_process(*arguments, **options):
    return start([*COMMAND, *arguments], **options)


def packed_bytes(out):
    path = out.with_name(f".{out.name}.partial") / "train.bin"
    return path.stat().st_size if path.exists() else 0


def test_killed_again_and_again(tmp_path, long_sources):
    """What is left after kill -9 is no dataset, and the next run takes no notice of it."""
    out, old = tmp_path / "set", tmp_path / "old"
    small = long_sources[:1]
    prepare(small, old)
    before = check_dataset(old)
    # At once, and when some of the tokens have been written.
    for size in (0, 1, 3 << 20):
        for target, options in ((out, ()), (old, ("--force",))):
            partial = target.with_name(f".{target.name}.partial")
            process = prepare_process(*long_sources, "--out", target, *options)
            wait_for(partial.exists, process)
            wait_for(lambda target=target, size=size: packed_bytes(target) >= size, process)
            stop(process, signal.SIGKILL)
            assert partial.exists()
        assert not out.exists()
        assert check_dataset(old) == before
    for target, force in ((out, False), (old, True)):
        assert prepare(small, target, force=force) == check_dataset(target) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["old", "set", "sources"]


def test_ctrl_c_cleans_up(tmp_path, long_sources):
    out = tmp_path / "set"
    process = prepare_process(*long_sources, "--out", out)
    wait_for(lambda: packed_bytes(out) > 0, process)
    printed, errors = stop(process, signal.SIGINT)
    assert process.returncode == 130
    assert printed == ""
    assert errors.splitlines()[-1] == "mosar: stopped; nothing was left behind"
    assert [path.name for path in tmp_path.iterdir()] == ["sources"]


def test_two_at_once(tmp_path, long_sources):
    out = tmp_path / "set"
    process = prepare_process(*long_sources, "--out", out)
    try:
        wait_for(lambda: packed_bytes(out) > 0, process)
        with pytest.raises(MosarError, match="another process is making"):
            prepare(long_sources[:1], out)
        assert process.poll() is None
        assert packed_bytes(out) > 0
    finally:
        stop(process, signal.SIGKILL)


def test_a_full_disk(tmp_path, long_sources):
    """A limit on the size of files stands for it: a write fails half-way."""

    def limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))

    process = prepare_process(*long_sources, "--out", tmp_path / "set", preexec_fn=limit)
    printed, errors = finish(process)
    assert (process.returncode, printed) == (1, "")
    assert "File too large" in errors.splitlines()[-1]
    assert [path.name for path in tmp_path.iterdir()] == ["sources"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written(tmp_path, dataset, write_lines):
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(PermissionError):
            prepare([write_lines()], tmp_path / "other")
    finally:
        tmp_path.chmod(0o700)


def test_a_replacement_cut_short_is_undone(tmp_path, dataset, write_lines):
    """The process dies between the two renames: the old dataset comes back."""
    before = check_dataset(dataset)
    dataset.rename(tmp_path / ".set.replaced")
    with pytest.raises(DataError, match="already holds a dataset"):
        prepare([write_lines(["x", "y"])], dataset)
    assert check_dataset(dataset) == before
    # It died just after them: the new one stays.
    dataset.rename(tmp_path / ".set.replaced")
    prepare([write_lines(["x", "y"])], tmp_path / "new")
    (tmp_path / "new").rename(dataset)
    new = check_dataset(dataset)
    with pytest.raises(DataError, match="already holds a dataset"):
        prepare([write_lines()], dataset)
    assert check_dataset(dataset) == new
    assert not list(tmp_path.glob(".*"))


def test_a_rename_that_fails_puts_the_old_one_back(tmp_path, dataset, write_lines, monkeypatch):
    before = check_dataset(dataset)
    rename = os.rename

    def fail_once(source, target):
        if str(source).endswith(".partial"):
            raise OSError(5, "Input/output error")
        rename(source, target)

    monkeypatch.setattr(files.os, "rename", fail_once)
    with pytest.raises(OSError, match="Input/output error"):
        prepare([write_lines(["x", "y"])], dataset, force=True)
    assert check_dataset(dataset) == before
    assert not list(tmp_path.glob(".*"))
