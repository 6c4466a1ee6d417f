"""`mosar bench decode` at tiny sizes: its table, its records, no speed-up for a wrong result.

Nothing here looks at how long something takes.
"""

import json
from dataclasses import replace

import pytest
import torch

from mosar.bench import decode
from mosar.bench.decode import DecodeComparison, DenseSteps, OurSteps, build_steps
from mosar.bench.problem import Case, Shape
from mosar.core.hard_domain import build_hard_domain
from mosar.model.cache import RegimeLayerCache
from mosar.records import DecodeBenchmark, ErrorCheck, Measurement

TINY = "decode --shapes 4x2x8 --lengths 40,300 --seconds 0.001"
COMPARISON = DecodeComparison(shapes=(Shape(4, 2, 8),), lengths=(40, 300), seconds=0.001)


def make_record(**changes):
    fields = {
        "heads": 9,
        "kv_heads": 3,
        "head_dim": 64,
        "length": 16384,
        "steps": 128,
        "labels": "independent",
        "seed": 0,
        "keys_read": 800.0,
        "allocated_bytes": 300,
        "used_bytes": 250,
        "dense_bytes": 1000,
        "dense_form": "grouped",
        "checks": {"out": ErrorCheck(error=1e-7, budget=1e-6)},
        "measurements": {
            "sdpa": Measurement(samples_ms=(1.0, 1.1, 1.2)),
            "ours": Measurement(samples_ms=(0.1, 0.2, 0.3)),
        },
    }
    return DecodeBenchmark(**fields | changes)


def test_keys_read_are_those_of_the_support():
    problem = build_steps(Case(mode="sparse", shape=Shape(4, 2, 8), length=300))
    (record,) = replace(COMPARISON, lengths=(300,)).run()
    labels_q, labels_k = problem.labels
    padded = torch.zeros(1, 300, dtype=torch.int64)
    padded[:, -128:] = labels_q
    mask = build_hard_domain(padded, labels_k, problem.case.config).mask[:, -128:]
    assert record.keys_read == mask.sum().item() / 128
    assert record.dense_form in DenseSteps.FORMS and record.dense_bytes == 2 * 2 * 8 * 4 * 300
    assert 0 < record.used_bytes <= record.allocated_bytes
    assert record.gigabytes_per_second("ours") == pytest.approx(
        record.keys_read * 2 * 2 * 8 * 4 / (record.median_ms("ours") * 1e6)
    )


@pytest.mark.parametrize("shape", [Shape(4, 2, 8), Shape(3, 3, 8), Shape(6, 1, 4)])
def test_every_form_of_the_dense_step_is_causal_attention(shape):
    problem = build_steps(Case(mode="sparse", shape=shape, length=40))
    share = shape.heads // shape.kv_heads
    k, v = (x.repeat_interleave(share, dim=1) for x in (problem.k, problem.v))
    mask = torch.ones(40, 40, dtype=torch.bool).tril()[20:]
    expected = torch.nn.functional.scaled_dot_product_attention(problem.q, k, v, attn_mask=mask)
    for form in DenseSteps.FORMS:
        found = DenseSteps(problem, form).outputs()
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_a_pass_ends_at_the_length_and_can_be_repeated():
    problem = build_steps(Case(mode="sparse", shape=Shape(4, 2, 8), length=300))
    ours = OurSteps(problem)
    for _ in range(2):
        assert ours() > 0
        assert ours.cache.slots == 300


@pytest.fixture
def broken(monkeypatch):
    """A cache whose last step is a little off."""

    class Broken(RegimeLayerCache):
        def attend(self, q, *arguments, **options):
            out = super().attend(q, *arguments, **options)
            return out + 1e-3 * (self.slots in (40, 300))

    monkeypatch.setattr(decode, "RegimeLayerCache", Broken)


def test_wrong_result_gets_no_speedup(bench, tmp_path, broken):
    path = tmp_path / "a.jsonl"
    result = bench(TINY, "--json", path)
    assert result.exit_code == 1
    assert "WRONG: out" in result.stdout
    assert result.stderr.splitlines()[-1] == "mosar: error: 2 of 2 rows gave a wrong result"
    for line in path.read_text().splitlines():
        derived = json.loads(line)["derived"]
        assert derived["correct"] is False and derived["speedup"] is None


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, [("≥ 5×", True), ("cache ≤ 0.35", True)]),
        ({"allocated_bytes": 351}, [("≥ 5×", True), ("cache ≤ 0.35", False)]),
        ({"length": 2048, "allocated_bytes": 900}, [("≥ 1×", True)]),
        ({"length": 4096}, []),
        ({"heads": 6}, []),
        ({"measurements": {"sdpa": Measurement(samples_ms=(1.0,))}}, [("cache ≤ 0.35", True)]),
        ({"checks": {"out": ErrorCheck(error=None, budget=1.0)}}, []),
    ],
)
def test_targets(changes, expected):
    assert COMPARISON.verdicts(make_record(**changes)) == expected
