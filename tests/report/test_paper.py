"""The paper's figures: copied right, since they agree with each other."""

import math

import pytest

from mosar.report.paper import paper, paper_delta, paper_length, paper_perplexity, paper_routing
from report.synthetic import ALL


@pytest.mark.parametrize("variant", ALL)
def test_figures_of_a_variant_follow_from_each_other(variant):
    row, curve = paper()["main"][variant], paper()["validation"]["perplexity"][variant]
    assert variant in paper()["labels"]
    assert math.exp(row["loss"]) == pytest.approx(row["perplexity"]["1"], rel=1e-4)
    for factor in (1, 4):
        ratio = paper_perplexity(variant, factor) / paper_perplexity("rope", factor)
        assert paper_delta(variant, factor) == pytest.approx((ratio - 1) * 100, abs=0.06)
    assert len(curve) == len(paper()["validation"]["steps"])
    assert curve[-1] == pytest.approx(paper_perplexity(variant, 1), abs=6e-4)


@pytest.mark.parametrize("variant", ["mosar", "mosar-cost"])
@pytest.mark.parametrize("factor", [1, 2, 4])
def test_routing_table(variant, factor):
    row = paper_routing(variant, factor)
    assert row["soft_ppl"] == paper_perplexity(variant, factor)
    gap = (row["top1_ppl"] / row["soft_ppl"] - 1) * 100
    assert row["gap_pct"] == pytest.approx(gap, abs=0.06)
    assert paper_perplexity(variant, factor, "top1") == row["top1_ppl"]
    if variant == "mosar":
        costs = [128 / 2048 / factor, 512 / 2048 / factor, 1.0]
        sides = [
            (row[f"{side}_S"], 1 - row[f"{side}_S"] - row[f"{side}_G"], row[f"{side}_G"])
            for side in "qk"
        ]
        reach = sum(p * c for side in sides for p, c in zip(side, costs, strict=True)) / 2
        assert row["soft_reach"] == pytest.approx(reach, abs=3e-4)


def test_lengths():
    assert [paper_length(factor) for factor in (1.0, 2.0, 4.0)] == ["2k", "4k", "8k"]
    assert paper_length(8.0) is None
    assert paper_perplexity("mosar", 8.0) is None and paper_perplexity("nope", 1.0) is None
    assert paper_delta("mosar", 2.0) == pytest.approx((11.753 / 12.373 - 1) * 100)
    assert paper_delta("nope", 2.0) is None and paper_routing("rope", 1.0) == {}
