"""Peak memory of one call, in a process of its own.

The process builds the problem, makes a short call that loads everything there is to load, hands
free heap back, resets the kernel's record of its peak, and makes the call. The result is the peak
above what was resident before: buffers, output and gradients count, inputs do not.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from mosar.bench.cases import Case, Shape, build_problem, call_of
from mosar.core.config import MoSARConfig

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_WARM_UP_LENGTH = 128


class MemoryUnavailable(RuntimeError):
    """Memory cannot be measured here; the message says why."""


def measure_peak(case: Case, competitor: str) -> int:
    """Bytes; raises MemoryUnavailable."""
    task = asdict(case) | {"config": case.config.to_json(), "competitor": competitor}
    return peak_of("mosar.bench.memory", task | {"threads": torch.get_num_threads()})


def peak_of(module: str, task: dict[str, Any]) -> int:
    """The bytes that a module, run with `task` as JSON on its input, prints."""
    if not _CLEAR.exists():
        raise MemoryUnavailable("memory is measured with /proc/self/clear_refs, which is not here")
    # It imports what this process imports; -P: but nothing that only lies in the working directory.
    command = [sys.executable, "-P", "-m", module]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        command, input=json.dumps(task), capture_output=True, text=True, env=environment
    )
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise MemoryUnavailable(f"the process that measures memory failed: {reason}")
    return int(done.stdout)


def _main() -> None:
    task = json.load(sys.stdin)
    torch.set_num_threads(task.pop("threads"))
    competitor, config = task.pop("competitor"), MoSARConfig.from_json(task.pop("config"))
    case = Case(**task | {"shape": Shape(*task["shape"])}, config=config)
    short = replace(case, length=min(case.length, _WARM_UP_LENGTH))
    call_of(build_problem(short), competitor)()
    call = call_of(build_problem(case), competitor)
    before = reset_peak()
    result = call()
    print(peak_so_far() - before)
    del result


def reset_peak() -> int:
    """Hands free heap back and forgets the peak; returns what is resident now, in bytes."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    _CLEAR.write_text("5")
    return _resident("VmRSS")


def peak_so_far() -> int:
    """The most that was resident since `reset_peak`, in bytes."""
    return _resident("VmHWM")


def _resident(name: str) -> int:
    for line in _STATUS.read_text().splitlines():
        if line.startswith(f"{name}:"):
            return 1024 * int(line.split()[1])
    raise MemoryUnavailable(f"{_STATUS} has no {name}")


if __name__ == "__main__":
    _main()
