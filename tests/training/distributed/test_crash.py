"""A process is killed, a job asked to stop: it ends, says why, and goes on bit for bit."""

import os
import signal
from pathlib import Path

import pytest

from processes import finish, start, wait_for
from training.distributed.launches import environment, run_jobs, train_command
from training.runs import leftovers, lines, steps

SETTINGS = (
    *("train.checkpoint_every=4", "train.eval_every=8"),
    *("train.decay_steps=24", "attention.cost_warmup=5"),
    *("distributed.tensor=2", "distributed.timeout=600"),
)
# A job that is disturbed could go on for days; when it has been, it is given an end.
ENDLESS = "train.steps=10000000"


def launch(dataset, out, settings, processes):
    return start(train_command(processes, dataset, out, *settings, ENDLESS), env=environment())


def workers(launcher) -> dict[int, int]:
    """Process number -> process id of what a launcher started."""
    found = {}
    for entry in Path("/proc").iterdir():
        try:
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            variables = (entry / "environ").read_bytes().split(b"\0")
        except (OSError, ValueError, IndexError):
            continue
        if parent == launcher.pid:
            ranks = [v for v in variables if v.startswith(b"RANK=")]
            if ranks:
                found[int(ranks[0].removeprefix(b"RANK="))] = int(entry.name)
    return found


def wait_for_line(launcher, out, number):
    """Until the run has so many lines of metrics."""
    path = out / "metrics.jsonl"
    wait_for(lambda: path.exists() and path.read_bytes().count(b"\n") >= number, launcher)


def kill_one(dataset, out, settings, *, processes, killed):
    """Kills a process of a job; the others say so. The step of the last checkpoint."""
    launcher = launch(dataset, out, settings, processes)
    wait_for_line(launcher, out, 8)
    os.kill(workers(launcher)[killed], signal.SIGKILL)
    _, err = finish(launcher)
    assert launcher.returncode != 0
    said = sorted(line for line in err.splitlines() if line.startswith("mosar: error: "))
    saved = steps(out)[-1]
    assert saved >= 4
    left = [rank for rank in range(processes) if rank != killed]
    assert len(said) == len(left), err
    for rank, line in zip(left, said, strict=True):
        assert f"process {rank} of {processes}: another process of the job has ended" in line
        assert f"the last checkpoint is that of step {saved}, start the job again" in line
    return saved


def test_killed_and_stopped(dataset, tmp_path):
    out = tmp_path / "run"
    saved = kill_one(dataset, out, SETTINGS, processes=2, killed=1)

    launcher = launch(dataset, out, SETTINGS, 2)
    # More lines than the killed job wrote: some of its own, after the checkpoint's.
    wait_for_line(launcher, out, len(lines(out)) + 1)
    # As a queue does: everybody is told, and torchrun passes it on once more.
    for process in (*workers(launcher).values(), launcher.pid):
        os.kill(process, signal.SIGTERM)
    _, err = finish(launcher)
    assert f"resuming from step {saved}" in err
    said = [line for line in err.splitlines() if line.startswith("mosar: ")]
    assert len(said) == 1 and said[0].startswith("mosar: stopped, saved at step "), err
    stopped = int(said[0].split("step ")[1].split()[0])
    assert steps(out)[-1] == stopped and saved < stopped

    check_as_if_undisturbed(dataset, out, SETTINGS, 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh",
    [("distributed.shard=2", "distributed.tensor=2"), ("distributed.data=4",)],
    ids=["fsdp x tp", "ddp"],
)
@pytest.mark.parametrize("killed", [0, 2])
def test_killed_of_four(dataset, tmp_path, mesh, killed):
    settings = (*SETTINGS, "distributed.tensor=1", *mesh)
    kill_one(dataset, tmp_path / "run", settings, processes=4, killed=killed)
    check_as_if_undisturbed(dataset, tmp_path / "run", settings, 4)


def check_as_if_undisturbed(dataset, out, settings, processes):
    """Gives a run an end, and compares it with one that nobody disturbed."""
    whole, end = out.with_name("whole"), steps(out)[-1] + 3
    changes = [*settings, f"train.steps={end}"]
    job = {"variant": "mosar-cost", "data": str(dataset), "changes": changes}
    jobs = [{**job, "out": str(folder)} for folder in (out, whole)]
    run_jobs(processes, jobs)
    assert lines(out) == lines(whole)
    assert checkpoint_bytes(out) == checkpoint_bytes(whole)
    assert not leftovers(out)


def checkpoint_bytes(out):
    """The tensors of the last checkpoint; headers list their fields in any order."""
    folder = out / "checkpoints" / f"step-{steps(out)[-1]:08d}"
    return {
        path.name: path.read_bytes()[8 + int.from_bytes(path.read_bytes()[:8], "little") :]
        for path in folder.glob("*.safetensors")
    }
