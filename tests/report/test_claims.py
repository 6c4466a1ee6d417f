"""Verdicts: by their rule, at its edges, and not where there is nothing to judge."""

import math
from dataclasses import replace
from pathlib import Path

import pytest

from mosar.records import Cell, EvaluationRecord, append_record, read_records
from mosar.report import verdicts
from mosar.report.claims import CLAIMS, judged_claims, judged_own_claims, medium_reach
from mosar.report.comparison import Comparison, Estimate, Setting
from mosar.report.experiment import load_experiment
from mosar.report.formats import number
from mosar.report.verdicts import (
    Finding,
    best,
    bounded,
    falls,
    greater,
    judge,
    kept,
    lower,
    reach_estimate,
    sparse_same,
    t_quantile,
    tied,
    time_ratio,
    together,
)
from report import synthetic
from report.synthetic import compare, make_retrieval, write_experiment


def seeds(*values):
    return Estimate(dict(enumerate(values)))


INF = math.inf


@pytest.mark.parametrize(
    ("values", "bounds", "verdict", "basis"),
    [
        ((1.0, 1.1, 0.9), (0, INF), "holds", "3 seeds"),
        ((-1.0, -1.1, -0.9), (0, INF), "fails", "3 seeds"),
        ((1.0, -1.1, 0.9), (0, INF), "unclear", "3 seeds"),
        # sd 1, three seeds: the interval is ± 4.3027 / sqrt(3) = 2.4841; two errors are 1.15.
        ((1.49, 2.49, 3.49), (0, INF), "holds", "3 seeds"),
        ((1.48, 2.48, 3.48), (0, INF), "unclear", "3 seeds"),
        ((-1.48, -2.48, -3.48), (0, INF), "unclear", "3 seeds"),
        ((-1.49, -2.49, -3.49), (0, INF), "fails", "3 seeds"),
        # sd 1, two seeds: ± 12.7062 · 1 / sqrt(2) = 8.98.
        ((8.3, 9.7142), (0, INF), "holds", "2 seeds"),
        ((8.2, 9.6142), (0, INF), "unclear", "2 seeds"),
        # Between two bounds: equivalence takes the whole interval.
        ((0.0, 0.01, -0.01), (-0.2, 0.2), "holds", "3 seeds"),
        ((0.1, 0.2, 0.0), (-0.2, 0.2), "unclear", "3 seeds"),
        ((0.0, 2.9, -2.9), (-0.2, 0.2), "unclear", "3 seeds"),
        ((2.9, 2.91, 2.89), (-0.2, 0.2), "fails", "3 seeds"),
        # One seed has a direction, whatever its size.
        ((100.0,), (0, INF), "unclear", "one seed: direction only, for the claim"),
        ((-0.01,), (0, INF), "unclear", "one seed: direction only, against the claim"),
        ((0.0,), (-0.2, 0.2), "unclear", "one seed: direction only, for the claim"),
    ],
)
def test_the_rule(values, bounds, verdict, basis):
    assert judge(seeds(*values), *bounds) == (verdict, basis)


@pytest.mark.parametrize("freedom", [1, 2, 3, 5, 9, 10, 11, 29, 200])
def test_the_quantile_covers_95_percent(freedom):
    """By integrating the density of Student's t, x = sqrt(freedom) · tan(angle)."""
    end = math.atan(t_quantile(freedom) / math.sqrt(freedom))
    steps = 20_000
    angles = ((i + 0.5) * end / steps for i in range(steps))
    integral = sum(math.cos(angle) ** (freedom - 1) for angle in angles) * end / steps
    gammas = math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)
    assert 2 * integral * math.exp(gammas) / math.sqrt(math.pi) == pytest.approx(0.95, abs=2e-5)


def test_several_comparisons_hold_if_all_do():
    def parts(*verdicts):
        return [(str(i), Finding("p", "o", v, "3 seeds")) for i, v in enumerate(verdicts)]

    assert together(parts("holds", "holds")).verdict == "holds"
    assert together(parts("holds", "unclear")).verdict == "unclear"
    assert together(parts("unclear", "fails", "holds")).verdict == "fails"
    assert together(parts("unmeasured", "unmeasured")).verdict == "unmeasured"
    partly = together(parts("holds", "unmeasured"))
    assert (partly.verdict, partly.basis) == ("holds", "3 seeds; of those measured, without 1")
    assert partly.ours == "0 o · 1 o"
    alone = [Finding("p", "o", *judge(seeds(value))) for value in (1.0, -1.0)]
    both = together([("a", alone[0]), ("b", alone[1]), ("c", alone[0])])
    assert (both.verdict, both.basis) == ("unclear", alone[1].basis)


