"""The paper's claims, and ours of hard routing, each with what the records say of it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product

from mosar.records import RetrievalRecord
from mosar.report.comparison import (
    Comparison,
    Estimate,
    Setting,
    difference,
    mean_share,
    paired,
)
from mosar.report.formats import MISSING, percent, share, times
from mosar.report.paper import paper_reach, paper_routing
from mosar.report.verdicts import (
    BOUNDED,
    LOST,
    MUCH,
    SAME,
    THROUGHOUT,
    TIE,
    Finding,
    below_throughout,
    best,
    bounded,
    exact_density,
    falls,
    faster,
    greater,
    higher,
    judge,
    kept,
    lower,
    reach_estimate,
    sparse_same,
    tied,
    together,
    unmeasured,
    within,
)

# Thresholds of our own claims, set before any recorded run of a hard variant; in percent.
EXACT, GOOD, CLEARLY = 0.1, 0.5, 3.0
# MoSAR-Hard's density may be this many times MoSAR's.
DENSER = 1.5
# The density of MoSAR-Plus, by factor of the training length.
FEW = {1.0: 0.20, 4.0: 0.05}
# The lengths the paper evaluates, as factors of the training length.
LENGTHS = (1.0, 2.0, 4.0)


@dataclass(frozen=True)
class Claim:
    """A sentence that records can speak for or against."""

    name: str
    group: str
    text: str
    measure: Callable[[Comparison], Finding]
    rule: str = ""
    """Where the verdict is not by the common rule."""


def judged_claims(c: Comparison) -> list[tuple[Claim, Finding]]:
    """Every claim of the paper with its finding, in the order of its argument."""
    return [(claim, claim.measure(c)) for claim in CLAIMS]


def judged_own_claims(c: Comparison) -> list[tuple[Claim, Finding]]:
    """Our claims of hard routing, where something of them was measured."""
    judged = [(claim, claim.measure(c)) for claim in OWN_CLAIMS]
    return [(claim, found) for claim, found in judged if found.verdict != "unmeasured"]


def _against(a: str, b: str, factor: float, routing: str | None = None):
    """Perplexity of a is below that of b at one length."""
    return lambda c: lower(c, Setting(a, factor, routing), Setting(b, factor))


def _each(parts: list[tuple[str, Callable[[Comparison], Finding]]]):
    return lambda c: together([(label, measure(c)) for label, measure in parts])


def _said(variant: str, name: str, *factors: float) -> str:
    """Figures of the paper's routing table, with arrows between lengths."""
    return " → ".join(share(paper_routing(variant, factor)[name]) for factor in factors)


def _share(c: Comparison, variant: str, side: str, letter: str, factor: float) -> Estimate | None:
    """The share of the shortest ("S") or the global ("G") regime."""
    return c.estimate(Setting(variant, factor), mean_share(side, 0 if letter == "S" else -1))


def _change(variant: str, side: str, letter: str, *, rises: bool) -> Callable[..., Finding]:
    """From the training length to four times it, a share rises or falls."""

    def measure(c: Comparison) -> Finding:
        said = _said(variant, f"{side[0]}_{letter}", 1, 4)
        near, far = (_share(c, variant, side, letter, factor) for factor in (1.0, 4.0))
        return greater(far, near, said, change=True) if rises else falls(near, far, said)

    return measure


def _learned_reach(c: Comparison) -> Finding:
    said = share(paper_reach("mosar") or 0, 4)
    config = c.geometry("mosar")
    found = reach_estimate(c, "mosar", 1.0, top1=False)
    if config is None or found is None:
        return unmeasured(said)
    costs = [min(regime.reach / config.max_length, 1.0) for regime in config.regimes]
    uniform = (sum(costs[:-1]) + 1.0) / len(costs)
    finding = greater(Estimate(dict.fromkeys(found.values, uniform)), found, said, 4)
    ours = f"{share(found.mean, 4)}; uniform routing has {share(uniform, 4)}"
    return Finding(said, ours, finding.verdict, finding.basis)


