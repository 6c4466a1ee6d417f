"""`mosar bench decode --model` at tiny sizes: its table, its records, what the competitors compute.

Nothing here looks at how long something takes.
"""

import builtins
from dataclasses import replace

import pytest
import torch

from mosar import MoSARConfig
from mosar.bench import decode_model
from mosar.bench.decode_model import (
    STEPS,
    DenseSteps,
    ModelDecodeComparison,
    RegimeSteps,
    Text,
    TransformersSteps,
    check_steps,
)
from mosar.model.decoder import Decoder
from mosar.records import ErrorCheck, Measurement, ModelDecodeBenchmark, read_records

CONFIG = MoSARConfig.scaled(64)
COMPARISON = ModelDecodeComparison(model="tiny", lengths=(200,), config=CONFIG, seconds=0.001)
(CASE,) = COMPARISON.cases()
TINY = "decode --model tiny --lengths 40,200 --seconds 0.001"


def make_record(**changes):
    times = {"transformers": 100.0, "dense": 80.0, "ours": 40.0}
    fields = {
        "model": "smollm2",
        "sizes": {"num_layers": 30},
        "length": 16384,
        "steps": STEPS,
        "labels": "independent",
        "seed": 0,
        "parameters": dict.fromkeys(times, 10),
        "cache_bytes": {"transformers": 1000, "dense": 1200, "ours": 300},
        "checks": {"logits": ErrorCheck(error=1e-7, budget=1e-6)},
        "measurements": {name: Measurement(samples_ms=(t,)) for name, t in times.items()},
    }
    return ModelDecodeBenchmark(**fields | changes)


@torch.inference_mode()
def test_passes_begin_where_the_first_did():
    text = Text(CASE, "tiny")
    for steps in (RegimeSteps(text), DenseSteps(text), TransformersSteps(text)):
        before = steps.outputs(STEPS)
        assert steps() > 0
        torch.testing.assert_close(steps.outputs(STEPS), before, atol=1e-6, rtol=1e-6)


@torch.inference_mode()
def test_dense_steps_read_every_key():
    """Of our rope over the given keys; its weights are those of ours."""
    text = Text(CASE, "tiny")
    steps = DenseSteps(text)
    assert steps.cache.slots == text.start == 200 - STEPS
    first = steps.outputs(1)
    for layer in range(2):
        cache = text.decoder("rope").new_cache()
        for index, one in enumerate(cache):
            k, v = text.keys_and_values(index)
            one.update(k, -v if index == layer else v)
        steps.cache = cache
        assert not torch.allclose(steps.outputs(1), first, atol=1e-4)
    rope = dict(text.decoder("rope").named_parameters())
    for name, parameter in text.decoder("mosar").named_parameters():
        assert name not in rope or torch.equal(parameter, rope[name])


@torch.inference_mode()
def test_labels_are_the_drawn_ones():
    text = Text(CASE, "tiny")
    steps = RegimeSteps(text)
    steps.outputs(STEPS)
    for index, cache in enumerate(steps.cache):
        drawn = text.labels[index][1]
        assert int(cache.regime_counts["G"]) == int((drawn == 2).sum())
    layer = steps.model.layers[0].attention.geometry
    steps.rewind()
    routed = layer.route(torch.randn(1, 4, 1, 8), torch.randn(1, 2, 1, 8))
    assert [int(r.labels) for r in routed] == [int(x[text.start]) for x in text.labels[0]]


def test_groups_and_sinks():
    config = MoSARConfig(max_length=64, regimes=CONFIG.regimes, routing_groups=2, num_sinks=3)
    (record,) = replace(COMPARISON, config=config).run()
    assert record.correct and record.speedup("dense") > 0
    # Two layers, two key heads of 8, float32.
    assert record.cache_bytes["transformers"] == 2 * 2 * 2 * 8 * 4 * 200


@pytest.fixture
def broken(monkeypatch):
    """A decoder whose logits are a little off in float32."""

    class Broken(Decoder):
        def logits(self, hidden):
            # The check's own float32 goes through torch operators.
            return super().logits(hidden) + 1e-3 * (hidden.dtype == torch.float32)

    monkeypatch.setattr(decode_model, "Decoder", Broken)
    plain = decode_model.error_check
    monkeypatch.setattr(
        decode_model, "error_check", lambda ours, _, exact: plain(ours, exact.float(), exact)
    )


def test_wrong_result_gets_no_speedup(bench, tmp_path, broken):
    path = tmp_path / "a.jsonl"
    result = bench(TINY, "--lengths", 40, "--json", path)
    assert result.exit_code == 1
    assert "WRONG: logits" in result.stdout
    assert result.stderr.splitlines()[-1] == "mosar: error: 1 of 1 rows gave a wrong result"
    (record,) = read_records(path)
    assert not record.correct and record.speedup("dense") is None


@torch.inference_mode()
def test_the_check_finds_missing_keys():
    steps = RegimeSteps(Text(CASE, "tiny"))
    assert check_steps(steps).passed
    steps = RegimeSteps(Text(CASE, "tiny"))
    for cache in steps.cache:
        k, v = (torch.randn(1, 2, 1, 8) for _ in range(2))
        cache.crop(-1)
        cache.update(k, v, torch.tensor([[2]]), key_positions=torch.tensor([[cache.slots]]))
    assert not check_steps(steps).passed


def test_without_transformers(bench, monkeypatch):
    real = builtins.__import__

    def refuse(name, *arguments):
        if name == "transformers":
            raise ImportError("No module named 'transformers'")
        return real(name, *arguments)

    monkeypatch.setattr(builtins, "__import__", refuse)
    result = bench(TINY, "--lengths", 40)
    assert result.exit_code == 0, result.output
    assert 'pip install "accelerate>=' in result.stdout


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, [("≥ 2×", True), ("cache ≤ 0.35", True)]),
        (
            {"cache_bytes": {"transformers": 1000, "ours": 360}},
            [("≥ 2×", True), ("cache ≤ 0.35", False)],
        ),
        ({"length": 4096}, []),
        ({"checks": {"logits": ErrorCheck(error=None, budget=1.0)}}, []),
    ],
)
def test_targets(changes, expected):
    assert COMPARISON.verdicts(make_record(**changes)) == expected
