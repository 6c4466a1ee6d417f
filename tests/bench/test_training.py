"""`mosar bench train`: everybody does the same task, and a wrong result gets no ratio."""

import dataclasses
import json
import pickle
from pathlib import Path

import pytest
import torch

from mosar.bench import training, variants
from mosar.bench.training import (
    OTHERS,
    OURS,
    TrainingCase,
    TrainingComparison,
    build_step,
    exact_loss,
)
from mosar.bench.variants import VariantComparison
from mosar.errors import DataError, ModelError
from mosar.evaluation.evaluate import evaluate
from mosar.model.decoder import Decoder
from mosar.records import Measurement

TINY = {"lengths": (32,), "preset": "smoke", "memory": (), "seconds": 1e-3}


def test_rows_and_competitors():
    pytest.importorskip("transformers")
    records = list(TrainingComparison(**TINY).run())
    capped, plain = records
    assert (capped.setting, plain.setting) == ("capped", "plain")
    assert set(capped.measurements) == {"rope", "mosar", "gemma2-eager"}
    assert set(plain.measurements) == {*OURS, *OTHERS}
    for record in records:
        assert record.correct and all(m.samples_ms for m in record.measurements.values())
        assert record.ratio("mosar", "rope") > 0
        rates = [record.tokens_per_second(n) for n in record.measurements if "gemma2" in n]
        rate = record.tokens_per_second("rope")
        assert record.rope_over_gemma2 == pytest.approx(rate / max(rates))
    # As many parameters as ours within a few per cent, so that the ratio means something.
    assert plain.parameters["gemma2-sdpa"] == plain.parameters["rope"]
    assert plain.parameters["nanogpt"] == pytest.approx(plain.parameters["rope"], rel=0.1)


def test_memory_is_that_of_whole_steps(monkeypatch):
    def in_this_process(*task):
        prepare, case, _, name = pickle.loads(pickle.dumps(task))
        prepare(case, name)()
        return {"rope": 4, "mosar": 5}[name]

    monkeypatch.setattr(training, "measure_peak", in_this_process)
    (record,) = TrainingComparison(**TINY | {"memory": (32,)}, softcap=("capped",)).run()
    assert record.memory_ratio == 1.25


def test_a_wrong_loss_gets_no_ratio(monkeypatch):
    monkeypatch.setattr(training, "exact_loss", lambda case, variant: 1.0)
    comparison = TrainingComparison(**TINY, softcap=("capped",))
    (record,) = comparison.run()
    assert not record.correct and not any(m.samples_ms for m in record.measurements.values())
    assert record.ratio("mosar", "rope") is None and not comparison.verdicts(record)


def test_a_loss_that_is_not_a_number_is_wrong_and_can_be_written(monkeypatch):
    monkeypatch.setattr(training, "exact_loss", lambda case, variant: 1.0)
    losses = dict.fromkeys(("rope", "mosar", "gemma2-eager"), float("nan"))
    checks = training._checks(TrainingCase(16, "capped", "smoke"), losses)
    assert list(checks) == list(losses) and not any(check.passed for check in checks.values())
    json.dumps([dataclasses.asdict(check) for check in checks.values()], allow_nan=False)


def test_exact_loss_is_that_of_the_logits():
    case = TrainingCase(16, "capped", "smoke", tokens_per_step=160)
    step, _ = build_step(case, "mosar")
    assert step() == pytest.approx(exact_loss(case, "mosar"), rel=1e-5)
    assert case.tokens().shape == (10, 17)


def test_verdicts_follow_the_figures():
    comparison = TrainingComparison(**TINY, softcap=("plain",))
    (record,) = comparison.run()
    times = {"rope": 10.0, "mosar": 12.0, "gemma2-eager": 30.0, "gemma2-sdpa": 9.0, "nanogpt": 11.0}
    measured = {name: Measurement(samples_ms=(time,)) for name, time in times.items()}
    record = dataclasses.replace(record, length=512, measurements=measured)
    assert comparison.verdicts(record) == [
        ("rope ≥ gemma2", False),
        ("rope ≥ nanogpt", True),
        ("mosar ≥ 0.75 rope", True),
    ]
    assert record.ratio("rope", "gemma2-sdpa") == pytest.approx(0.9)


def cells_of(comparison, record):
    return {column.name: column.value(record) for column in comparison.columns([record])}