def _top1_reach(factor: float) -> Callable[[Comparison], Finding]:
    def measure(c: Comparison) -> Finding:
        row = paper_routing("mosar", factor)
        said = f"{share(row['soft_reach'])} → {share(row['top1_reach'])}"
        soft, top1 = (reach_estimate(c, "mosar", factor, top1=hard) for hard in (False, True))
        return falls(soft, top1, said)

    return measure


def _reach_falls(c: Comparison) -> Finding:
    near, far = (reach_estimate(c, "mosar", factor, top1=True) for factor in (1.0, 4.0))
    return falls(near, far, f"{_said('mosar', 'top1_reach', 1, 4)} ({percent(-33, 0)})")


def _density(c: Comparison) -> Finding:
    near, far = (exact_density(c, "mosar", factor) for factor in (1.0, 4.0))
    said = f"{_said('mosar', 'top1_reach', 1, 4)}, which is its reach"
    return falls(near, far, said)


def _less_than_keys(c: Comparison) -> Finding:
    row = [paper_routing("mosar", factor) for factor in (1, 4)]
    said = (
        f"{share(abs(row[1]['q_S'] - row[0]['q_S']))} against "
        f"{share(abs(row[1]['k_S'] - row[0]['k_S']))}"
    )
    moved = []
    for side in ("key", "query"):
        near, far = (_share(c, "mosar", side, "S", factor) for factor in (1.0, 4.0))
        if near is None or far is None:
            return unmeasured(said)
        shared = [seed for seed in near.values if seed in far.values]
        moved.append(Estimate({s: abs(far.values[s] - near.values[s]) for s in shared}))
    key, query = moved
    finding = greater(key, query, said)
    return Finding(
        said, f"{share(query.mean)} against {share(key.mean)}", finding.verdict, finding.basis
    )


def _asymmetry(c: Comparison) -> Finding:
    query, key = (_share(c, "mosar", side, "S", 1.0) for side in ("query", "key"))
    row = paper_routing("mosar", 1)
    return greater(query, key, f"{share(row['q_S'])} against {share(row['k_S'])}")


def _cost_reach(c: Comparison) -> Finding:
    ours, theirs = (paper_reach(name) or 0 for name in ("mosar", "mosar-cost"))
    change = percent((theirs / ours - 1) * 100, 0)
    said = f"{share(ours, 4)} → {share(theirs, 4)} ({change})"
    plain, cost = (reach_estimate(c, v, 1.0, top1=False) for v in ("mosar", "mosar-cost"))
    return falls(plain, cost, said, 4)


def medium_reach(c: Comparison) -> float | None:
    """The longest reach but the global one: of the models that were asked, or of any."""
    # A task may have been learnt at another length than the text beside it.
    asked = next((r.reaches for r in c.retrievals if len(r.reaches) > 1), None)
    if asked is not None:
        return sorted(asked.values())[-2]
    configs = (c.geometry(variant) for variant in ("mosar", *c.trainings))
    config = next((config for config in configs if config is not None), None)
    return None if config is None else config.regimes[-2].reach


def far_accuracy(record: RetrievalRecord, beyond: float | None) -> float | None:
    """Share of right answers where the target is farther away than `beyond`."""
    if beyond is None:
        return None
    rows = [row for row in record.by_distance if row[0] > beyond and row[3]]
    answers = sum(row[3] for row in rows)
    return sum(row[2] * row[3] for row in rows) / answers if answers else None


def found_from_far(
    c: Comparison, variant: str, task: str, factor: float, routing: str
) -> Estimate | None:
    """Share of right answers from beyond the medium reach, of each seed."""
    beyond, values = medium_reach(c), {}
    for record in c.retrievals:
        accuracy = far_accuracy(record, beyond)
        which = (record.cell.variant, record.routing, record.length / record.train_length)
        if which == (variant, routing, factor) and record.task == task and accuracy is not None:
            values.setdefault(record.cell.seed, []).append(accuracy)
    means = {seed: sum(v) / len(v) for seed, v in sorted(values.items())}
    return Estimate(means) if means else None


