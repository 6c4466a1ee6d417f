"""Checkpoints: whole or not there; damage is found, and the one before it used."""

import errno
import json
import os
import pickle
import shutil

import pytest
import torch

from mosar.errors import DamagedFile
from mosar.files import file_checksum, sealed
from mosar.training.checkpoints import (
    list_steps,
    newest_checkpoint,
    prune_checkpoints,
    read_checkpoint,
    remove_unfinished,
    restore_optimizers,
    write_checkpoint,
)

FILES = ("model.safetensors", "optimizer.safetensors", "state.json")


def tensors(step):
    generator = torch.Generator().manual_seed(step)
    return {"weight": torch.randn(30, 4, generator=generator), "gain": torch.full((4,), step * 1.0)}


def write(folder, *steps):
    for step in steps:
        moments = {"exp_avg.weight": tensors(step)["weight"] * 2, "step.weight": torch.tensor(3.0)}
        write_checkpoint(folder, step, tensors(step), moments, {"rng": "abc"})


def damage(path, how):
    if how == "missing":
        path.unlink()
    elif how == "truncated":
        os.truncate(path, path.stat().st_size - 3)
    elif how == "empty":
        os.truncate(path, 0)
    else:
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)


def test_round_trip(tmp_path):
    write(tmp_path, 7)
    assert sorted(path.name for path in (tmp_path / "step-00000007").iterdir()) == sorted(FILES)
    checkpoint = read_checkpoint(tmp_path, 7)
    assert (checkpoint.step, checkpoint.state["rng"]) == (7, "abc")
    for name, tensor in tensors(7).items():
        assert torch.equal(checkpoint.model()[name], tensor)
    assert torch.equal(checkpoint.optimizer()["exp_avg.weight"], tensors(7)["weight"] * 2)


@pytest.mark.parametrize("how", ["missing", "truncated", "empty", "altered"])
@pytest.mark.parametrize("name", FILES)
def test_damage_is_found_and_the_one_before_used(tmp_path, name, how):
    assert newest_checkpoint(tmp_path / "none", pytest.fail) is None
    write(tmp_path, 10, 20)
    damage(tmp_path / "step-00000020" / name, how)
    messages = []
    assert newest_checkpoint(tmp_path, messages.append).step == 10
    (message,) = messages
    assert message.startswith("checkpoint 20 is damaged (") and name in message
    # It is kept, out of the way: the run can write step 20 again.
    assert list_steps(tmp_path) == [10]
    assert (tmp_path / "damaged-step-00000020-1").is_dir()
    write(tmp_path, 20)
    assert newest_checkpoint(tmp_path, pytest.fail).step == 20


def test_a_checkpoint_under_another_name_is_damaged(tmp_path):
    write(tmp_path, 10)
    shutil.copytree(tmp_path / "step-00000010", tmp_path / "step-00000030")
    with pytest.raises(DamagedFile, match="the checkpoint of step 10"):
        read_checkpoint(tmp_path, 30)


def test_files_of_two_checkpoints_mixed_up(tmp_path):
    write(tmp_path, 10, 20)
    shutil.copy(tmp_path / "step-00000010" / FILES[0], tmp_path / "step-00000020" / FILES[0])
    with pytest.raises(DamagedFile, match=FILES[0]):
        read_checkpoint(tmp_path, 20)


def test_nothing_is_unpickled(tmp_path):
    class Trap:
        def __reduce__(self):
            return pytest.fail, ("unpickled",)

    write(tmp_path, 10)
    path = tmp_path / "step-00000010" / FILES[1]
    path.write_bytes(pickle.dumps(Trap()))
    state_path = path.with_name("state.json")
    state = json.loads(state_path.read_text())
    state["checksums"][FILES[1]] = file_checksum(path)
    state.pop("checksum")
    state_path.write_text(json.dumps(sealed(state)))
    with pytest.raises(Exception, match=r"(?i)header"):
        read_checkpoint(tmp_path, 10).optimizer()


def test_prune_keeps_the_last_and_milestones(tmp_path):
    write(tmp_path, *range(10, 80, 10))
    prune_checkpoints(tmp_path, 2, 30)
    assert list_steps(tmp_path) == [30, 60, 70]
    prune_checkpoints(tmp_path, 1, 0)
    assert list_steps(tmp_path) == [70]
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000070"]


@pytest.mark.parametrize("call", range(8))
def test_a_failed_write_leaves_what_was_there(tmp_path, monkeypatch, call):
    """The disk fails at one system call after another."""
    code = errno.ENOSPC
    write(tmp_path, 10)
    calls = 0

    def failing(real):
        def fail_once(*arguments, **options):
            nonlocal calls
            calls += 1
            if calls == call + 1:
                raise OSError(code, os.strerror(code))
            return real(*arguments, **options)

        return fail_once

    for name in ("fsync", "rename", "open"):
        monkeypatch.setattr(os, name, failing(getattr(os, name)))
    try:
        write(tmp_path, 20)
        assert call > 5, "every one of the first calls matters"
    except OSError as error:
        assert error.errno == code
    monkeypatch.undo()
    assert {path.name for path in tmp_path.iterdir()} <= {"step-00000010", "step-00000020"}
    assert newest_checkpoint(tmp_path, pytest.fail).step in (10, 20)


def test_a_killed_write_is_cleaned_up(tmp_path, monkeypatch):
    write(tmp_path, 10)

    def die(*arguments):
        raise SystemExit

    monkeypatch.setattr(os, "rename", die)
    monkeypatch.setattr(shutil, "rmtree", lambda *arguments, **options: None)
    with pytest.raises(SystemExit):
        write(tmp_path, 20)
    monkeypatch.undo()
    assert len(list(tmp_path.iterdir())) == 2
    assert newest_checkpoint(tmp_path, pytest.fail).step == 10
    remove_unfinished(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000010"]


@pytest.mark.parametrize("fused", [True, False])
def test_steps_are_counted_where_the_optimizer_wants_them(fused):
    """On a GPU a fused optimizer refuses a count of steps on the CPU; the others keep it there."""
    parameter = torch.nn.Parameter(torch.empty(3, device="meta"))
    optimizer = torch.optim.AdamW([parameter])
    optimizer.param_groups[0]["fused"] = fused
    saved = {"step.gain": torch.tensor(3.0), "exp_avg.gain": torch.zeros(3)}
    restore_optimizers([optimizer], {parameter: "gain"}, saved)
    state = optimizer.state[parameter]
    assert state["exp_avg"].device.type == "meta"
    assert state["step"].device.type == ("meta" if fused else "cpu")
