"""Sort by regime: two planners, one plan, and that plan is the support."""

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cases import SMALL, Case, cases, configs
from mosar import MoSARConfig, build_hard_domain
from mosar.core.layout import resolve_layout
from mosar.kernels.native import build_native_plan
from mosar.kernels.plan import Plan, build_plan, dense_plan_input, sparse_plan_input

PLANNERS = (build_plan, build_native_plan)


def layout_of(case):
    return resolve_layout(case.batch, case.num_queries, case.num_keys, **case.placement)


def sparse_input(case):
    return sparse_plan_input(*case.labels, case.config, layout_of(case))


def pairs_of(plan):
    """The pairs the runs stand for, [P, T, S]; each must be named once."""
    rows, num_queries = plan.query_order.shape
    count = torch.zeros(rows, num_queries, plan.key_order.shape[1], dtype=torch.long)
    for row in range(rows):
        for place, query in enumerate(plan.query_order[row].tolist()):
            for lo, hi in zip(plan.run_lo[row, place], plan.run_hi[row, place], strict=True):
                assert lo <= hi
                count[row, query, plan.key_order[row, int(lo) : int(hi)].long()] += 1
    assert count.max() <= 1
    return count.bool()


@given(cases(max_length=20), st.booleans())
def test_both_planners_agree(case, dense):
    plan_input = dense_plan_input(layout_of(case)) if dense else sparse_input(case)
    by_torch, by_hand = (build(plan_input) for build in PLANNERS)
    for field in dataclasses.fields(Plan):
        if field.name == "source":
            continue
        ours, theirs = getattr(by_torch, field.name), getattr(by_hand, field.name)
        assert ours.dtype == theirs.dtype == torch.int32, field.name
        assert torch.equal(ours, theirs), field.name


@pytest.mark.parametrize("build", PLANNERS)
@given(case=cases(max_length=20))
def test_the_runs_are_the_support(build, case):
    plan = build(sparse_input(case))
    domain = build_hard_domain(*case.labels, case.config, **case.placement)
    assert torch.equal(pairs_of(plan), domain.mask.flatten(0, -3))
    assert torch.equal(plan.row_pair_counts, domain.row_counts.flatten())
    assert plan.pair_count == int(domain.mask.sum())


@pytest.mark.parametrize("build", PLANNERS)
@given(case=cases(max_length=20))
def test_a_dense_plan_holds_every_pair_that_exists(build, case):
    layout = layout_of(case)
    plan = build(dense_plan_input(layout))
    assert torch.equal(pairs_of(plan), layout.exists())


@given(cases(max_length=20))
def test_orders_sort_by_class_then_place_and_leave_padding_out(case):
    given_ = sparse_input(case)
    plan = build_native_plan(given_)
    for row in range(plan.query_order.shape[0]):
        queries = plan.query_order[row].long()
        assert sorted(queries.tolist()) == list(range(case.num_queries))
        ranks = [(int(given_.labels_q[row, i]), int(given_.places_q[row, i])) for i in queries]
        assert ranks == sorted(ranks)
        count = int(plan.key_offsets[row, -1])
        keys = plan.key_order[row, :count].tolist()
        every = range(case.num_keys)
        valid = every if given_.valid_k is None else [j for j in every if given_.valid_k[row, j]]
        assert sorted(keys) == list(valid)
        # Stable: of equal class and place, the earlier key comes first.
        ranks = [(int(given_.classes_k[row, j]), int(given_.places_k[row, j]), j) for j in keys]
        assert ranks == sorted(ranks)
        assert (plan.key_order[row, count:] == -1).all()


@given(cases(max_length=30))
def test_wider_tiles_evaluate_no_fewer_pairs(case):
    plan = build_native_plan(sparse_input(case))
    counts = [plan.padded_pair_count(tile) for tile in (1, 2, 4, 8, 16, 32)]
    assert counts[0] == plan.pair_count
    assert counts == sorted(counts)


def test_padded_pairs_by_hand():
    """Four global queries that read 1, 2, 3 and 4 keys; three of them share a tile."""
    labels = torch.full((1, 4), SMALL.global_index)
    plan = build_plan(sparse_plan_input(labels, labels, SMALL, resolve_layout(1, 4, 4)))
    assert plan.pair_count == 10
    assert plan.padded_pair_count(3) == 3 * 3 + 4
    assert plan.padded_pair_count(4) == plan.padded_pair_count(100) == 16
    assert plan.density == 1


@given(configs(length=30), st.integers(1, 30), st.integers(1, 30), st.integers(0, 2**16))
def test_density_is_that_of_the_core(config, num_queries, num_keys, seed):
    num_queries = min(num_queries, num_keys)
    case = Case(config=config, num_queries=num_queries, num_keys=num_keys, batch=2, seed=seed)
    domain = build_hard_domain(*case.labels, config)
    assert build_native_plan(sparse_input(case)).density == pytest.approx(domain.density)


@pytest.mark.parametrize(
    "trait",
    [
        {"padding": "left"},
        {"padding": "right"},
        {"segments": "packed"},
        {"window": 7},
        {"positions": "gaps"},
    ],
    ids=str,
)
def test_only_pairs_that_exist_count_as_causal(trait):
    case = Case(batch=3, num_queries=40, num_keys=40, **trait)
    domain = build_hard_domain(*case.labels, SMALL, **case.placement)
    assert build_native_plan(sparse_input(case)).density == pytest.approx(domain.density)


@pytest.mark.parametrize("build", PLANNERS)
def test_a_long_plan_needs_no_square(build):
    """At this length one byte per pair would be 40 GB."""
    length, config = 200_000, MoSARConfig(num_sinks=4)
    generator = torch.Generator().manual_seed(0)
    labels_q, labels_k = torch.randint(0, 3, (2, 1, length), generator=generator)
    plan = build(sparse_plan_input(labels_q, labels_k, config, resolve_layout(1, length, length)))
    domain = build_hard_domain(labels_q, labels_k, config, materialize=False)
    assert plan.pair_count == int(domain.row_counts.sum())
    assert plan.density == pytest.approx(domain.density)


@pytest.mark.parametrize("build", PLANNERS)
def test_positions_may_be_as_far_as_int32_goes(build):
    far = 2**31 - 3
    labels = torch.tensor([[0, 2, 2]])
    layout = resolve_layout(
        1,
        3,
        3,
        query_positions=torch.tensor([[0, far, far + 1]]),
        key_positions=torch.tensor([[0, 1, far]]),
    )
    plan = build(sparse_plan_input(labels, labels, SMALL, layout))
    mask = build_hard_domain(
        labels,
        labels,
        SMALL,
        query_positions=layout.query_positions,
        key_positions=layout.key_positions,
    ).mask
    assert torch.equal(pairs_of(plan), mask)


def test_segments_that_span_more_than_int32_are_refused():
    labels, far = torch.zeros(1, 4, dtype=torch.long), 2**31 - 3
    layout = resolve_layout(
        1,
        4,
        4,
        key_positions=torch.tensor([[0, far, 0, far]]),
        segment_ids=torch.tensor([[0, 0, 1, 1]]),
    )
    with pytest.raises(ValueError, match="segments together must span less"):
        sparse_plan_input(labels, labels, SMALL, layout)


@pytest.mark.parametrize("tile", [0, -1])
def test_a_tile_holds_a_query(tile):
    labels = torch.zeros(1, 4, dtype=torch.long)
    plan = build_plan(sparse_plan_input(labels, labels, SMALL, resolve_layout(1, 4, 4)))
    with pytest.raises(ValueError, match=f"tile .*{tile}"):
        plan.padded_pair_count(tile)