def _long_links(c: Comparison) -> Finding:
    """Of the answers from far that soft routing finds, sparse execution loses few: in each task."""
    parts = []
    tasks = sorted({record.task for record in c.retrievals}, reverse=True)
    for task, factor in product(tasks, LENGTHS):
        soft, sparse = (
            found_from_far(c, "mosar", task, factor, routing) for routing in ("soft", "sparse")
        )
        finding = _fewer(soft, sparse)
        parts.append((f"{task} {times(factor)}" if len(tasks) > 1 else times(factor), finding))
    return replace(together(parts), paper="not measured") if parts else unmeasured("not measured")


def _fewer(before: Estimate | None, after: Estimate | None) -> Finding:
    """A share of right answers falls by less than `LOST`."""
    pair = paired(before, after)
    if pair is None:
        return unmeasured("")
    ours = " → ".join(share(estimate.mean) for estimate in pair)
    return Finding("", ours, *judge(difference(*pair), -math.inf, LOST))


def _executes_what_it_learnt(c: Comparison) -> Finding:
    parts = []
    for name in _HARD_VARIANTS:
        one = f"mosar-{name}"
        found = together(
            [
                (times(f), within(c, Setting(one, f, "sparse"), Setting(one, f, "top1"), EXACT))
                for f in LENGTHS
            ]
        )
        parts.append((name.capitalize(), found))
    known = [(label, found) for label, found in parts if found.verdict != "unmeasured"]
    return replace(together(known or parts), paper=MISSING)


def _executed(variant: str, than: str, by: float) -> Callable[[Comparison], Finding]:
    """Executed sparsely it is below another variant at every length, by this many per cent."""

    def measured(c: Comparison) -> Finding:
        parts = [
            (times(f), lower(c, Setting(variant, f, "sparse"), Setting(than, f), by=by))
            for f in LENGTHS
        ]
        return replace(together(parts), paper=MISSING)

    return measured


def _denser(c: Comparison) -> Finding:
    """The density of `mosar-hard` is at most `DENSER` times that of `mosar`."""
    parts = []
    for factor in (1.0, 4.0):
        pair = paired(exact_density(c, "mosar-hard", factor), exact_density(c, "mosar", factor))
        finding = unmeasured("")
        if pair is not None:
            hard, soft = pair
            ratio = Estimate({seed: hard.values[seed] / soft.values[seed] for seed in hard.values})
            ours = f"{share(soft.mean)} → {share(hard.mean)}"
            finding = Finding("", ours, *judge(ratio, -math.inf, DENSER))
        parts.append((times(factor), finding))
    return replace(together(parts), paper=MISSING)


def _reads_few(c: Comparison) -> Finding:
    parts = []
    for factor, most in FEW.items():
        found = exact_density(c, "mosar-plus", factor)
        finding = unmeasured("")
        if found is not None:
            finding = Finding("", share(found.mean), *judge(found, -math.inf, most))
        parts.append((times(factor), finding))
    return replace(together(parts), paper=MISSING)


def _finds_like_rope(c: Comparison, variant: str) -> Finding:
    """Answers from far, RoPE → sparse: at N and at twice that length, in each task."""
    tasks = sorted({record.task for record in c.retrievals}, reverse=True)
    parts = [
        (
            f"{task} {times(factor)}",
            _fewer(
                found_from_far(c, "rope", task, factor, "native"),
                found_from_far(c, variant, task, factor, "sparse"),
            ),
        )
        for task, factor in product(tasks, LENGTHS[:2])
    ]
    return replace(together(parts), paper=MISSING) if parts else unmeasured("")


_NEAR, _FAR = "At the training length", "Beyond the training length"
_TOP1, _GEOMETRY = "Top-1 routing", "The learned geometry"
_COST, _OPEN = "A price on reach", "What the paper leaves open"

