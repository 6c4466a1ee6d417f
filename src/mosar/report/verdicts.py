"""The rule by which a claim holds or does not, and the comparisons that claims are made of.

A difference counts where it is larger than two standard errors over the seeds both sides share.
With one seed the spread is borrowed from the variants that have several; without any there is
no error bar, and the sign decides. Only differences of perplexities borrow.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from mosar.records import EvaluationRecord
from mosar.report.comparison import (
    Comparison,
    Estimate,
    Setting,
    curve_of,
    difference,
)
from mosar.report.formats import MISSING, number, percent, plural, share, times
from mosar.report.paper import paper, paper_perplexity, paper_routing

Verdict = Literal["holds", "fails", "noise", "unmeasured"]
VERDICTS: dict[Verdict, str] = {
    "holds": "holds",
    "fails": "does not hold",
    "noise": "within noise",
    "unmeasured": "not measured",
}
RULE = (
    "A difference counts where it is larger than two standard errors over the seeds that both "
    "sides share; it is taken within each seed first. With one seed, a difference between two "
    "perplexities borrows the spread of the variants that have several; where none has, and for "
    "all other figures, there is no error bar and the sign decides. Where a row states a rule of "
    "its own, that one counts."
)
# Perplexities closer than this are called tied whatever the seeds say, percent.
TIE = 0.5
# Much better: by ten times a tie, percent. The paper's own "much" is 19.6.
MUCH = 5.0
# The paper calls its top-1 gap bounded without a bound; its own is 5.4 at most, percent.
BOUNDED = 10.0
# Sparse execution is called the same as top-1 within this, percent.
SAME = 1.0


@dataclass(frozen=True)
class Finding:
    """What became of a claim."""

    paper: str
    ours: str
    verdict: Verdict
    basis: str = ""
    """How many seeds it rests on."""


def judge(support: Estimate, spread: float | None = None) -> tuple[Verdict, str]:
    """`support` is positive where it speaks for the claim; `spread` is the sd to borrow."""
    margin, basis = _margin(support, spread)
    if support.mean > margin:
        return "holds", basis
    return ("fails" if support.mean < -margin else "noise"), basis


def _margin(estimate: Estimate, spread: float | None) -> tuple[float, str]:
    if estimate.stderr is not None:
        return 2 * estimate.stderr, plural(estimate.n, "seed")
    if spread is not None:
        return 2 * spread, "one seed, spread of the others"
    return 0.0, "one seed, no error bar"


def unmeasured(paper_figure: str) -> Finding:
    return Finding(paper_figure, MISSING, "unmeasured")


def together(parts: Sequence[tuple[str, Finding]]) -> Finding:
    """Several comparisons as one: of those measured, it holds if all do, and does not if one does
    not."""
    known = [finding for _, finding in parts if finding.verdict != "unmeasured"]
    verdicts = {finding.verdict for finding in known}
    verdict: Verdict = "unmeasured"
    for level in ("holds", "noise", "fails"):
        verdict = level if level in verdicts else verdict
    missing = [label for label, finding in parts if finding.verdict == "unmeasured"]
    basis = "; ".join(dict.fromkeys(finding.basis for finding in known if finding.basis))
    if known and missing:
        basis += f"; of those measured, without {', '.join(missing)}"
    return Finding(
        " · ".join(f"{label} {finding.paper}" for label, finding in parts),
        " · ".join(f"{label} {finding.ours}" for label, finding in parts) if known else MISSING,
        verdict,
        basis,
    )


def lower(c: Comparison, setting: Setting, than: Setting, by: float = 0.0) -> Finding:
    """Perplexity of one setting is below that of another, by more than so many percent."""
    return _relative(c, setting, than, -1, by)


def higher(c: Comparison, setting: Setting, than: Setting) -> Finding:
    return _relative(c, setting, than, 1)


def _relative(
    c: Comparison, setting: Setting, than: Setting, sign: int, by: float = 0.0
) -> Finding:
    said = _paper_relative(setting, than)
    found = c.relative(setting, than)
    if found is None:
        return unmeasured(said)
    support = Estimate({seed: sign * value - by for seed, value in found.values.items()})
    verdict, basis = judge(support, c.seed_spread(than.factor))
    return Finding(said, _percent(found), verdict, basis)


def tied(c: Comparison, setting: Setting, with_: Setting) -> Finding:
    """Perplexities differ by less than `TIE` percent, or by no more than noise."""
    said, found = _paper_relative(setting, with_), c.relative(setting, with_)
    if found is None:
        return unmeasured(said)
    margin, basis = _margin(found, c.seed_spread(with_.factor))
    close = abs(found.mean) <= max(margin, TIE)
    return Finding(said, _percent(found), "holds" if close else "fails", basis)


def kept(c: Comparison, setting: Setting, than: Setting) -> Finding:
    """Perplexity is not above another's by more than `TIE` percent or noise."""
    said, found = _paper_relative(setting, than), c.relative(setting, than)
    if found is None:
        return unmeasured(said)
    margin, basis = _margin(found, None)
    verdict: Verdict = "holds" if found.mean <= max(margin, TIE) else "fails"
    return Finding(said, _percent(found), verdict, basis)


