"""`mosar bench train`: everybody does the same task, and a wrong result gets no ratio."""

import dataclasses
import json

import pytest
import torch
from typer.testing import CliRunner

from mosar.bench import training
from mosar.bench.terminal import show_comparison
from mosar.bench.training import (
    OTHERS,
    OURS,
    TrainingCase,
    TrainingComparison,
    build_step,
    exact_loss,
)
from mosar.cli import app
from mosar.records import Measurement, read_records

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


def test_a_wrong_loss_gets_no_ratio(monkeypatch):
    monkeypatch.setattr(training, "exact_loss", lambda config, case: 1.0)
    comparison = TrainingComparison(**TINY, softcap=("capped",))
    (record,) = comparison.run()
    assert not record.correct and not any(m.samples_ms for m in record.measurements.values())
    assert record.ratio("mosar", "rope") is None and not comparison.verdicts(record)


def test_exact_loss_is_that_of_the_logits():
    case = TrainingCase(16, "capped", "smoke")
    config = case.config("mosar")
    step, _ = build_step(case, "mosar")
    assert step() == pytest.approx(exact_loss(config, case), rel=1e-5)
    assert case.tokens().shape == (128, 17)


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


def test_the_command_writes_records(tmp_path, capsys):
    path = tmp_path / "train.jsonl"
    words = "bench train --lengths 32 --preset smoke --softcap capped --memory 32 --seconds 0.001"
    result = CliRunner().invoke(app, [*words.split(), "--json", str(path)])
    assert result.exit_code == 0, result.output
    (record,) = read_records(path)
    assert record.kind == "bench.train" and record.memory_ratio > 0
    assert json.loads(path.read_text())["derived"]["mosar_over_rope"] > 0
    assert "tokens/s" in result.stdout


@pytest.mark.parametrize(
    "words, said",
    [
        ("--lengths 0", "lengths must be at least 1"),
        ("--softcap maybe", "softcap must be one of capped, plain, got 'maybe'"),
        ("--preset huge", "preset must be one of"),
        ("--seconds 0", "seconds must be more than 0"),
    ],
)
def test_bad_options(words, said):
    result = CliRunner().invoke(app, ["bench", "train", *words.split()])
    assert result.exit_code == 2
    assert said in " ".join(result.output.replace("│", " ").split())


def test_an_interrupted_benchmark_shows_what_it_has(monkeypatch, capsys):
    calls = []

    def interrupted(steps, *, seconds):
        calls.append(seconds)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return {name: (1.0,) for name in steps}

    monkeypatch.setattr(training, "interleave", interrupted)
    with pytest.raises(KeyboardInterrupt, match="stopped after 1 of 2 rows"):
        show_comparison(TrainingComparison(**TINY))
    assert "tokens/s" in capsys.readouterr().out


def test_steps_learn():
    torch.manual_seed(0)
    case = TrainingCase(16, "plain", "smoke", tokens_per_step=32)
    for name in (*OURS, "nanogpt"):
        step, _ = build_step(case, name)
        losses = [step() for _ in range(12)]
        assert losses[-1] < losses[0] - 0.1, name