def test_shares_and_reaches():
    assert greater(seeds(0.3, 0.31), seeds(0.1, 0.11), "s").verdict == "holds"
    assert greater(seeds(0.1, 0.11), seeds(0.3, 0.31), "s").verdict == "fails"
    assert greater(None, seeds(0.3), "s").verdict == "unmeasured"
    change = falls(seeds(0.4, 0.41), seeds(0.2, 0.2), "s")
    assert (change.verdict, change.ours) == ("holds", "0.405 → 0.200 (−51 %)")


def test_only_seeds_that_both_have_are_compared():
    """Another seed of one side changes neither the figures nor the verdict."""
    one = Estimate({0: 0.12})
    assert falls(seeds(0.2, 0.1, 0.1), one, "s").ours == "0.200 → 0.120 (−40 %)"
    assert greater(seeds(0.2, 0.1, 0.1), one, "s").ours == "0.200 against 0.120"
    assert greater(one, seeds(0.2, 0.1, 0.1), "s", change=True).ours == "0.200 → 0.120"
    assert falls(seeds(0.2), Estimate({1: 0.1}), "s").verdict == "unmeasured"


def compare_with(folder, monkeypatch, quality, **changes):
    monkeypatch.setattr(synthetic, "_QUALITY", synthetic._QUALITY | quality)
    return compare(folder, **changes)


def test_lower_and_best_follow_the_records(tmp_path, monkeypatch):
    c = compare_with(tmp_path, monkeypatch, {"alibi": (0.9, 0.9, 0.9), "mosar": (0.9, 0.9, 1.5)})
    assert lower(c, Setting("alibi", 4.0), Setting("rope", 4.0)).verdict == "holds"
    worse = lower(c, Setting("mosar", 4.0), Setting("rope", 4.0))
    assert worse.verdict == "fails" and worse.ours.startswith("+")
    assert worse.paper == "−19.6 %"
    lost = best(c, "mosar", 4.0)
    assert lost.verdict == "fails" and lost.ours.endswith("against ALiBi")
    assert lost.paper == "−0.2 % against ALiBi"
    assert best(c, "alibi", 4.0).verdict == "holds"
    # The same on average, but the seeds differ by more than the margin.
    assert tied(c, Setting("mosar", 1.0), Setting("alibi", 1.0)).verdict == "unclear"
    assert tied(c, Setting("mosar", 1.0), Setting("mosar", 1.0)).verdict == "holds"
    assert tied(c, Setting("mosar", 4.0), Setting("alibi", 4.0)).verdict == "fails"
    assert kept(c, Setting("alibi", 4.0), Setting("alibi", 1.0)).verdict == "holds"
    assert kept(c, Setting("mosar", 4.0), Setting("mosar", 1.0)).verdict == "fails"


def test_the_best_of_all_takes_all_to_hold_and_one_to_fail(tmp_path, monkeypatch):
    quality = {"alibi": (0.9, 0.9, 0.9), "mosar": (0.8, 0.8, 0.8)}
    c = compare_with(tmp_path, monkeypatch, quality, variants=("rope", "alibi", "mosar"))
    found = best(c, "mosar", 4.0)
    assert found.verdict == "unmeasured" and found.ours.endswith("against ALiBi")
    assert found.basis == "3 seeds; 5 of the paper's variants not measured"
    assert best(c, "alibi", 4.0).verdict == "fails"


@pytest.mark.parametrize(
    ("quality", "verdict"), [(0.9, "holds"), (0.97, "fails"), (0.949, "unclear"), (1.1, "fails")]
)
def test_much_better_has_a_measure(tmp_path, monkeypatch, quality, verdict):
    qualities = {"rope": (1.0, 1.0, 1.0), "mosar": (1.0, 1.0, quality)}
    c = compare_with(tmp_path, monkeypatch, qualities, variants=("rope", "mosar"))
    found = {claim.name: (claim, finding) for claim, finding in judged_claims(c)}
    claim, finding = found["far-below-rope"]
    assert finding.verdict == verdict and "Much: by more than 5 %" in claim.rule
    # What is shown is the difference itself.
    assert finding.ours.startswith(f"{number(c.delta('mosar', 4.0).mean, 1, signed=True)} ±")


