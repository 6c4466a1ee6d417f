"""Starting real processes, on gloo, and having them do what a test asks."""

import atexit
import json
import os
import socket
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

from processes import HANG, start

TESTS = Path(__file__).parents[2]


def environment(**more: str) -> dict[str, str]:
    # The tests, and whatever this process was told to import.
    path = os.pathsep.join(filter(None, (str(TESTS), os.environ.get("PYTHONPATH"))))
    # torchrun kills after 30 seconds what it asked to end; here everything ends by itself.
    patience = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(int(HANG))}
    return {**os.environ, **patience, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **more}


def torchrun(processes: int, *words: str) -> list[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return [*launcher, "--nproc-per-node", str(processes), *words]


@cache
def waiting_processes(number: int):
    """Processes of `worker.py` that wait for jobs: starting them is most of what a test costs."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        place = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free.getsockname()[1])}
    errors = tempfile.TemporaryFile("a+")  # noqa: SIM115
    streams = {"stdin": subprocess.PIPE, "stderr": errors}
    variables = [place | {"WORLD_SIZE": str(number), "RANK": str(rank)} for rank in range(number)]
    words = [sys.executable, "-m", "training.distributed.worker"]
    processes = [start(words, env=environment(**own), **streams) for own in variables]
    # What they read comes to its end, and they do.
    atexit.register(lambda: [process.communicate() for process in processes])
    return processes, errors


def run_jobs(number: int, jobs: list[dict]) -> None:
    """Has `worker.py` do the jobs one after the other in the same processes."""
    processes, errors = waiting_processes(number)
    for process in processes:
        print(json.dumps(jobs), file=process.stdin, flush=True)
    # A process that fails ends, and so do the others, which miss it.
    if [process.stdout.readline() for process in processes] != ["done\n"] * number:
        waiting_processes.cache_clear()
        for process in processes:
            process.kill()
        errors.seek(0)
        raise AssertionError(errors.read()[-6000:])


def train_command(processes: int, dataset: Path, out: Path, *changes: str) -> list[str]:
    words = ["-m", "mosar", "train", "--variant", "mosar-cost", "--preset", "smoke"]
    words += ["--data", str(dataset), "--out", str(out), "--no-progress", "--threads", "1"]
    for change in changes:
        words += ["--set", change]
    return torchrun(processes, *words) if processes > 1 else [sys.executable, *words]