def best(c: Comparison, variant: str, factor: float) -> Finding:
    """No other variant has a lower perplexity at this length.

    One that has is enough to say no; to say yes takes all that the paper compares.
    """
    rivals = [name for name in paper()["main"] if name != variant]
    runner_up = min(rivals, key=lambda name: paper_perplexity(name, factor) or math.inf)
    said = (
        f"{_paper_relative(Setting(variant, factor), Setting(runner_up, factor))} "
        f"against {_label(runner_up)}"
    )
    estimates = {name: c.estimate(Setting(name, factor)) for name in c.evaluated}
    measured = {name: found.mean for name, found in estimates.items() if found and name != variant}
    if not measured or estimates.get(variant) is None:
        return unmeasured(said)
    rival = min(measured, key=lambda name: measured[name])
    finding = lower(c, Setting(variant, factor), Setting(rival, factor))
    if finding.verdict == "unmeasured":
        return unmeasured(said)
    missing = len(set(rivals) - set(measured))
    basis = finding.basis + (f"; {missing} of the paper's variants not measured" if missing else "")
    verdict = "unmeasured" if missing and finding.verdict == "holds" else finding.verdict
    return Finding(said, f"{finding.ours} against {_label(rival)}", verdict, basis)


def bounded(c: Comparison, variant: str, factors: Sequence[float]) -> Finding:
    """Top-1 routing costs at most `BOUNDED` percent against soft routing."""
    bounds = (-math.inf, BOUNDED)
    return together([(times(f), _gap(c, variant, f, "top1", "soft", bounds)) for f in factors])


def sparse_same(c: Comparison, variant: str, factors: Sequence[float]) -> Finding:
    """Sparse execution is within `SAME` percent of top-1, above or below."""
    bounds = (-SAME, SAME)
    parts = [(times(f), _gap(c, variant, f, "sparse", "top1", bounds)) for f in factors]
    found = together(parts)
    return Finding("not measured", found.ours, found.verdict, found.basis)


def _gap(
    c: Comparison,
    variant: str,
    factor: float,
    routing: str,
    to: str,
    bounds: tuple[float, float],
) -> Finding:
    said = paper_routing(variant, factor).get("gap_pct")
    said = MISSING if said is None else percent(said)
    found = c.relative(Setting(variant, factor, routing), Setting(variant, factor, to))
    if found is None:
        return unmeasured(said)
    verdict: Verdict = "holds" if bounds[0] <= found.mean <= bounds[1] else "fails"
    return Finding(said, _percent(found), verdict, _seeds(found))


def greater(
    a: Estimate | None, b: Estimate | None, said: str, decimals: int = 3, *, change: bool = False
) -> Finding:
    """A share or reach is greater than another; `change` writes it as a change from b to a."""
    gap = difference(a, b)
    if a is None or b is None or gap is None:
        return unmeasured(said)
    verdict, basis = judge(gap)
    first, second = (b, a) if change else (a, b)
    arrow = " → " if change else " against "
    ours = f"{share(first.mean, decimals)}{arrow}{share(second.mean, decimals)}"
    return Finding(said, ours, verdict, basis)