def test_one_seed_is_no_verdict(tmp_path):
    """However large the difference; seeds that other variants have do not help."""
    c = compare(tmp_path, seeds={"rope": (0, 1, 2), "mosar": (0, 1, 2)}, retrieval=True)
    found = {claim.name: finding for claim, finding in judged_claims(c)}
    assert found["p-rope-collapses"].ours.startswith("+8")
    assert found["p-rope-collapses"].verdict == "unclear"
    for name in ("cost-reach", "cost-quality", "alibi", "smooth-decay", "tie-fixed-m"):
        assert found[name].verdict == "unclear"
        assert found[name].basis.startswith("one seed: direction only, ")
    assert found["better-than-rope"].basis == "3 seeds"
    c = compare(tmp_path / "one", seeds=(0,), retrieval=True)
    assert {finding.verdict for _, finding in judged_claims(c)} == {"unclear"}


def test_rivals_are_compared_within_seeds(tmp_path, monkeypatch):
    """A good seed that MoSAR does not have makes no rival better."""
    quality = {"alibi": (1.0, 1.0, 1.0), "fixed-s": (0.99, 0.99, 0.99), "mosar": (0.9, 0.9, 0.9)}
    lucky = synthetic._shift
    monkeypatch.setattr(synthetic, "_shift", lambda cell: lucky(cell) - (cell.seed == 7))
    several = dict.fromkeys(synthetic.ALL, (0, 1, 2)) | {"alibi": (0, 1, 2, 7)}
    c = compare_with(tmp_path, monkeypatch, quality, seeds=several)
    assert c.estimate(Setting("alibi", 4.0)).mean < c.estimate(Setting("mosar", 4.0)).mean
    found = best(c, "mosar", 4.0)
    assert found.verdict == "holds" and found.ours.endswith("against Fixed-M")


def test_a_gain_is_no_cost_but_a_change(tmp_path, monkeypatch):
    """Top-1 below soft routing is bounded by any measure; sparse below top-1 is not the same."""
    plain = synthetic.make_evaluation
    lower_by = {"soft": 0.0, "native": 0.0, "top1": 0.2, "sparse": 0.4}

    def made(cell, factor, routing="native"):
        record = plain(cell, factor, routing)
        return replace(record, loss=record.loss - lower_by[routing])

    monkeypatch.setattr(synthetic, "make_evaluation", made)
    c = compare(tmp_path, variants=("mosar",))
    gap = bounded(c, "mosar", (1.0,))
    assert gap.verdict == "holds" and "−1" in gap.ours
    assert sparse_same(c, "mosar", (1.0,)).verdict == "fails"


def test_the_medium_reach_is_that_of_the_models_that_were_asked(tmp_path):
    folder = write_experiment(tmp_path, variants=("rope", "mosar"), seeds=(0,), retrieval=False)
    c = Comparison(load_experiment(folder))
    assert medium_reach(c) == 128
    # A task may have been learnt at another length than the text beside it.
    (folder / "records" / "retrieval").mkdir()
    for variant in ("rope", "fixed-m", "mosar"):
        cell = Cell(variant=variant, preset="retrieval", seed=0, grid={"data.task": "recall"})
        reaches = {"S": 4.0, "M": 16.0, "G": 64.0} if variant == "mosar" else {}
        reaches = {"M": 16.0} if variant == "fixed-m" else reaches
        record = replace(make_retrieval(cell, "recall", "native"), reaches=reaches)
        append_record(folder / "records" / "retrieval" / f"{cell.name}.jsonl", record)
    assert medium_reach(Comparison(load_experiment(folder))) == 16
    # Without one that has several regimes, the reach of the text's models is all there is.
    (folder / "records" / "retrieval" / "mosar-seed0-data.task=recall.jsonl").unlink()
    assert medium_reach(Comparison(load_experiment(folder))) == 128


def test_a_gap_is_bounded_or_not(comparison, tmp_path, monkeypatch):
    found = bounded(comparison, "mosar", (1.0, 2.0))
    assert found.verdict == "holds" and found.paper == "1× +3.5 % · 2× +3.9 %"
    monkeypatch.setattr(verdicts, "BOUNDED", 2.0)
    assert bounded(comparison, "mosar", (1.0, 2.0)).verdict == "fails"


def test_time_ratio_is_top1_over_sparse(comparison):
    ratios = []
    for seed in range(3):
        times = {
            routing: record.seconds
            for routing in ("top1", "sparse")
            for record in comparison.records("mosar", 4.0, routing)
            if record.cell.seed == seed
        }
        ratios.append(times["top1"] / times["sparse"])
    assert list(time_ratio(comparison, "mosar").values.values()) == pytest.approx(ratios)


