"""Which pairs exist: defaults, padding, segments, windows, sinks."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cases import arrays, cases
from core import outsider
from mosar.core.layout import resolve_layout


def layout_of(case):
    return resolve_layout(case.batch, case.num_queries, case.num_keys, **case.placement)


def pairs_of(case, num_sinks=0):
    return outsider.Pairs(
        case.batch,
        case.num_queries,
        case.num_keys,
        num_sinks=num_sinks,
        **arrays(case.placement),
    )


def every_pair(case):
    return [
        [[(b, i, j) for j in range(case.num_keys)] for i in range(case.num_queries)]
        for b in range(case.batch)
    ]


@given(cases())
def test_existing_pairs_are_the_outsiders(case):
    pairs = pairs_of(case)
    expected = [[[pairs.exists(*p) for p in row] for row in rows] for rows in every_pair(case)]
    shape = (case.batch, case.num_queries, case.num_keys)
    assert torch.equal(layout_of(case).exists().expand(shape), torch.tensor(expected))


@given(cases(), st.integers(0, 4))
def test_sinks_are_the_outsiders(case, num_sinks):
    pairs = pairs_of(case, num_sinks)
    expected = [[pairs.is_sink(b, j) for j in range(case.num_keys)] for b in range(case.batch)]
    sinks = layout_of(case).sinks(num_sinks).expand(case.batch, case.num_keys)
    assert torch.equal(sinks, torch.tensor(expected))


@given(cases())
def test_max_distance_is_that_of_the_farthest_existing_pair(case):
    layout = layout_of(case)
    distances, exists = torch.broadcast_tensors(layout.distances(), layout.exists())
    assert layout.max_distance() == int(torch.where(exists, distances, -1).max())


@pytest.mark.parametrize(("num_queries", "num_keys"), [(5, 5), (1, 5), (3, 5), (1, 1)])
def test_by_default_queries_are_the_last_of_the_keys(num_queries, num_keys):
    layout = resolve_layout(2, num_queries, num_keys)
    assert layout.key_positions.tolist() == [list(range(num_keys))]
    assert layout.query_positions.tolist() == [list(range(num_keys))[num_keys - num_queries :]]
    causal = torch.ones(num_queries, num_keys, dtype=torch.bool).tril(num_keys - num_queries)
    assert torch.equal(layout.exists()[0], causal)


WRONG = [
    ({"window": -1}, "window .*-1"),
    ({"window": math.nan}, "window .*nan"),
    ({"window": True}, "window .*True"),
    ({"window": "8"}, "window .*'8'"),
    ({"query_positions": [[0, 1, 2]]}, "query_positions must be a tensor, got list"),
    ({"query_positions": torch.zeros(2, 4).long()}, r"query_positions .*\[2, 3\]"),
    ({"query_positions": torch.zeros(2, 3)}, "query_positions must hold integers"),
    ({"query_positions": torch.full((2, 3), -1)}, "query_positions .*-1"),
    ({"query_positions": torch.zeros(2, 3).long().to("meta")}, "query_positions .*device"),
    ({"key_positions": 3}, "key_positions must be a tensor, got int"),
    ({"key_positions": torch.zeros(1, 5).long()}, r"key_positions .*\[2, 5\]"),
    ({"key_positions": torch.zeros(2, 5).bool()}, "key_positions must hold integers"),
    ({"key_positions": torch.tensor([[0, 1, 2, 3, 4], [0, 1, 3, 2, 4]])}, "key_positions .*row 1"),
    ({"key_positions": torch.arange(-2, 3).expand(2, 5)}, "key_positions .*-2"),
    ({"key_positions": torch.zeros(2, 5).long().to("meta")}, "key_positions .*device"),
    ({"key_valid": torch.ones(2, 3).bool()}, r"key_valid .*\[2, 5\]"),
    ({"key_valid": torch.ones(2, 5)}, "key_valid must be a bool"),
    ({"key_valid": [[True] * 5] * 2}, "key_valid must be a tensor"),
    ({"key_valid": torch.ones(2, 5).bool().to("meta")}, "key_valid .*device"),
    ({"segment_ids": torch.zeros(2, 3).long()}, r"segment_ids .*\[2, 5\]"),
    ({"segment_ids": torch.zeros(2, 5)}, "segment_ids must hold integers"),
    ({"segment_ids": torch.zeros(2, 5).long().to("meta")}, "segment_ids .*device"),
    (
        {
            "segment_ids": torch.tensor([[0, 1, 0, 1, 1]] * 2),
            "key_positions": torch.tensor([[5, 0, 4, 1, 2]] * 2),
        },
        "key_positions .*of a segment",
    ),
]


@pytest.mark.parametrize(("placement", "match"), WRONG)
def test_wrong_placement_is_named(placement, match):
    with pytest.raises(ValueError, match=match):
        resolve_layout(2, 3, 5, device="cpu", **placement)


def test_more_queries_than_keys_must_be_placed():
    placed = {"query_positions": torch.arange(6).expand(2, 6)}
    assert resolve_layout(2, 6, 5, **placed).exists().sum() == 2 * (15 + 5)
    with pytest.raises(ValueError, match="give query_positions"):
        resolve_layout(2, 6, 5)
    with pytest.raises(ValueError, match="segment_ids cannot place the queries"):
        resolve_layout(2, 6, 5, segment_ids=torch.zeros(2, 5).long(), **placed)
