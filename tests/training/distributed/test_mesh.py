"""Meshes that do not fit are refused in one line, before anything is made."""

import subprocess
import sys

import pytest
from typer.testing import CliRunner

from mosar.cli import app
from mosar.errors import TrainingError
from mosar.geometries import PAPER_VARIANTS, VARIANTS
from mosar.training.config import DistributedConfig, RunConfig, TrainConfig, changed_config
from mosar.training.distributed.launch import open_team
from mosar.training.distributed.mesh import Mesh, check_mesh
from mosar.training.distributed.share import Share

REFUSED = [
    (
        *(6, ("distributed.tensor=4",)),
        "distributed.tensor=4 need a multiple of 4 processes, and there are 6",
    ),
    (
        *(4, ("distributed.data=2",)),
        "distributed.data=2, distributed.shard=1, distributed.tensor=1 need 2 processes, "
        "and there are 4",
    ),
    (
        *(1, ("distributed.shard=2",)),
        "are for 2 processes, and there is one: start them with torchrun --nproc-per-node 2",
    ),
    (
        *(3, ()),
        "micro_batch x train.accumulation = 8 windows, which distributed.data x "
        "distributed.shard = 3 does not divide",
    ),
    (16, (), "= 8 windows, which distributed.data x distributed.shard = 16"),
    (3, ("distributed.tensor=3",), "distributed.tensor=3 must divide model.num_heads=4"),
    (
        *(4, ("distributed.tensor=4", "model.ffn_size=6")),
        "distributed.tensor=4 must divide model.ffn_size=6",
    ),
    (
        *(4, ("distributed.tensor=4", "model.num_heads=12", "model.num_kv_heads=6")),
        "distributed.tensor=4 must divide model.num_kv_heads=6, or be a multiple of it",
    ),
    (
        *(4, ("distributed.tensor=4", "attention.routing_groups=2")),
        "distributed.tensor=4 must divide attention.routing_groups=2",
    ),
    (
        *(2, ("train.device=cuda:0",)),
        "train.device is cuda:0, but each process uses its own device: set train.device=cuda",
    ),
]


@pytest.mark.parametrize("processes, changes, message", REFUSED)
def test_refused(smoke, processes, changes, message):
    with pytest.raises(TrainingError) as caught:
        check_mesh(smoke("mosar", *changes), processes)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "processes, changes, mesh",
    [
        (1, (), Mesh(1, 1, 1)),
        (8, (), Mesh(8, 1, 1)),
        (8, ("distributed.shard=2", "distributed.tensor=2"), Mesh(2, 2, 2)),
        (4, ("distributed.tensor=4",), Mesh(1, 1, 4)),
        (2, ("distributed.tensor=2", "model.num_kv_heads=1"), Mesh(1, 1, 2)),
    ],
)
def test_resolved(smoke, processes, changes, mesh):
    assert check_mesh(smoke("mosar", *changes), processes) == mesh
    assert mesh.num_processes == processes


@pytest.mark.parametrize(
    "change",
    ["distributed.data=0", "distributed.shard=0", "distributed.tensor=-1", "distributed.timeout=0"],
)
def test_wrong_values(smoke, change):
    with pytest.raises(ValueError, match=f"distributed: {change.split('.')[1].split('=')[0]} must"):
        smoke("mosar", change)


def test_every_variant_can_be_divided_or_says_why_not(smoke):
    for variant in VARIANTS:
        config = smoke(variant, "distributed.tensor=2")
        obstacle = config.attention.build(config.model.head_shape).split_obstacle(2)
        assert obstacle is None or variant not in PAPER_VARIANTS
        if obstacle is None:
            assert check_mesh(config, 2) == Mesh(1, 1, 2)
        else:
            with pytest.raises((ValueError, TrainingError), match=f"geometry {variant} "):
                check_mesh(config, 2)


