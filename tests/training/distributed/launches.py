"""Starting real processes with torchrun, on gloo, and having them do what a test asks."""

import json
import os
import sys
from pathlib import Path

from processes import HANG, run

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


def run_jobs(processes: int, jobs: list[dict], folder: Path) -> None:
    """Has `worker.py` do the jobs one after the other in the same processes."""
    file = folder / "jobs.json"
    file.write_text(json.dumps(jobs))
    run(torchrun(processes, "-m", "training.distributed.worker", str(file)), env=environment())


def train_command(processes: int, dataset: Path, out: Path, *changes: str) -> list[str]:
    words = ["-m", "mosar", "train", "--variant", "mosar-cost", "--preset", "smoke"]
    words += ["--data", str(dataset), "--out", str(out), "--no-progress", "--threads", "1"]
    for change in changes:
        words += ["--set", change]
    return torchrun(processes, *words) if processes > 1 else [sys.executable, *words]