CLAIMS: tuple[Claim, ...] = (
    Claim(
        "better-than-rope", _NEAR, "MoSAR is better than dense RoPE.", _against("mosar", "rope", 1)
    ),
    Claim(
        "locality",
        _NEAR,
        "Fixed-S and Fixed-M are better than dense RoPE too: locality is a strong prior.",
        _each([("S", _against("fixed-s", "rope", 1)), ("M", _against("fixed-m", "rope", 1))]),
    ),
    Claim(
        "tie-fixed-m",
        _NEAR,
        "MoSAR is tied with Fixed-M.",
        lambda c: tied(c, Setting("mosar", 1), Setting("fixed-m", 1)),
        f"Tied: the interval lies within ± {TIE:g} %, the smallest difference that the paper calls "
        "an improvement (MoSAR against ALiBi at 4×).",
    ),
    Claim(
        "smooth-decay",
        _NEAR,
        "Smooth decay is better than a hard mask of the same reach: Fixed-M against RoPE-M-mask.",
        _against("fixed-m", "rope-m-mask", 1),
    ),
    Claim(
        "mask-hurts",
        _NEAR,
        "The hard mask is worse than dense RoPE.",
        lambda c: higher(c, Setting("rope-m-mask", 1), Setting("rope", 1)),
    ),
    Claim(
        "throughout",
        _NEAR,
        "All through training MoSAR stays below dense RoPE and below the hard mask.",
        _each(
            [
                ("RoPE", lambda c: below_throughout(c, "mosar", "rope")),
                ("mask", lambda c: below_throughout(c, "mosar", "rope-m-mask")),
            ]
        ),
        f"All through: at more than {THROUGHOUT * 100:g} % of the validations.",
    ),
    Claim("best-2", _FAR, "MoSAR is the best of all at 2×.", lambda c: best(c, "mosar", 2)),
    Claim("best-4", _FAR, "MoSAR is the best of all at 4×.", lambda c: best(c, "mosar", 4)),
    Claim(
        "alibi", _FAR, "MoSAR is slightly better than ALiBi at 4×.", _against("mosar", "alibi", 4)
    ),
    Claim(
        "adaptive",
        _FAR,
        "Neither Fixed-S nor Fixed-M comes up to MoSAR: it is not locality alone.",
        _each(
            [
                (f"{name[-1].upper()} {times(factor)}", _against("mosar", name, factor))
                for factor in LENGTHS[1:]
                for name in ("fixed-s", "fixed-m")
            ]
        ),
    ),
    Claim(
        "far-below-rope",
        _FAR,
        "MoSAR is much better than dense RoPE at 4×.",
        lambda c: lower(c, Setting("mosar", 4), Setting("rope", 4), by=MUCH),
        f"Much: by more than {MUCH:g} %.",
    ),
    Claim(
        "keeps-quality",
        _FAR,
        "MoSAR loses nothing from the training length to 4×.",
        lambda c: kept(c, Setting("mosar", 4), Setting("mosar", 1)),
        f"Nothing: less than {TIE:g} %.",
    ),
    Claim(
        "rope-degrades",
        _FAR,
        "Dense RoPE degrades from the training length to 4×.",
        lambda c: higher(c, Setting("rope", 4), Setting("rope", 1)),
    ),
    Claim(
        "p-rope-collapses",
        _FAR,
        "p-RoPE collapses at 4×: it is worse than dense RoPE there.",
        lambda c: higher(c, Setting("p-rope", 4), Setting("rope", 4)),
    ),
    Claim(
        "smooth-decay-far",
        _FAR,
        "Smooth decay stays better than the hard mask beyond the training length.",
        _each([(times(f), _against("fixed-m", "rope-m-mask", f)) for f in LENGTHS[1:]]),
    ),
    Claim(
        "gap",
        _TOP1,
        "Going from soft to top-1 routing costs a bounded amount of perplexity.",
        lambda c: bounded(c, "mosar", LENGTHS),
        f"Bounded: less than {BOUNDED:g} % at every length.",
    ),
    Claim(
        "top1-below-rope",
        _TOP1,
        "With top-1 routing MoSAR is still better than dense RoPE beyond the training length.",
        _each([(times(f), _against("mosar", "rope", f, "top1")) for f in LENGTHS[1:]]),
    ),
    Claim(
        "top1-reach",
        _TOP1,
        "Top-1 routing lowers the normalized reach.",
        _each([(times(f), _top1_reach(f)) for f in LENGTHS]),
    ),
    Claim(
        "reach-falls",
        _TOP1,
        "The top-1 reach falls with length.",
        _reach_falls,
    ),
    Claim(
        "density-falls",
        _TOP1,
        "The support density falls with length, so that the cost grows less than quadratically.",
        _density,
        "Ours is the exact share of causal pairs inside the support.",
    ),
    Claim(
        "low-reach",
        _GEOMETRY,
        "The routers learn a low reach from the language-modelling loss alone.",
        _learned_reach,
        "Low: below the reach of uniform routing, with which training starts.",
    ),
    Claim(
        "asymmetry",
        _GEOMETRY,
        "Queries are more local than keys: they choose the short regime more often.",
        _asymmetry,
    ),
    Claim(
        "keys-open",
        _GEOMETRY,
        "As the context grows, keys leave the short regime.",
        _change("mosar", "key", "S", rises=False),
    ),
    Claim(
        "queries-stable",
        _GEOMETRY,
        "The queries' routing is stable: their short share moves less than that of the keys.",
        _less_than_keys,
    ),
    Claim("cost-reach", _COST, "A price on reach lowers it.", _cost_reach),
    Claim(
        "cost-quality",
        _COST,
        "It costs a little perplexity: MoSAR-Cost against MoSAR.",
        _each(
            [
                (times(f), lambda c, f=f: higher(c, Setting("mosar-cost", f), Setting("mosar", f)))
                for f in LENGTHS
            ]
        ),
    ),
    Claim(
        "cost-reopens",
        _COST,
        "Even so the global regime is used more at 4× than at the training length.",
        _each(
            [
                ("queries", _change("mosar-cost", "query", "G", rises=True)),
                ("keys", _change("mosar-cost", "key", "G", rises=True)),
            ]
        ),
    ),
    Claim(
        "sparse-same",
        _OPEN,
        "Leaving out what is outside the support changes little: sparse against top-1 perplexity.",
        lambda c: sparse_same(c, "mosar", LENGTHS),
        f"Little: less than {SAME:g} %, up or down.",
    ),
    Claim(
        "sparse-faster",
        _OPEN,
        "Sparse evaluation takes less time than top-1.",
        lambda c: faster(c, "mosar"),
    ),
    Claim(
        "long-links",
        _OPEN,
        "Rare long links are kept: retrieval from beyond the medium reach, soft → sparse routing.",
        _long_links,
        f"Kept: less than {LOST * 100:g} % of the answers are lost at each length.",
    ),
)


