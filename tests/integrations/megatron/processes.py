"""Runs a script of this folder in several processes that know each other through gloo."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from processes import HANG

HERE = Path(__file__).parent


def run_processes(script: str, folder: Path, count: int = 2) -> None:
    """`script RANK COUNT FOLDER` in `count` processes; fails with what they said, in time."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    logs = [folder / f"rank{rank}.log" for rank in range(count)]
    running = []
    for rank, log in enumerate(logs):
        with log.open("w") as stream:
            command = [sys.executable, str(HERE / script), str(rank), str(count), str(folder)]
            running.append(subprocess.Popen(command, stdout=stream, stderr=stream, env=environment))
    deadline = time.monotonic() + HANG
    try:
        while any(process.poll() is None for process in running):
            if any(process.poll() for process in running) or time.monotonic() > deadline:
                break
            time.sleep(0.05)
    finally:
        for process in running:
            if process.poll() is None:
                process.kill()
            process.wait()
    said = "\n".join(f"{log.name}:\n{log.read_text()[-3000:]}" for log in logs)
    assert all(process.returncode == 0 for process in running), said
