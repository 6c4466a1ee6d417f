"""Real processes in tests: started, watched until something happens, signalled, waited for.

No test may depend on how fast a machine is. A test that needs a command to be still running gives
it more work than it can ever finish; HANG only ends what would never end.
"""

import resource
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

HANG = 900.0
"""Seconds; more than anything here needs on a machine that does eight other things."""


def start(words: Sequence[object], **options: Any) -> subprocess.Popen[str]:
    usual = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    # Tests that a shell runs in the background ignore Ctrl-C, and so would what they start.
    usual["preexec_fn"] = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    return subprocess.Popen([str(word) for word in words], **usual | options)


def wait_for(condition: Callable[[], object], process: subprocess.Popen[str]) -> None:
    """Until the condition holds; the process must not end before."""
    deadline = time.monotonic() + HANG
    while not condition():
        assert process.poll() is None, process.communicate()
        if time.monotonic() > deadline:
            process.kill()
            raise AssertionError(f"it did not come to pass: {process.communicate()}")
        time.sleep(0.002)


def finish(process: subprocess.Popen[str], given: str | None = None) -> tuple[str, str]:
    """What it wrote to its output and to its errors, once it has ended."""
    try:
        return process.communicate(given, timeout=HANG)
    except subprocess.TimeoutExpired:
        process.kill()
        raise AssertionError(f"it hangs: {process.communicate()}") from None


def stop(process: subprocess.Popen[str], number: int) -> tuple[str, str]:
    """What it wrote, once it has ended by a signal that it was sent."""
    process.send_signal(number)
    return finish(process)


def run(words: Sequence[object], given: str | None = None, **options: Any) -> tuple[str, str]:
    """What a process wrote that must end well, with some input."""
    process = start(words, **{"stdin": subprocess.PIPE if given else None} | options)
    written = finish(process, given)
    assert process.returncode == 0, written[1][-6000:]
    return written


@contextmanager
def file_size_limit(number: int) -> Iterator[None]:
    """As a full disk: this process can make no file longer than so many bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (number, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
