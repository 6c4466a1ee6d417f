"""Meshes: which fit, which is chosen, and what is sent over them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mosar.errors import PlanError
from mosar.model.parameters import parameter_parts
from mosar.planning.communication import data_bytes, shard_bytes, tensor_bytes
from mosar.planning.mesh import fitting_meshes
from mosar.planning.parameters import tensor_part
from mosar.planning.plan import PEAK, make_plan
from mosar.training.distributed.mesh import Mesh
from planning.configs import small_config

# 4 query heads, 2 key heads, feed-forward of 192.
CONFIG = small_config()


def meshes_of(config, gpus, *sizes):
    given = {axis: size for axis, size in zip(Mesh._fields, sizes, strict=False) if size}
    return fitting_meshes(config, gpus, given)


@given(st.integers(1, 48))
def test_every_mesh_uses_all_ranks_and_divides_the_heads(gpus):
    meshes = meshes_of(CONFIG, gpus)
    assert meshes[0] == Mesh(data=gpus)
    assert len(set(meshes)) == len(meshes)
    for mesh in meshes:
        assert mesh.num_processes == gpus
        assert mesh.tensor in (1, 2, 4)


def test_given_sizes_are_kept():
    assert meshes_of(CONFIG, 8, None, 2, 2) == [Mesh(2, 2, 2)]
    assert meshes_of(CONFIG, 8, 2, None, 4) == [Mesh(2, 1, 4)]


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ((8, 3, None, None), "--data 3 must multiply to --gpus 8, or divide it, got 3"),
        ((8, 2, 2, 1), "--data 2 x --shard 2 x --tensor 1 must multiply to --gpus 8"),
        ((6, None, None, 3), "--tensor 3 must divide model.num_heads=4"),
        ((8, None, None, 8), "--tensor 8 must divide model.num_heads=4"),
        (
            (2, None, None, 2, "model.num_heads=12", "model.num_kv_heads=3"),
            "--tensor 2 must divide model.num_kv_heads=3, or be a",
        ),
    ],
)
def test_what_does_not_fit_is_said(sizes, said):
    config = small_config("mosar", "smoke", *sizes[4:])
    with pytest.raises(PlanError, match=said):
        meshes_of(config, *sizes[:4])


def test_a_routing_group_stays_on_a_rank():
    grouped = small_config("mosar", "smoke", "attention.routing_groups=2")
    assert {mesh.tensor for mesh in meshes_of(grouped, 4)} == {1, 2}
    assert meshes_of(CONFIG, 2**20)[-1].tensor == 4, "many ranks, at once"
    with pytest.raises(PlanError, match=r"--tensor 4 must divide attention.routing_groups=2"):
        make_plan(grouped, context=64, gpus=4, tensor=4)


def test_the_simplest_mesh_that_fits_is_chosen():
    config = small_config("mosar", "smoke")
    needs = [
        make_plan(config, context=64, gpus=4, data=1, shard=shard, tensor=tensor).value(*PEAK)
        for shard, tensor in ((4, 1), (2, 2), (1, 4))
    ]
    everything = make_plan(config, context=64, gpus=4)
    assert everything.mesh == Mesh(data=4)
    tight = make_plan(config, context=64, gpus=4, data=1, limit=min(needs))
    assert tight.value(*PEAK) == min(needs) and not tight.notes
    short = make_plan(config, context=64, gpus=4, limit=1.0)
    assert "No such mesh fits into 1 B per rank" in short.notes[-1]


def test_windows_are_divided_among_readers():
    config = small_config("mosar", "smoke")  # 4 x 2 windows
    plan = make_plan(config, context=64, gpus=4, data=2, shard=2)
    assert (plan.batch.windows, plan.batch.pass_windows, plan.batch.passes) == (8, 2, 1)
    more = make_plan(config, context=64, gpus=16, data=16)
    assert more.batch.windows == 16 and "--windows sets it" in more.notes[0]
    with pytest.raises(PlanError, match="--windows must be a multiple of data x shard = 4"):
        make_plan(config, context=64, gpus=4, data=4, windows=6)
    # With a number of windows, the meshes that it suits remain.
    assert make_plan(config, context=64, gpus=4, windows=2).mesh == Mesh(2, 1, 2)


def test_what_a_ring_sends():
    config = small_config("mosar", "smoke")
    held = tensor_part(parameter_parts(config.model, config.attention), config.model, Mesh())
    root = config.model.hidden_size * (config.model.vocab_size + 1)
    # Each rank sends its part of the gradient to the next, ranks - 1 times, twice over.
    assert data_bytes(config, Mesh(data=4), 5) == pytest.approx(2 * 3 * (4 * held / 4))
    both = Mesh(data=4, shard=2)
    assert data_bytes(config, both, 5) == pytest.approx(5 * 2 * 3 * (4 * held / 8))
    # What is outside of the layers is gathered once, and stays.
    sent = 5 * 3 * 4 * (3 * held - root) / 4
    assert shard_bytes(config, Mesh(shard=4), 5) == pytest.approx(sent)
    assert data_bytes(config, Mesh(), 5) == shard_bytes(config, Mesh(), 5) == 0


def test_what_tensor_ranks_send():
    plain, routed = (small_config(v, "smoke", "train.accumulation=1") for v in ("rope", "mosar"))
    model, ranks, tokens = plain.model, Mesh(tensor=2), 100
    # Two sums forward and two backward of the stream; over two ranks each sends it once.
    stream = 4 * 4 * model.hidden_size * model.num_layers * tokens
    assert tensor_bytes(plain, ranks, tokens) == stream
    routers = 4 * 2 * (64 + 3) * model.num_layers * tokens
    assert tensor_bytes(routed, ranks, tokens) == stream + routers
    assert tensor_bytes(routed, Mesh(), tokens) == 0
    grouped = small_config("mosar", "smoke", "attention.routing_groups=2")
    assert tensor_bytes(grouped, ranks, tokens) == stream
