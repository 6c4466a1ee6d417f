"""The plan on the device is the plan, turned around lists the readers, and waits for no GPU."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from cases import Case, cases
from kernels.budget import differentiable, distance_bias, operator
from mosar import MoSARConfig, Regime
from mosar.core.layout import resolve_layout
from mosar.core.regimes import RegimeKernel
from mosar.kernels.plan import build_plan, dense_plan_input, sparse_plan_input
from mosar.kernels.tables import gate_table
from mosar.kernels.triton import ops
from mosar.kernels.triton import plan as device_plan
from mosar.kernels.triton.plan import dense_plan, level_until, reader_runs, sparse_plan


def layout_of(case):
    return resolve_layout(case.batch, case.num_queries, case.num_keys, **case.placement)


def listed(plan, row):
    """All (label, class, sorted query, sorted key, distance) of a plan row, one by one."""
    offsets_q, offsets_k = plan.query_offsets[row].tolist(), plan.key_offsets[row].tolist()
    for query in range(plan.run_lo.shape[1]):
        label = sum(offset <= query for offset in offsets_q[1:])
        for c in range(len(offsets_k) - 1):
            for key in range(int(plan.run_lo[row, query, c]), int(plan.run_hi[row, query, c])):
                distance = int(plan.query_places[row, query] - plan.key_places[row, key])
                yield label, c, query, key, distance


@settings(max_examples=20)
@given(cases(max_length=14))
def test_plateaus_and_readers(case):
    labels_q, labels_k = case.labels
    plan = sparse_plan(labels_q, labels_k, case.config, layout_of(case))
    readers = reader_runs(
        plan.query_offsets, plan.key_offsets, plan.run_lo, plan.run_hi, plan.run_flat, case.num_keys
    )
    kernel = RegimeKernel(case.config)
    for row in range(plan.run_lo.shape[0]):
        reads = set()
        for label, c, query, key, distance in listed(plan, row):
            gate = 1.0
            if c < case.config.num_regimes:
                gate = float(kernel(torch.tensor(distance), torch.float64)[label, c])
            # On the plateau, and only there, the gate is 1 exactly.
            assert (key >= int(plan.run_flat[row, query, c])) == (gate == 1.0)
            assert (query < int(readers.flat_end[row, key, label])) == (gate == 1.0)
            reads.add((label, key, query))
        for key in range(int(plan.key_offsets[row, -1])):
            for label in range(case.config.num_regimes):
                first, end = int(readers.first[row, key, label]), int(readers.end[row, key, label])
                # Runs may hold queries of other segments: what counts is that all readers are in.
                found = {(label, key, query) for query in range(first, end)}
                assert {pair for pair in reads if pair[:2] == (label, key)} == found


@settings(max_examples=20)
@given(cases(max_length=14))
def test_top1_reads_all_that_exists(case):
    layout = layout_of(case)
    plan = sparse_plan(*case.labels, case.config, layout, everywhere=True)
    existing = layout.exists().expand(case.batch, -1, -1).sum(dim=(1, 2))
    counts = (plan.run_hi - plan.run_lo).sum(dim=(1, 2))
    groups = len(counts) // case.batch
    assert counts.tolist() == existing.repeat_interleave(groups).tolist()


@pytest.mark.parametrize(
    ("queries", "keys", "padding", "everywhere"),
    [
        (1, 1, "none", False),
        (16, 16, "none", True),
        (33, 33, "holes", False),
        (33, 33, "left", True),
        (7, 70, "none", False),
    ],
)
def test_counting_makes_the_plan_of_sorting(queries, keys, padding, everywhere):
    config = MoSARConfig(
        regimes=(Regime("S", 3.5, 0.75), Regime("M", 11, 0.5), Regime("G", 30, 1.0)),
        num_sinks=2,
        routing_groups=2,
    )
    case = Case(config=config, batch=2, kv_heads=2, num_queries=queries, num_keys=keys,
                padding=padding, window=25)  # fmt: skip
    layout, labels = layout_of(case), case.labels
    ours = sparse_plan(*labels, config, layout, everywhere=everywhere)
    # Positions that are given, and are the default ones, take the general way.
    general = replace(layout, default_positions=False)
    expected = sparse_plan(*labels, config, general, everywhere=everywhere)
    used = expected.key_order >= 0
    for name in ("query_order", "query_places", "query_offsets", "key_order", "key_offsets"):
        assert torch.equal(getattr(ours, name), getattr(expected, name)), name
    assert torch.equal(ours.key_places[used], expected.key_places[used])
    for name in ("run_lo", "run_hi"):
        assert torch.equal(getattr(ours, name), getattr(expected, name)), name
    # Of a key that nobody reads it does not matter on which side of the plateau it is.
    flat = [plan.run_flat.clamp(ours.run_lo, ours.run_hi) for plan in (ours, expected)]
    assert torch.equal(*flat)


@pytest.mark.parametrize("window", [None, 0, 5])
@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (7, 7), (3, 9)])
def test_ordinary_plan_is_the_plan(queries, keys, window):
    layout = resolve_layout(1, queries, keys, window=window)
    ours, plan = dense_plan(layout), build_plan(dense_plan_input(layout))
    for name in ("query_offsets", "key_offsets", "run_lo", "run_hi"):
        assert torch.equal(getattr(ours, name), getattr(plan, name)), name
    assert torch.equal(plan.query_order[0], torch.arange(queries, dtype=torch.int32))
    assert torch.equal(plan.key_order[0], torch.arange(keys, dtype=torch.int32))


@given(cases(max_length=10))
def test_level_gates(case):
    table = gate_table(case.config).flatten(0, 1)
    until = level_until(table).tolist()
    for distance, last in enumerate(until):
        same = (table[:, distance:] == table[:, distance, None]).all(dim=0)
        end = len(same) if same.all() else int(same.int().argmin())
        assert last == (torch.iinfo(torch.int32).max if end == len(same) else distance + end - 1)


class NoWaiting(TorchDispatchMode):
    """Refuses what would wait for a GPU: reading a value, or a shape that depends on values."""

    WAITING = (
        "_local_scalar_dense",
        "item",
        "nonzero",
        "unique",
        "_unique2",
        "is_nonzero",
        "equal",
        "masked_select",
        "bincount",
        "repeat_interleave",
    )

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name().removeprefix("aten::").split(".")[0]
        assert name not in self.WAITING, func
        if name in ("index", "index_put", "index_put_"):
            assert all(x is None or x.dtype != torch.bool for x in args[1]), func
        if name in ("_to_copy", "copy_", "lift_fresh_copy"):
            # From the host to the device, for which "meta" stands in.
            target = (kwargs or {}).get("device") or args[0].device
            sources = [x for x in args if isinstance(x, torch.Tensor)]
            assert all(x.device == torch.device(target) for x in sources), func
        return func(*args, **(kwargs or {}))


def on_meta(values):
    return tree_map_only(torch.Tensor, lambda x: x.to("meta"), values)


class NoLaunch:
    def __getitem__(self, grid):
        return lambda **arguments: None


TRAITS = pytest.mark.parametrize(
    "traits",
    [
        {},
        {"padding": "holes", "group_axis": True},
        {"positions": "gaps", "padding": "left"},
        {"segments": "packed"},
        {"window": 5},
    ],
    ids=str,
)


@TRAITS
@pytest.mark.parametrize("kind", ["sparse", "top1", "soft", "both"])
def test_no_call_waits_for_the_device(monkeypatch, kind, traits):
    """The values of arguments are checked on the CPU only; elsewhere that would wait."""
    case = Case(dtype=torch.float32, num_queries=5, num_keys=5, batch=2, kv_heads=2, **traits)
    for module in ("attention", "core.layout", "core.hard_domain", "kernels.plan"):
        monkeypatch.setattr(f"mosar.{module}.can_check_values", lambda tensor: False)
    for module in (ops, device_plan):
        # No kernel is run: it is what happens between them that may wait.
        monkeypatch.setattr(module, "wrap_triton", lambda kernel: NoLaunch())
    placement = on_meta(case.placement)
    bias = {} if kind != "both" else on_meta(distance_bias(case, kind))
    call = operator(case, kind, impl="triton", **placement, **bias)
    call(*on_meta(case.inputs))  # fills what is kept
    inputs = differentiable(*on_meta(case.inputs))
    with NoWaiting():
        out, lse = call(*inputs)
        (out.sum() + lse.sum()).backward()


@TRAITS
def test_no_plan_waits_for_the_device(monkeypatch, traits):
    case = Case(num_queries=9, num_keys=9, batch=2, kv_heads=2, **traits)
    layout, (labels_q, labels_k) = layout_of(case), case.labels
    monkeypatch.setattr("mosar.kernels.plan.can_check_values", lambda tensor: False)
    sparse_plan(labels_q, labels_k, case.config, layout)  # fills what is kept
    with NoWaiting():
        plan = sparse_plan(labels_q, labels_k, case.config, layout)
        dense = dense_plan(layout)
        for made in (plan, dense):
            reader_runs(
                made.query_offsets, made.key_offsets, made.run_lo, made.run_hi, made.run_flat, 9
            )


@settings(max_examples=20)
@given(cases(max_length=14))
def test_places_are_sorted(case):
    layout, (labels_q, labels_k) = layout_of(case), case.labels
    ours = sparse_plan(labels_q, labels_k, case.config, layout)
    plan = build_plan(sparse_plan_input(labels_q, labels_k, case.config, layout))
    places = plan.query_places.gather(1, plan.query_order.long())
    assert torch.equal(ours.query_places, places)
    places = plan.key_places.gather(1, plan.key_order.clamp_min(0).long())
    used = plan.key_order >= 0
    assert torch.equal(ours.key_places[used], places[used])
