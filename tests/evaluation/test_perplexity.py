"""One length of one run: that each routing is what it says, against the dense definition."""

import functools
import math

import pytest
import torch
import torch.nn.functional as F

from mosar import attention as attention_module
from mosar.errors import ModelError
from mosar.evaluation import perplexity, validation_text
from mosar.evaluation.perplexity import evaluate_length
from mosar.evaluation.validation_text import ValidationText
from mosar.geometries import mosar as mosar_geometry

ROUTINGS = ("soft", "top1", "sparse")


def measure(loaded, length, routings=ROUTINGS, tokens=512, lengths=None):
    source = ValidationText(loaded, lengths or (length,), tokens=tokens)
    fields = {"cell": loaded.cell, "step": loaded.step, "train_length": loaded.train_length}
    return evaluate_length(loaded, source, length, routings, lambda: None, inputs={}, **fields)


def exact_loss(loaded, length, routing, monkeypatch, tokens=512):
    """In float64 by the dense reference, window by window, all logits."""
    source = ValidationText(loaded, (length,), tokens=tokens)
    loaded.decoder.double()
    losses = []
    with monkeypatch.context() as patch:
        reference = functools.partial(attention_module.attend, impl="reference")
        patch.setattr(mosar_geometry, "attend", reference)
        for tokens_BT, segments in source.batches(length):
            output = loaded.decoder(tokens_BT[:, :-1], segment_ids=segments, routing=routing)
            assert output.hidden.dtype == torch.float64
            logits = loaded.decoder.logits(output.hidden)
            losses.append(F.cross_entropy(logits.flatten(0, 1), tokens_BT[:, 1:].flatten()))
    loaded.decoder.float()
    # Batches hold as many windows each.
    return float(torch.stack(losses).mean())


@pytest.mark.parametrize(
    "changes",
    [
        (),
        ("attention.routing_groups=2", "attention.num_sinks=1", "attention.barrier=2"),
        ("data.isolate_documents=true", "attention.composition=max"),
    ],
)
def test_every_routing_is_the_dense_definition(scattered, monkeypatch, changes):
    monkeypatch.setattr(validation_text, "PASS_TOKENS", 256)
    made = scattered("mosar", *changes)
    records = {record.routing: record for record in measure(made, 256)}
    losses = {routing: exact_loss(made, 256, routing, monkeypatch) for routing in ROUTINGS}
    for routing, record in records.items():
        assert record.loss == pytest.approx(losses[routing], rel=2e-6), routing
    # Otherwise the three could be one: what separates them is far above rounding.
    for one, other in (("soft", "top1"), ("top1", "sparse")):
        assert abs(losses[one] - losses[other]) > 1e-4
    assert all(min(row) > 0 for row in records["sparse"].shares_top1["query"])


def test_sparse_really_runs_the_sparse_kernel(scattered, monkeypatch):
    made = scattered()
    calls = []
    kernels = attention_module._backend(
        attention_module._choose_implementation(
            "auto", torch.zeros(1, 1, 2048, 8), torch.zeros(1, 1, 2048, 8)
        )
    )
    real = kernels.attend
    monkeypatch.setattr(
        kernels,
        "attend",
        lambda *a, **k: calls.append(a[4].ends_at_reach) or real(*a, **k),
    )
    if not kernels.__name__.endswith("native"):
        # Without a compiler, short contexts would take the reference.
        monkeypatch.setattr(attention_module, "_FEW_PAIRS", 0)
    monkeypatch.setattr(perplexity, "HARD", ())
    layers, passes = 2, 1 + 1
    for routing, expected in (("sparse", True), ("top1", False)):
        calls.clear()
        measure(made, 256, (routing,))
        assert calls == [expected] * layers * passes