@pytest.mark.parametrize("micro_batch", [1, 2, 3, 6])
def test_shares_cover_a_step_once(micro_batch):
    train = TrainConfig(steps=1, micro_batch=micro_batch, accumulation=12 // micro_batch)
    for number in (1, 2, 3, 4, 6, 12):
        shares = [Share(index, number) for index in range(number)]
        assert [w for share in shares for w in share.windows(train)] == list(range(12))
        for share in shares:
            assert share.pass_size(train) <= micro_batch
            assert share.pass_size(train) * share.passes(train) == 12 // number
    # One process makes the passes that the configuration says.
    assert Share().passes(train) == train.accumulation


@pytest.mark.parametrize("count", [1, 2, 5, 6, 7])
def test_rounds_count_every_batch_once(count):
    rounds = [list(Share(index, 3).rounds(count)) for index in range(3)]
    assert len({len(each) for each in rounds}) == 1
    assert sorted(n for each in rounds for n, own in each if own) == list(range(count))
    assert all(0 <= n < count for each in rounds for n, _ in each)


def test_older_run_folders_have_no_mesh(smoke):
    config = smoke("mosar")
    values = config.to_dict()
    del values["distributed"]
    assert RunConfig.from_dict(values) == config
    moved = changed_config(config, ["distributed.tensor=2"])
    assert moved.fingerprint() == config.fingerprint()
    assert moved.distributed == DistributedConfig(tensor=2)


def test_one_process_needs_no_launcher(smoke, monkeypatch):
    assert open_team(smoke("mosar", "distributed.data=1")).num_processes == 1
    with pytest.raises(TrainingError, match="torchrun"):
        open_team(smoke("mosar", "distributed.tensor=2"))
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert open_team(smoke("mosar")).num_processes == 1


@pytest.mark.parametrize("rank", [0, 1])
def test_one_process_of_many_says_it(dataset, tmp_path, monkeypatch, rank):
    """Before the processes know each other, each finds out alone, and the first one speaks."""
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("RANK", str(rank))
    words = ["train", "--preset", "smoke", "--data", str(dataset), "--out", str(tmp_path / "run")]
    result = CliRunner().invoke(app, [*words, "--set", "distributed.tensor=2"])
    assert result.exit_code == 1
    said = "need a multiple of 2 processes, and there are 3"
    assert result.output.strip().endswith(said) if rank == 0 else not result.output
    assert not (tmp_path / "run").exists()


PROGRAM = """
import sys
from pathlib import Path
import mosar
from mosar.training.config import resolve_config
from mosar.training.loop import train
config = resolve_config(variant="mosar", preset="smoke", data=Path(sys.argv[1]),
                        changes=["train.steps=1", "train.warmup_steps=1"])
train(config, Path(sys.argv[2]), progress=False)
ours = ("process_team", "build", "tensor", "operators", "checkpoint")
unwanted = {f"mosar.training.distributed.{name}" for name in ours}
print(sorted(sys.modules.keys() & (unwanted | {"torch.distributed.checkpoint.hf_storage"})))
"""


def test_one_process_imports_nothing_for_several(dataset, tmp_path):
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(dataset), str(tmp_path / "run")],
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE=two"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE=0"),
        ({"WORLD_SIZE": "2"}, "RANK not set"),
        ({"WORLD_SIZE": "2", "RANK": "2"}, "RANK=2 and WORLD_SIZE=2"),
        ({"WORLD_SIZE": "2", "RANK": "0"}, "MASTER_ADDR and MASTER_PORT not set"),
        (
            {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "abc"},
            "MASTER_PORT=abc",
        ),
    ],
)
def test_half_an_environment_is_one_line(dataset, tmp_path, monkeypatch, variables, said):
    for name in ("WORLD_SIZE", "RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    words = ["train", "--preset", "smoke", "--data", str(dataset), "--out", str(tmp_path / "run")]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 1
    (line,) = result.stderr.splitlines()
    assert said in line and "torchrun --nproc-per-node N -m mosar train" in line
    assert not list(tmp_path.iterdir())
