"""A run folder made of another: all of it is there, or nothing."""

import pytest

from mosar.training import checkpoints
from mosar.training.distributed import consolidate as module
from mosar.training.distributed.consolidate import consolidate
from mosar.training.loop import train
from mosar.training.run_folder import CHECKPOINTS, METRICS, read_metrics


@pytest.fixture
def run(smoke, tmp_path):
    folder = tmp_path / "run"
    changes = ("train.steps=2", "train.eval_every=1", "train.checkpoint_every=1")
    train(smoke("mosar", *changes), folder, progress=False)
    return folder


def test_a_step_of_a_run(run, tmp_path):
    out = tmp_path / "plain"
    out.mkdir()
    assert consolidate(run, out, 1) == 1
    assert checkpoints.list_steps(out / CHECKPOINTS) == [1]
    assert {line["step"] for line in read_metrics(out)} == {0, 1}


def test_what_fails_leaves_nothing(run, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "write_config", full)
    with pytest.raises(OSError, match="No space left"):
        consolidate(run, tmp_path / "plain")
    assert list(tmp_path.iterdir()) == [run]


def test_what_a_killed_process_left_is_no_hindrance(run, tmp_path):
    left = tmp_path / ".plain.partial"
    (left / CHECKPOINTS / "step-00000007").mkdir(parents=True)
    (left / METRICS).write_text("half a li")
    assert consolidate(run, tmp_path / "plain") == 2
    assert checkpoints.list_steps(tmp_path / "plain" / CHECKPOINTS) == [2]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plain", "run"]