def test_top1_reach_is_that_of_the_top1_pass(tmp_path, monkeypatch):
    plain = synthetic.make_evaluation

    def made(cell, factor, routing="native"):
        record = plain(cell, factor, routing)
        return replace(record, reach_top1=0.125) if routing == "top1" else record

    monkeypatch.setattr(synthetic, "make_evaluation", made)
    c = compare(tmp_path, variants=("mosar",), seeds=(0,))
    assert reach_estimate(c, "mosar", 2.0, top1=True).mean == 0.125
    assert reach_estimate(c, "mosar", 2.0, top1=False).mean != 0.125


def test_all_claims_of_a_whole_experiment_are_judged(comparison):
    found = {claim.name: finding for claim, finding in judged_claims(comparison)}
    assert len(found) == len(CLAIMS) >= 25
    assert not [name for name, finding in found.items() if finding.verdict == "unmeasured"]
    assert all(finding.paper and finding.ours for finding in found.values())
    assert found["better-than-rope"].verdict == "holds"
    assert found["p-rope-collapses"].verdict == "holds"
    assert found["cost-reopens"].verdict != "holds"
    assert found["low-reach"].paper == "0.2210"
    assert "0.4375" in found["low-reach"].ours
    assert found["long-links"].verdict == "holds"
    assert found["throughout"].paper == "RoPE 12 of 12 · mask 12 of 12"


def test_every_claim_can_fail(tmp_path, monkeypatch):
    """Records turned upside down leave hardly a claim standing."""
    quality = {
        "mosar": (1.2, 1.3, 1.9),
        "mosar-cost": (1.0, 1.0, 1.0),
        "fixed-s": (1.1, 1.1, 1.1),
        "fixed-m": (1.1, 1.1, 1.1),
        "rope-m-mask": (0.8, 0.8, 0.8),
        "rope": (1.0, 0.9, 0.8),
        "p-rope": (0.7, 0.7, 0.7),
    }
    monkeypatch.setattr(
        synthetic,
        "_SHARES",
        {
            "mosar": {"query": (0.15, 0.15, 0.7), "key": (0.5, 0.1, 0.4)},
            "mosar-cost": {"query": (0.1, 0.1, 0.8), "key": (0.1, 0.1, 0.8)},
        },
    )
    c = compare_with(tmp_path, monkeypatch, quality)
    found = {claim.name: finding.verdict for claim, finding in judged_claims(c)}
    untouched = {"gap", "top1-reach", "reach-falls", "density-falls", "sparse-same"}
    untouched |= {"sparse-faster", "long-links", "queries-stable", "keys-open", "cost-reopens"}
    holding = {name for name, verdict in found.items() if verdict == "holds"}
    assert holding <= untouched


def test_nothing_to_judge(tmp_path):
    c = compare(tmp_path, variants=("alibi",), seeds=(0,))
    assert {finding.verdict for _, finding in judged_claims(c)} == {"unmeasured"}


@pytest.mark.parametrize(
    ("shift", "verdicts"),
    [
        (0.0, ("holds", "holds", "holds")),
        # 18 % better than ALiBi becomes 1 %; the sparse pass alone is shifted.
        (0.19, ("fails", "fails", "holds")),
    ],
)
def test_claims_of_hard_routing_are_judged_where_it_was_measured(tmp_path, shift, verdicts):
    """Three seeds made of the recorded one: their spread is 0."""
    recorded = Path(__file__).parents[2] / "results/small/records"
    (tmp_path / "records").mkdir()
    for variant in ("alibi", "mosar-plus"):
        for seed in range(3):
            for record in read_records(recorded / f"{variant}-seed0.jsonl"):
                cell = replace(record.cell, seed=seed)
                if isinstance(record, EvaluationRecord) and record.routing == "sparse":
                    record = replace(record, loss=record.loss + shift)
                append_record(
                    tmp_path / "records" / f"{cell.name}.jsonl", replace(record, cell=cell)
                )
    c = Comparison(load_experiment(tmp_path))
    found = {claim.name: finding for claim, finding in judged_own_claims(c)}
    # Nothing of mosar-hard or of retrieval is here, so nothing is said of them.
    assert set(found) == {"hard-exact", "plus-alibi", "plus-density"}
    assert tuple(found[n].verdict for n in ("hard-exact", "plus-alibi", "plus-density")) == verdicts
    assert found["plus-density"].ours == "1× 0.074 · 4× 0.020"


def test_an_experiment_without_hard_variants_has_no_claims_of_ours(comparison):
    assert judged_own_claims(comparison) == []
