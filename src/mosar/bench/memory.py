"""Measures the peak memory of one call in a separate process.

The process makes a short call that loads everything there is to load, prepares the call, hands
free heap back, resets the kernel's record of its peak, and makes the call. The result is the peak
above what was resident before: buffers, output and gradients count, inputs do not.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch

from mosar.bench.comparison import Unavailable

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")

C = TypeVar("C")


def measure_peak(
    prepare: Callable[[C, str], Callable[[], object]], case: C, short_case: C, competitor: str
) -> int:
    """Bytes of the call that `prepare(case, competitor)` gives; raises Unavailable."""
    if not _CLEAR.exists():
        raise Unavailable("memory is measured with /proc/self/clear_refs, which is missing")
    # It imports what this process imports; -P: but nothing from the working directory.
    command = [sys.executable, "-P", "-m", "mosar.bench.memory"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    task = pickle.dumps((prepare, case, short_case, competitor, torch.get_num_threads()))
    done = subprocess.run(command, input=task, capture_output=True, env=environment)
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        reason = (said or [f"exit code {done.returncode}"])[-1]
        raise Unavailable(f"the process that measures memory failed: {reason}")
    return int(done.stdout)


def _main() -> None:
    prepare, case, short_case, competitor, threads = pickle.load(sys.stdin.buffer)
    torch.set_num_threads(threads)
    prepare(short_case, competitor)()
    call = prepare(case, competitor)
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    _CLEAR.write_text("5")
    before = _resident("VmRSS")
    _result = call()
    print(_resident("VmHWM") - before)


def _resident(name: str) -> int:
    """Bytes that the kernel counts under this name."""
    for line in _STATUS.read_text().splitlines():
        if line.startswith(f"{name}:"):
            return 1024 * int(line.split()[1])
    raise Unavailable(f"{_STATUS} has no {name}")


if __name__ == "__main__":
    _main()