def test_a_record_says_what_was_done(scattered):
    made = scattered()
    records = measure(made, 128, lengths=(64, 128, 256))
    assert [record.routing for record in records] == list(ROUTINGS)
    for record in records:
        assert (record.step, record.train_length, record.length) == (6, 64, 128)
        assert (record.windows, record.tokens) == (4, 512)
        assert record.cell.variant == "mosar" and record.cell.preset == "smoke"
        assert 0 < record.loss_stderr < record.loss
        assert record.seconds > 0
        assert record.regimes == ["S", "M", "G"]
        assert len(record.layer_density) == 2
        assert record.density == pytest.approx(sum(record.layer_density) / 2)
        assert 0 < record.density < 1
        assert 0 < record.reach_top1 < 1 and 0 < record.reach_soft < 1
        assert [bucket[1] for bucket in record.buckets][3] == 64
        assert record.perplexity == math.exp(record.loss)
    soft, top1, sparse = records
    assert soft.discarded_mass == []
    assert top1.discarded_mass == sparse.discarded_mass
    assert len(sparse.discarded_mass) == 2
    # The first layer sees the same in every routing, later ones do not.
    for side in ("query", "key"):
        assert soft.shares_soft[side][0] == sparse.shares_soft[side][0]
        assert soft.shares_soft[side][1] != sparse.shares_soft[side][1]


@pytest.mark.parametrize("variant", ["rope", "alibi", "p-rope", "fixed-s", "fixed-m"])
def test_variants_that_evaluate_every_pair(loaded, variant):
    (record,) = measure(loaded(variant), 128, ("native",))
    assert (record.density, record.layer_density) == (1.0, [])
    assert record.reach_soft is None and record.reach_top1 is None
    assert record.discarded_mass == record.regimes == []
    assert record.shares_soft == record.shares_top1 == record.example_labels == {}


@pytest.mark.parametrize("isolated", [False, True])
@pytest.mark.parametrize(("variant", "routing"), [("rope-m-mask", "native"), ("fixed-m", "sparse")])
def test_the_pairs_of_a_window_are_counted(loaded, variant, routing, isolated):
    changes = ("data.isolate_documents=true",) if isolated else ()
    made = loaded(variant, *changes)
    (record,) = measure(made, 128, (routing,), lengths=(128,))
    assert record.layer_density == [record.density] * 2
    distances = torch.arange(128)[:, None] - torch.arange(128)
    inside = causal = 0
    for _, segments in ValidationText(made, (128,), tokens=512).batches(128):
        there = (distances >= 0).expand(4, 128, 128)
        if segments is not None:
            there = there & (segments[:, :, None] == segments[:, None, :])
        causal += int(there.sum())
        inside += int((there & (distances <= 16)).sum())
    assert record.density == inside / causal


def test_routings_take_turns(scattered, monkeypatch):
    monkeypatch.setattr(validation_text, "PASS_TOKENS", 128)
    order = []
    real = perplexity._losses

    def spy(loaded, tokens, segments, routing):
        order.append(routing)
        return real(loaded, tokens, segments, routing)

    monkeypatch.setattr(perplexity, "_losses", spy)
    measure(scattered(), 128, tokens=512)
    warm_up, rounds = order[:3], [order[i : i + 3] for i in range(3, 15, 3)]
    assert warm_up == list(ROUTINGS)
    assert [turn[0] for turn in rounds] == ["soft", "top1", "sparse", "soft"]
    assert all(sorted(turn) == sorted(ROUTINGS) for turn in rounds)


def test_a_loss_that_is_not_a_number_is_said(loaded):
    made = loaded()
    with torch.no_grad():
        made.decoder.norm.weight.fill_(math.nan)
    with pytest.raises(ModelError, match=r"is nan at length 64 with routing soft"):
        measure(made, 64)


def test_routings_that_are_one_operator_are_computed_once(scattered, monkeypatch):
    made = scattered("mosar-hard")
    passes = []
    real = perplexity._losses
    monkeypatch.setattr(perplexity, "_losses", lambda *a: passes.append(a[-1]) or real(*a))
    soft, top1, sparse = measure(made, 128)
    # One batch, and before it the same to warm up.
    assert passes == ["sparse", "sparse"]
    assert soft.loss == top1.loss == sparse.loss
    assert [record.routing for record in (soft, top1, sparse)] == list(ROUTINGS)
    # Its gates have no floor, so nothing lies outside of what is executed.
    for record in (top1, sparse):
        assert [layer["mean"] for layer in record.discarded_mass] == [0.0, 0.0]


def test_a_soft_model_without_a_floor_has_two_operators(scattered, monkeypatch):
    made = scattered("mosar", "attention.floor=0")
    soft, top1, sparse = measure(made, 256)
    assert soft.loss != top1.loss == sparse.loss
    assert sparse.loss == pytest.approx(exact_loss(made, 256, "top1", monkeypatch), rel=2e-6)
    assert all(layer["worst"] == 0.0 for layer in top1.discarded_mass)
