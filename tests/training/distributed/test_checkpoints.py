"""Saved on one mesh, gone on with on another; joined again for one machine; never a pickle."""

import json
import pickletools

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from mosar.cli import app
from mosar.errors import DamagedFile
from mosar.training.checkpoints import (
    list_steps,
    open_checkpoint,
    read_checkpoint,
)
from mosar.training.config import resolve_config
from mosar.training.loop import train
from mosar.training.run_folder import read_metrics
from training.distributed.launches import run_jobs
from training.distributed.test_agreement import MESHES, PER_STEP, alone, difference

# One schedule whatever the number of steps.
SETTINGS = (
    "train.decay_steps=20",
    "train.eval_every=4",
    "attention.cost_warmup=5",
    "train.keep_last=9",
)


def changes(steps, *more):
    return [f"train.steps={steps}", *SETTINGS, *more]


def test_from_mesh_to_mesh(dataset, tmp_path):
    """One process → DDP → tensor → FSDP → one process; then as a plain folder, and evaluated."""
    out, base = tmp_path / "run", {"variant": "mosar-cost", "data": str(dataset)}
    train(
        resolve_config(variant="mosar-cost", preset="smoke", data=dataset, changes=changes(3)),
        out,
        progress=False,
    )
    jobs = [
        {**base, "out": str(out), "changes": changes(steps, *MESHES[mesh])}
        for steps, mesh in ((6, "ddp"), (9, "tp"), (12, "fsdp"), (15, "tp"))
    ]
    elsewhere = tmp_path / "elsewhere"
    refused = {**base, "out": str(out), "changes": changes(15, "train.seed=1", *MESHES["tp"])}
    jobs.append({**refused, "error": "holds a run of another configuration: train.seed is 0"})
    beyond = {**base, "out": str(out), "changes": changes(14, *MESHES["tp"])}
    jobs.append({**beyond, "error": "is at step 15, beyond train.steps=14"})
    # A folder that cannot be made, and data that is not there.
    elsewhere.write_text("a file")
    jobs.append({**base, "out": str(elsewhere), "changes": changes(3), "error": "elsewhere"})
    run_jobs(2, jobs)
    config = resolve_config(variant="mosar-cost", preset="smoke", data=dataset, changes=changes(18))
    train(config, out, progress=False)

    assert list_steps(out / "checkpoints") == [3, 6, 9, 10, 12, 15, 18]
    whole = alone(dataset, tmp_path / "whole", "mosar-cost", changes(18))
    # The lines of both but for the evaluations that were the last step of a part.
    ends = {3, 6, 9, 15}
    lines = [
        line for line in read_metrics(out) if line["split"] == "train" or line["step"] not in ends
    ]
    (tmp_path / "joined").mkdir()
    (tmp_path / "joined" / "metrics.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in lines)
    )
    assert difference(tmp_path / "joined", whole) <= 18 * PER_STEP
    check_no_pickle(out)
    check_plain_folder(dataset, out, tmp_path)
    check_damage(out)


def check_no_pickle(out):
    """Every file of a checkpoint is safetensors or JSON."""
    for path in (out / "checkpoints").rglob("*"):
        if path.is_file():
            assert path.suffix in (".safetensors", ".json"), path
            data = path.read_bytes()
            with pytest.raises(ValueError):
                # What a pickle is, this reads to its end.
                for _ in pickletools.genops(data):
                    pass


def check_plain_folder(dataset, out, tmp_path):
    """The joined checkpoint is one that one process writes, and evaluates the same."""
    for step in (9, 12):
        plain = tmp_path / f"plain-{step}"
        words = ["consolidate", str(out), "--out", str(plain), "--step", str(step)]
        result = CliRunner().invoke(app, words)
        assert result.exit_code == 0, result.output
        files = sorted(p.name for p in (plain / "checkpoints" / f"step-{step:08d}").iterdir())
        assert files == ["model.safetensors", "optimizer.safetensors", "state.json"]
        sharded = open_checkpoint(out / "checkpoints", step)
        assert len(list(sharded.path.glob("shard-*"))) == 4
        tensors = load_file(plain / "checkpoints" / f"step-{step:08d}" / "model.safetensors")
        assert tensors.keys() == sharded.model().keys()
        assert all(torch.equal(tensors[name], t) for name, t in sharded.model().items())
        assert [line["step"] for line in read_metrics(plain)][-1] == step
        results = {}
        for run in (plain, out):
            file = tmp_path / f"{run.name}-{step}.jsonl"
            words = ["evaluate", str(run), "--lengths", "1x", "--tokens", "256", "--no-progress"]
            words += ["--step", str(step), "--json", str(file), "--force", "--data", str(dataset)]
            result = CliRunner().invoke(app, words)
            assert result.exit_code == 0, result.output
            records = [json.loads(line) for line in file.read_text().splitlines()]
            results[run] = [record["loss"] for record in records if "loss" in record] or records
        assert results[plain] == results[out]
    result = CliRunner().invoke(app, ["consolidate", str(out), "--out", str(tmp_path / "plain-9")])
    assert result.exit_code == 1 and "already exists" in result.output
    words = ["consolidate", str(out), "--out", str(tmp_path / "none"), "--step", "4"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 1 and "has no checkpoint of step 4" in result.output
    assert not (tmp_path / "none").exists()
    # The plain folder goes on in one process, to where the run itself went.
    config = resolve_config(variant="mosar-cost", preset="smoke", data=dataset, changes=changes(18))
    train(config, tmp_path / "plain-12", progress=False)
    ours, theirs = (
        {line["step"]: line["loss"] for line in read_metrics(run, "train")}
        for run in (tmp_path / "plain-12", out)
    )
    assert abs(ours[18] - theirs[18]) <= 18 * PER_STEP * theirs[18]


def check_damage(out):
    """A part that is missing or altered is seen, and named."""
    folder = out / "checkpoints"
    name = "shard-00002-model-00001-of-00002.safetensors"
    part = folder / "step-00000012" / name
    data = bytearray(part.read_bytes())
    data[-1] ^= 1
    part.write_bytes(data)
    with pytest.raises(DamagedFile, match=f"{name} was truncated or altered"):
        read_checkpoint(folder, 12)
    part.unlink()
    with pytest.raises(DamagedFile, match=f"{name} is missing"):
        read_checkpoint(folder, 12)
