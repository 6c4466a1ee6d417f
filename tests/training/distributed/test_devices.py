"""What only a GPU, or a cluster, would show: by tensors that pretend, and processes that do."""

import json
import sys

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from mosar.training.distributed.mesh import Mesh
from mosar.training.distributed.process_team import ProcessTeam
from processes import run
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
import json, os, sys
import torch.distributed as dist
from pathlib import Path
from torch.testing._internal.distributed.fake_pg import FakeStore
from mosar.training.distributed.tensor import local
from mosar.training.config import resolve_config
from mosar.training.distributed.launch import open_team
for rank, world, changes, expected in json.loads(sys.argv[1]):
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world))
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    config = resolve_config(
        variant="mosar", preset="smoke", data=".", vocab_size=257, changes=changes
    )
    team = open_team(config)
    with team.running(Path(".")):
        named = team.build_decoder(config, initialise=True).named_parameters()
        prefix = "layers.0.attention.geometry."
        shapes = {n.removeprefix(prefix): [*local(p).shape] for n, p in named}
        assert {name: shapes[name] for name in expected} == expected, shapes
    dist.destroy_process_group()
"""


def test_routers_are_divided():
    cases = [
        # One group: its 64 hidden numbers are divided, and no rank gets padding.
        (1, 2, ("distributed.shard=2",), {"query_router.weight1": (1, 32, 64)}),
        # What is divided by heads already is judged by what is left of it.
        (
            *(3, 4, ("distributed.shard=2", "distributed.tensor=2", "attention.routing_groups=2")),
            {"query_router.weight1": (1, 32, 32), "key_router.bias2": (0, 3)},
        ),
        # Nothing can be divided evenly: as FSDP does by itself.
        (
            *(7, 8),
            (
                *("distributed.shard=4", "distributed.tensor=2", "model.num_heads=2"),
                *("model.head_dim=6", "attention.router_hidden=7", "train.micro_batch=8"),
                "model.query_pre_attn_scalar=6",
            ),
            {"query_router.weight1": (0, 7, 6)},
        ),
    ]
    run([sys.executable, "-c", PARTS, json.dumps(cases)], env=environment())
