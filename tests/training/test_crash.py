"""Real processes, really killed: whatever happens, the run ends as the one nobody disturbed."""

import os
import random
import resource
import signal
import subprocess
import sys
import time

import pytest

from training.runs import assert_same_run, leftovers, steps

STEPS = 24
# A checkpoint a step: many of the kills must hit one that is being written.
SETTINGS = (f"train.steps={STEPS}", "train.checkpoint_every=1", "train.eval_every=6")


def command(dataset, out, *changes):
    words = [sys.executable, "-m", "mosar.cli", "train", "--variant", "mosar-cost"]
    words += ["--preset", "smoke", "--data", str(dataset), "--out", str(out), "--threads", "1"]
    for change in (*SETTINGS, *changes):
        words += ["--set", change]
    return words


def start(words, **options):
    return subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options
    )


def wait_for_progress(process, out, number):
    """Until the process has written `number` lines of metrics, or ended."""
    path = out / "metrics.jsonl"
    # A process that goes on truncates what the one before it wrote, so only its own lines count.
    before = path.stat().st_size if path.exists() else 0
    grown = 0
    while process.poll() is None and grown < number:
        time.sleep(0.002)
        size = path.stat().st_size if path.exists() else 0
        if size > before:
            grown += 1
        before = size


@pytest.fixture(scope="module")
def whole(tmp_path_factory, dataset):
    out = tmp_path_factory.mktemp("whole") / "run"
    subprocess.run(command(dataset, out), check=True, capture_output=True)
    return out


def test_killed_again_and_again(dataset, whole, tmp_path):
    out, chance = tmp_path / "run", random.Random(0)
    kills = 0
    while True:
        process = start(command(dataset, out))
        # Now and then before it has begun, mostly somewhere within a few steps.
        if chance.random() < 0.15:
            time.sleep(chance.uniform(0.5, 2.5))
        else:
            wait_for_progress(process, out, chance.randint(1, 8))
            time.sleep(chance.uniform(0, 0.06))
        process.kill()
        _, err = process.communicate()
        if process.returncode == 0:
            break
        assert process.returncode == -signal.SIGKILL, err
        kills += 1
        assert kills < 60
    assert kills >= 3
    assert_same_run(out, whole)
    assert not leftovers(out)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_asked_to_stop(dataset, whole, tmp_path, number):
    out = tmp_path / "run"
    words = command(dataset, out, "train.checkpoint_every=1000")
    process = start(words)
    wait_for_progress(process, out, 4)
    process.send_signal(number)
    _, err = process.communicate()
    assert process.returncode == 128 + number, err
    *_, last = err.splitlines()
    assert last.startswith("mosar: stopped, saved at step ")
    assert last.endswith(f" of {STEPS}; go on with: mosar train --out {out}")
    assert len(steps(out)) == 1 and 0 < steps(out)[0] < STEPS
    # The command that it names, and no other word.
    words = [sys.executable, "-m", "mosar.cli", *last.partition("mosar train")[2].split()]
    words.insert(3, "train")
    subprocess.run([*words, "--threads", "1"], check=True, capture_output=True)
    assert_same_run(out, whole)


def test_a_full_disk(dataset, whole, tmp_path):
    """No file may grow beyond what the metrics need: the first checkpoint cannot be written."""
    out = tmp_path / "run"

    def limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))

    process = start(command(dataset, out), preexec_fn=limit)
    _, err = process.communicate()
    assert process.returncode == 1, err
    *_, last = err.splitlines()
    assert last.startswith("mosar: error: ")
    assert "model.safetensors: File too large; no checkpoint is lost" in last
    assert not steps(out) and not leftovers(out)
    subprocess.run(command(dataset, out), check=True, capture_output=True)
    assert_same_run(out, whole)


def test_two_at_once(dataset, whole, tmp_path):
    out = tmp_path / "run"
    first = start(command(dataset, out))
    wait_for_progress(first, out, 2)
    second = start(command(dataset, out))
    if first.poll() is None:
        os.kill(first.pid, signal.SIGSTOP)
    _, err = second.communicate()
    os.kill(first.pid, signal.SIGCONT)
    assert second.returncode == 1, err
    assert f"another process trains into {out} (process {first.pid})" in err
    assert first.wait() == 0
    first.communicate()
    assert_same_run(out, whole)
