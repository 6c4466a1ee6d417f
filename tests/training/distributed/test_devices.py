"""What only a GPU, or a cluster, would show: by tensors that pretend, and processes that do."""

import os
import subprocess
import sys

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from mosar.training.distributed.mesh import Mesh
from mosar.training.distributed.process_team import ProcessTeam
from training.distributed.launches import environment


class Alone(ProcessTeam):
    """Of one process, so that nothing is sent."""

    def __init__(self, mesh):
        self.mesh = mesh

    def _add(self, values, axis):
        pass


@pytest.mark.parametrize("mesh", [Mesh(data=2), Mesh(shard=2)])
def test_the_norm_of_gradients_on_a_gpu(mesh):
    """Nothing is divided along `tensor`, and the norm of nothing is a number on the CPU."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        parameter = torch.nn.Parameter(torch.empty(3, device="cuda"))
        parameter.grad = torch.empty(3, device="cuda")
        assert Alone(mesh).gradient_norm([parameter]).device.type == "cuda"


PARTS = """
import os, sys
import torch
import torch.distributed as dist
from pathlib import Path
from torch.testing._internal.distributed.fake_pg import FakeStore
from mosar.training.distributed.tensor import local
from mosar.training.config import resolve_config
from mosar.training.distributed.launch import open_team
world = int(os.environ["WORLD_SIZE"])
dist.init_process_group("fake", rank=int(os.environ["RANK"]), world_size=world, store=FakeStore())
config = resolve_config(
    variant="mosar", preset="smoke", data=".", vocab_size=257, changes=sys.argv[1:]
)
team = open_team(config)
with team.running(Path(".")):
    decoder = team.build_decoder(config, initialise=True)
    for name, parameter in decoder.named_parameters():
        if "layers.0" in name and "router" in name:
            print(name.rpartition("geometry.")[2], *local(parameter).shape)
"""


@pytest.mark.parametrize(
    ("rank", "world", "changes", "expected"),
    [
        # One group: its 64 hidden numbers are divided, and no rank gets padding.
        (1, 2, ("distributed.shard=2",), {"query_router.weight1": "1 32 64"}),
        # What is divided by heads already is judged by what is left of it.
        (
            *(3, 4, ("distributed.shard=2", "distributed.tensor=2", "attention.routing_groups=2")),
            {"query_router.weight1": "1 32 32", "key_router.bias2": "0 3"},
        ),
        # Nothing can be divided evenly: as FSDP does by itself.
        (
            *(7, 8, ("distributed.shard=4", "distributed.tensor=2", "model.num_heads=2")),
            {"query_router.weight1": "0 7 6"},
        ),
    ],
    ids=["shard", "shard x tensor", "uneven"],
)
def test_routers_are_divided(rank, world, changes, expected):
    if world == 8:
        changes = (
            *(*changes, "model.head_dim=6", "attention.router_hidden=7", "train.micro_batch=8"),
            "model.query_pre_attn_scalar=6",
        )
    done = subprocess.run(
        [sys.executable, "-c", PARTS, *changes],
        env=environment(WORLD_SIZE=str(world), RANK=str(rank)),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    shapes = dict(line.split(" ", 1) for line in done.stdout.splitlines())
    assert {name: shapes[name] for name in expected} == expected
    assert os.environ.get("WORLD_SIZE") is None