def falls(a: Estimate | None, b: Estimate | None, said: str, decimals: int = 3) -> Finding:
    """From a to b something gets smaller."""
    found = greater(a, b, said, decimals)
    if a is None or b is None or found.verdict == "unmeasured":
        return found
    change = (b.mean / a.mean - 1) * 100 if a.mean else 0.0
    text = f"{share(a.mean, decimals)} → {share(b.mean, decimals)} ({percent(change, 0)})"
    return Finding(said, text, found.verdict, found.basis)


def below_throughout(c: Comparison, variant: str, other: str) -> Finding:
    """At nine in ten of the validations during training, one variant is below another."""
    curves = paper()["validation"]["perplexity"]
    wins = sum(a < b for a, b in zip(curves[variant], curves[other], strict=True))
    said = f"{wins} of {len(curves[variant])}"
    ours, theirs = c.trainings.get(variant, {}), c.trainings.get(other, {})
    below = total = 0
    seeds = sorted(set(ours) & set(theirs))
    for seed in seeds:
        losses = curve_of(theirs[seed].valid_curve)
        # Before the first step all variants are the same.
        pairs = [(loss, losses[s]) for s, loss in ours[seed].valid_curve if s > 0 and s in losses]
        below += sum(a < b for a, b in pairs)
        total += len(pairs)
    if not total:
        return unmeasured(said)
    part = below / total
    verdict: Verdict = "holds" if part >= 0.9 else "fails" if part <= 0.5 else "noise"
    return Finding(said, f"{below} of {total}", verdict, plural(len(seeds), "seed"))


def faster(c: Comparison, variant: str) -> Finding:
    """At the longest length, sparse evaluation takes less time than top-1."""
    found = time_ratio(c, variant)
    if found is None:
        return unmeasured("not measured")
    gain = Estimate({seed: value - 1 for seed, value in found.values.items()})
    verdict, basis = judge(gain)
    ours = f"{number(found.mean, 2)} times as fast at {times(c.longest or 1)}"
    return Finding("not measured", ours, verdict, basis)


def time_ratio(c: Comparison, variant: str, factor: float | None = None) -> Estimate | None:
    """Seconds of top-1 over seconds of sparse on the same checkpoint, at the longest length."""
    factor = c.longest if factor is None else factor
    if factor is None:
        return None
    top1 = c.estimate(Setting(variant, factor, "top1"), _seconds)
    sparse = c.estimate(Setting(variant, factor, "sparse"), _seconds)
    if top1 is None or sparse is None:
        return None
    shared = [seed for seed in top1.values if sparse.values.get(seed)]
    found = {seed: top1.values[seed] / sparse.values[seed] for seed in shared}
    return Estimate(found) if found else None


def reach_estimate(c: Comparison, variant: str, factor: float, *, top1: bool) -> Estimate | None:
    """Normalized reach; of the one-hot choices where they were followed, if that was evaluated."""
    own = Setting(variant, factor)
    if not top1:
        return c.estimate(own, lambda record: record.reach_soft)
    followed = c.estimate(Setting(variant, factor, "top1"), lambda record: record.reach_top1)
    return followed or c.estimate(own, lambda record: record.reach_top1)


def exact_density(c: Comparison, variant: str, factor: float) -> Estimate | None:
    """Support density under sparse or top-1 routing."""
    for routing in ("sparse", "top1"):
        found = c.estimate(Setting(variant, factor, routing), lambda record: record.density)
        if found is not None:
            return found
    return None


def _seconds(record: EvaluationRecord) -> float | None:
    return record.seconds or None


def _paper_relative(setting: Setting, than: Setting) -> str:
    """The same difference in the paper's tables."""
    a, b = (paper_perplexity(s.variant, s.factor, s.routing or "soft") for s in (setting, than))
    return MISSING if a is None or b is None else percent((a / b - 1) * 100)


def _percent(estimate: Estimate) -> str:
    sd = "" if estimate.sd is None else f" ± {number(estimate.sd, 1)}"
    return f"{number(estimate.mean, 1, signed=True)}{sd} %"


def _seeds(estimate: Estimate) -> str:
    return plural(estimate.n, "seed") if estimate.n > 1 else "one seed, no error bar"


def _label(variant: str) -> str:
    return paper()["labels"].get(variant, variant)