def test_variants_are_timed_against_rope():
    comparison = VariantComparison(
        variants=("fox", "cope", "mosar-hard"), lengths=(32,), preset="smoke", seconds=1e-3
    )
    records = list(comparison.run())
    assert [list(record.measurements) for record in records] == [
        ["rope", "fox"],
        ["rope", "cope"],
        ["rope", "mosar-hard"],
    ]
    assert all(record.correct and len(comparison.verdicts(record)) == 1 for record in records)
    # Its windows begin at random positions, so its loss has nothing to be held to.
    assert [list(record.checks) for record in records] == [["fox"], ["cope"], []]
    times = {name: Measurement(samples_ms=(time,)) for name, time in (("rope", 4), ("cope", 10))}
    slow = dataclasses.replace(records[1], measurements=times)
    assert comparison.verdicts(slow) == [("≥ 0.3", True)]
    cells = cells_of(comparison, slow)
    assert list(cells.values())[:4] == ["cope", 32, "capped", "torch"]
    assert cells["/ rope"] == pytest.approx(0.4) and cells["density"] is None
    with pytest.raises(ValueError, match=r"variant must be one of rope, alibi, .*, got 'ropee'"):
        VariantComparison(variants=("ropee",))


def test_a_trained_model_is_timed_on_its_own_text(trained, monkeypatch):
    """At a length beyond N, with the support that it learnt, and without learning on."""
    run = trained("mosar-plus", 'attention.start_regimes=["4"]')
    monkeypatch.setattr(variants, "measure_peak", lambda prepare, case, short, name: len(name))
    comparison = VariantComparison(run_folder=run, lengths=(128,), memory=(128,), seconds=1e-3)
    (case,) = comparison.cases()
    (record,) = comparison.run()
    assert record.correct and list(record.checks) == ["mosar-plus"]
    (evaluation,) = evaluate(run, lengths=("2x",), routings=("sparse",), progress=False)
    assert 0 < record.density < 1 and record.density == pytest.approx(evaluation.density, rel=0.1)
    cells = cells_of(comparison, record)
    assert cells["variant"] == "mosar-plus" and cells["n"] == 128
    assert cells["memory MiB\nvariant / rope"] == (len("mosar-plus"), len("rope"))
    trained_weights = case.size.loaded.decoder.state_dict()
    for name in ("mosar-plus", "rope"):
        step, _ = build_step(case.size, name)
        assert [step(), step()] == pytest.approx([step()] * 2, rel=1e-6)
        assert step() < 5.5 if name == "mosar-plus" else step() > 5.5
    decoder = Decoder(*(getattr(case.size.config("mosar-plus"), x) for x in ("model", "attention")))
    case.size.set_weights(decoder, "mosar-plus")
    assert all(torch.equal(trained_weights[k], v) for k, v in decoder.state_dict().items())
    assert str(run) in comparison.notes([record])


def test_a_run_in_bfloat16_is_timed_and_checked_in_float32(trained):
    """And of a soft model, the density is that of its training step: it reads every pair."""
    run = trained("mosar", "train.precision=bf16")
    comparison = VariantComparison(run_folder=run, seconds=1e-3, lengths=(64,))
    (case,) = comparison.cases()
    assert case.size.config("mosar").train.precision == "fp32"
    (record,) = comparison.run()
    assert record.correct and record.density == 1


def test_a_run_is_timed_where_its_schedules_are(trained):
    """Hard from 3/4 of the steps, and with a floor that has fallen: as the checkpoint is."""
    run = trained("mosar", "attention.hard_from=0.75", "attention.floor=0")
    comparison = VariantComparison(run_folder=run, seconds=1e-3, lengths=(64,))
    (record,) = comparison.run()
    assert record.correct and 0 < record.density < 1


def test_runs_that_cannot_be_timed(trained):
    with pytest.raises(ModelError, match="isolated documents"):
        VariantComparison(run_folder=trained("mosar", "data.isolate_documents=true"))
    with pytest.raises(DataError, match="there is no dataset nowhere"):
        VariantComparison(run_folder=trained("mosar"), data=Path("nowhere"))
    with pytest.raises(ModelError, match="is a run of rope, which others are compared with"):
        VariantComparison(run_folder=trained("rope"))
    comparison = VariantComparison(run_folder=trained("mosar"), lengths=(10**6,))
    with pytest.raises(ModelError, match=r"tokens, too few for --lengths 1000000"):
        list(comparison.run())


def test_steps_learn():
    torch.manual_seed(0)
    case = TrainingCase(16, "plain", "smoke", tokens_per_step=32)
    for name in (*OURS, "nanogpt"):
        step, _ = build_step(case, name)
        losses = [step() for _ in range(12)]
        assert losses[-1] < losses[0] - 0.1, name
