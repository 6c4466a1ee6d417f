"""Routers that are spread over ranks route, and learn, like the unsplit one."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from integrations.megatron.processes import run_processes
from mosar import MoSARConfig, PostPositionRouter
from mosar.integrations.megatron.parallel_router import ParallelRouter, local_groups


class Ranks:
    """A process group as far as building a router needs it."""

    def __init__(self, rank, size):
        self._rank, self._size = rank, size

    def rank(self):
        return self._rank

    def size(self):
        return self._size


@st.composite
def splits(draw):
    """Heads, routing groups and ranks that fit together, ranks more than heads too."""
    groups, of_group = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    heads = groups * of_group
    sizes = [size for size in range(1, 9) if not heads % size or not size % heads]
    return heads, groups, draw(st.sampled_from(sizes))


@given(splits(), st.integers(1, 3), st.integers(1, 5), st.integers(1, 4))
def test_partial_sums_of_all_ranks_are_the_unsplit_routers(split, batch, length, dim):
    heads, groups, size = split
    config = MoSARConfig.scaled(16, routing_groups=groups, router_hidden=5)
    torch.manual_seed(3)
    whole = PostPositionRouter(heads * dim, config).double()
    x = torch.randn(length, batch, heads, dim, dtype=torch.float64)
    total = torch.zeros(())
    for rank in range(size):
        part = ParallelRouter(heads, dim, config, Ranks(rank, size), dtype=torch.float64)
        part.load(whole)
        first = part.shard * part.local_heads
        total = total + part.partial_sums(x[:, :, first : first + part.local_heads])
        assert len(part.groups_of_heads) == part.local_heads
    expected = whole(x.transpose(0, 1))
    routed = part.finish(total)
    torch.testing.assert_close(routed.logits, expected.logits)
    torch.testing.assert_close(routed.probabilities, expected.probabilities)


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_the_seed_gives_the_same_router_at_any_size(size):
    config = MoSARConfig.scaled(16)
    torch.manual_seed(5)
    whole = PostPositionRouter(4 * 3, config)
    for rank in range(size):
        torch.manual_seed(5)
        part = ParallelRouter(4, 3, config, Ranks(rank, size))
        again = ParallelRouter(4, 3, config, Ranks(rank, size))
        again.load(whole)
        for one, other in zip(part.parameters(), again.parameters(), strict=True):
            assert torch.equal(one, other)


def test_which_parameters_the_norm_of_the_gradient_counts():
    config = MoSARConfig.scaled(16)
    split = ParallelRouter(4, 3, config, Ranks(1, 2))
    assert split.weight1.tensor_model_parallel and not split.weight1.shared
    assert not split.weight2.tensor_model_parallel
    # Two ranks hold each of two heads; the second of a pair would count it again.
    assert [ParallelRouter(2, 3, config, Ranks(r, 4)).weight1.shared for r in range(4)] == [
        *(False, True, False, True)
    ]
    # One head is the same everywhere, and counted on the first rank alone.
    assert not ParallelRouter(1, 3, config, Ranks(1, 2)).weight1.tensor_model_parallel


def test_autocast_leaves_routers_in_float32():
    config = MoSARConfig.scaled(16)
    router = ParallelRouter(2, 3, config, dtype=torch.bfloat16)
    assert router.partial_sums(torch.randn(5, 1, 2, 3, dtype=torch.bfloat16)).dtype == torch.float32


def test_heads_that_do_not_spread_are_refused():
    with pytest.raises(ValueError, match="6 heads cannot be spread over 4 tensor-parallel ranks"):
        ParallelRouter(6, 2, MoSARConfig(), Ranks(0, 4))
    with pytest.raises(ValueError, match="routing_groups must divide the 3 heads, got 2"):
        ParallelRouter(3, 2, MoSARConfig(routing_groups=2))
    router = ParallelRouter(4, 2, MoSARConfig(), Ranks(0, 2))
    with pytest.raises(ValueError, match="this rank routes 2 heads of 2, got 4 of 2"):
        router.partial_sums(torch.zeros(1, 1, 4, 2))
    with pytest.raises(ValueError, match="the router is of 3 heads, not of 4"):
        router.load(PostPositionRouter(6, MoSARConfig()))


@pytest.mark.parametrize(
    ("of_heads", "expected"),
    [([0, 0], [0]), ([0, 0, 1, 1], [0, 1]), ([1, 2], [1, 2]), ([0, 0, 1], [0, 0, 1])],
)
def test_groups_of_a_rank(of_heads, expected):
    assert local_groups(of_heads) == expected


def test_two_processes_route_and_learn_as_one(tmp_path):
    run_processes("router_processes.py", tmp_path)