_HARD = "Beyond the paper: trained on what is executed"
_HARD_VARIANTS = ("hard", "plus")


def _claim_of_long_links(name: str) -> Claim:
    return Claim(
        f"{name}-links",
        _HARD,
        f"MoSAR-{name.capitalize()} keeps long links: retrieval from beyond the medium reach, "
        "RoPE → sparse.",
        lambda c: _finds_like_rope(c, f"mosar-{name}"),
        f"Kept: less than {LOST * 100:g} % of the answers are lost.",
    )


OWN_CLAIMS: tuple[Claim, ...] = (
    Claim(
        "hard-exact",
        _HARD,
        "A hard model executes what it was trained on: sparse against its own top-1 perplexity.",
        _executes_what_it_learnt,
        f"Less than {EXACT:g} % apart at every length.",
    ),
    Claim(
        "hard-quality",
        _HARD,
        "MoSAR-Hard executed sparsely is as good as MoSAR with soft routing.",
        _executed("mosar-hard", "mosar", by=-GOOD),
        f"As good: at most {GOOD:g} % above it.",
    ),
    Claim(
        "hard-density",
        _HARD,
        "MoSAR-Hard stays sparse: its density against that of MoSAR.",
        _denser,
        f"At most {DENSER:g} times as high.",
    ),
    Claim(
        "plus-alibi",
        _HARD,
        "MoSAR-Plus executed sparsely is clearly better than dense ALiBi.",
        _executed("mosar-plus", "alibi", by=CLEARLY),
        f"Clearly: by more than {CLEARLY:g} % at every length.",
    ),
    Claim(
        "plus-density",
        _HARD,
        "MoSAR-Plus reads few pairs: its exact density.",
        _reads_few,
        f"Few: at most {' and '.join(f'{most:g} at {times(f)}' for f, most in FEW.items())}.",
    ),
    *(_claim_of_long_links(name) for name in _HARD_VARIANTS),
)
