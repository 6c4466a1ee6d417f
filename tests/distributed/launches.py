"""Starting real processes with torchrun, on gloo, and waiting for them no longer than needed."""

import json
import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
# Launches are bounded, so that a hanging process fails a test instead of stopping all of them.
SECONDS = 240


def environment(**more: str) -> dict[str, str]:
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(TESTS),
        **more,
    }


def torchrun(processes: int, *words: str) -> list[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return [*launcher, "--nproc-per-node", str(processes), *words]


def run_jobs(processes: int, jobs: list[dict], folder: Path, seconds: float = SECONDS) -> None:
    """Has `worker.py` do the jobs one after the other in the same processes."""
    file = folder / "jobs.json"
    file.write_text(json.dumps(jobs))
    result = subprocess.run(
        torchrun(processes, "-m", "distributed.worker", str(file)),
        env=environment(),
        capture_output=True,
        text=True,
        timeout=seconds,
    )
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-6000:]


def train_command(processes: int, dataset: Path, out: Path, *changes: str) -> list[str]:
    words = ["-m", "mosar", "train", "--variant", "mosar-cost", "--preset", "smoke"]
    words += ["--data", str(dataset), "--out", str(out), "--no-progress", "--threads", "1"]
    for change in changes:
        words += ["--set", change]
    return torchrun(processes, *words) if processes > 1 else [sys.executable, *words]
