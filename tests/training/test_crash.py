"""Real processes, really killed: whatever happens, the run ends as the one nobody disturbed."""

import random
import signal
import sys
import time

from typer.testing import CliRunner

from mosar.cli import app
from mosar.training.config import resolve_config
from mosar.training.loop import train
from processes import file_size_limit, start, stop, wait_for
from training.runs import assert_same_run, leftovers, steps

# A checkpoint per step: many of the kills must hit one that is being written.
SETTINGS = ("train.checkpoint_every=1", "train.eval_every=6")
SETTINGS += ("train.decay_steps=24", "attention.cost_warmup=5")
# A run that is disturbed could go on for days; when it has been, it is given an end.
ENDLESS = "train.steps=10000000"


def command(dataset, out, *changes):
    words = [sys.executable, "-m", "mosar.cli", "train", "--variant", "mosar-cost"]
    words += ["--preset", "smoke", "--data", str(dataset), "--out", str(out), "--threads", "1"]
    for change in (*SETTINGS, *changes):
        words += ["--set", change]
    return words


def wait_for_progress(process, out, number):
    """Until the process has written some lines of metrics `number` times."""
    path = out / "metrics.jsonl"

    def size():
        return path.stat().st_size if path.exists() else 0

    # A process that goes on truncates what the one before it wrote, so only its own lines count.
    before = size()

    def grown():
        nonlocal before
        before, last = size(), before
        return before > last

    for _ in range(number):
        wait_for(grown, process)


def check_as_if_undisturbed(dataset, out):
    """Gives a run an end, and compares it with one that nobody disturbed."""
    end = f"train.steps={steps(out)[-1] + 3 if steps(out) else 8}"
    config = resolve_config(
        variant="mosar-cost", preset="smoke", data=dataset, changes=(*SETTINGS, end)
    )
    whole = out.with_name("whole")
    for folder in (out, whole):
        train(config, folder, progress=False)
    assert_same_run(out, whole)
    assert not leftovers(out)


def test_killed_again_and_again(dataset, tmp_path):
    out, chance = tmp_path / "run", random.Random(0)
    for _ in range(2):
        process = start(command(dataset, out, ENDLESS))
        wait_for_progress(process, out, chance.randint(1, 8))
        time.sleep(chance.uniform(0, 0.06))
        _, err = stop(process, signal.SIGKILL)
        assert process.returncode == -signal.SIGKILL, err
    check_as_if_undisturbed(dataset, out)


def test_another_at_once_and_asked_to_stop(dataset, tmp_path):
    out = tmp_path / "run"
    words = command(dataset, out, "train.checkpoint_every=1000000", ENDLESS)
    for number in (signal.SIGINT, signal.SIGTERM):
        process = start(words)
        wait_for_progress(process, out, 4)
        if number == signal.SIGINT:
            check_that_another_is_refused(process, dataset, out)
        _, err = stop(process, number)
        assert process.returncode == 128 + number, err
        *_, last = err.splitlines()
        assert last.startswith(f"mosar: stopped, saved at step {steps(out)[-1]} of ")
        assert last.endswith(f"; resume with: mosar train --out {out}")
        # The command that it names, and no other word.
        named = last.partition("mosar train ")[2].split()
        words = [sys.executable, "-m", "mosar.cli", "train", *named]
    assert len(steps(out)) == 2
    check_as_if_undisturbed(dataset, out)


def check_that_another_is_refused(process, dataset, out):
    process.send_signal(signal.SIGSTOP)
    result = CliRunner().invoke(app, command(dataset, out, ENDLESS)[3:])
    process.send_signal(signal.SIGCONT)
    assert result.exit_code == 1
    assert f"another process trains into {out} (process {process.pid})" in result.stderr


def test_a_full_disk(dataset, tmp_path):
    """No file may grow beyond what the metrics need: the first checkpoint cannot be written."""
    out = tmp_path / "run"
    with file_size_limit(100_000):
        result = CliRunner().invoke(app, command(dataset, out, ENDLESS)[3:])
    assert result.exit_code == 1, result.output
    *_, last = result.stderr.splitlines()
    assert last.startswith("mosar: error: ")
    assert "model.safetensors: File too large; no checkpoint is lost" in last
    assert not steps(out) and not leftovers(out)
    check_as_if_undisturbed(dataset, out)
