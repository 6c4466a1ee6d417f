"""The head of a report: an abstract and a few figures, computed from the records."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from mosar.records import TrainingRecord
from mosar.report.claims import far_accuracy, judged_claims, medium_reach
from mosar.report.comparison import BASELINE, Comparison, Estimate, Setting, mean_mass
from mosar.report.formats import (
    count,
    listed,
    number,
    percent,
    perplexity,
    plural,
    share,
    times,
)
from mosar.report.paper import paper_delta, paper_length, paper_routing
from mosar.report.tables import spread
from mosar.report.verdicts import exact_density, time_ratio

# Variants whose retrieval the abstract reports: adaptive, fixed, dense.
_TOLD = ("mosar", "fixed-m", "rope")


class Tile(NamedTuple):
    """A figure that is worth a glance."""

    value: str
    label: str
    remark: str


def abstract(c: Comparison) -> str:
    """One paragraph: what was run, and what came out."""
    parts = [_what_was_run(c), _quality(c), _best(c), _sparse(c), _retrieval(c), _claims(c)]
    return " ".join(part for part in parts if part)


def _what_was_run(c: Comparison) -> str:
    variants = plural(len(c.variants), "variant")
    seeds = sorted({len(seeds) for seeds in c.seeds.values()})
    if not seeds:
        return "This report holds benchmarks alone: no model was trained or evaluated."
    per = "one seed each" if seeds == [1] else f"{seeds[0]}–{seeds[-1]} seeds each"
    if len(seeds) == 1 and seeds != [1]:
        per = f"{seeds[0]} seeds each"
    text = f"{variants[0].upper()}{variants[1:]} of one decoder, {per}"
    runs = [run for runs in c.trainings.values() for run in runs.values()]
    if runs:
        sizes = sorted({run.parameters for run in runs})
        tokens = sorted({run.tokens for run in runs})
        size = count(sizes[0]) if len(sizes) == 1 else f"{count(sizes[0])} to {count(sizes[-1])}"
        text += f", {size} parameters, trained on {count(tokens[-1])} tokens{_source(runs)}"
    if c.train_length:
        text += f" at a length of {c.train_length:,}"
    if c.factors:
        lengths = listed([times(factor) for factor in c.factors])
        text += f" and evaluated at {lengths} of it on the same text"
    return f"{text}."


def _source(runs: list[TrainingRecord]) -> str:
    """The name of the data, where all runs agree."""
    names = {run.data.get("name") or run.data.get("task") for run in runs}
    name = names.pop() if len(names) == 1 else None
    return f" of {name}" if isinstance(name, str) else ""


def _quality(c: Comparison) -> str:
    if "mosar" not in c.evaluated or not c.factors:
        return ""
    near, far = c.factors[0], c.factors[-1]
    said = []
    for factor in dict.fromkeys((near, far)):
        delta = c.delta("mosar", factor)
        own = c.estimate(Setting("mosar", factor))
        if own is None:
            continue
        text = f"at {times(factor)} MoSAR's perplexity is {perplexity(own.mean)}"
        if delta is not None:
            text += f", {_below(delta)} RoPE's"
        said.append(text)
    if not said:
        return ""
    sentence = "; ".join(said)
    return f"{sentence[0].upper()}{sentence[1:]}."


def _below(delta: Estimate) -> str:
    sd = "" if delta.sd is None else f" ± {number(delta.sd, 1)}"
    side = "below" if delta.mean < 0 else "above"
    return f"{number(abs(delta.mean), 1)}{sd} % {side}"


def _best(c: Comparison) -> str:
    if c.longest is None or len(c.evaluated) < 2:
        return ""
    found = {name: c.estimate(Setting(name, c.longest)) for name in c.evaluated}
    estimates = {name: estimate for name, estimate in found.items() if estimate}
    if len(estimates) < 2:
        return ""
    # A seed makes all variants better or worse alike.
    shared = set.intersection(*(set(estimate.values) for estimate in estimates.values()))
    if not shared:
        return ""
    means = {
        name: statistics.fmean(estimate.values[seed] for seed in shared)
        for name, estimate in estimates.items()
    }
    first, second = sorted(means, key=lambda name: means[name])[:2]
    return (
        f"Over the {plural(len(shared), 'seed')} that all variants have, the lowest perplexity at "
        f"{times(c.longest)} is {c.looks[first].label}'s "
        f"({perplexity(means[first])}), before {c.looks[second].label}'s "
        f"({perplexity(means[second])})."
    )


def _sparse(c: Comparison) -> str:
    if c.longest is None or "mosar" not in c.routed:
        return ""
    soft, top1, sparse = (Setting("mosar", c.longest, r) for r in ("soft", "top1", "sparse"))
    gap, rho = c.relative(sparse, soft), exact_density(c, "mosar", c.longest)
    ratio = time_ratio(c, "mosar")
    if gap is None or rho is None:
        return ""
    text = (
        f"Executed sparsely at {times(c.longest)}, on {percent(rho.mean * 100, signed=False)} of "
        f"the causal pairs, MoSAR's perplexity is {_below(gap)} that of soft routing"
    )
    top = c.relative(top1, soft)
    if top is not None:
        text += f" (top-1: {percent(top.mean)}),"
    if ratio is not None:
        text += f" and it runs {number(ratio.mean, 2)} times as fast as top-1"
    return f"{text}."


def _retrieval(c: Comparison) -> str:
    """Who finds what is farther away than the medium regime reaches, at the longest length."""
    beyond = medium_reach(c)
    longest = max((record.length for record in c.retrievals), default=0)
    said = []
    for task in sorted({record.task for record in c.retrievals}):
        found: dict[str, list[float]] = {}
        for record in c.retrievals:
            accuracy = far_accuracy(record, beyond)
            if (record.task, record.length) == (task, longest) and accuracy is not None:
                routing = "" if record.routing in ("soft", "native") else f", {record.routing}"
                found.setdefault(record.cell.variant + routing, []).append(accuracy)
        means = {name: sum(values) / len(values) for name, values in found.items()}
        shown = [
            f"{c.looks[name].label} {percent(means[name] * 100, 0, signed=False)}"
            for name in sorted(means, key=lambda name: -means[name])
            if name in _TOLD
        ]
        if shown:
            said.append(f"{listed(shown)} ({task})")
    if not said:
        return ""
    return f"Right answers from farther away than {beyond:g} tokens: {'; '.join(said)}."


def _claims(c: Comparison) -> str:
    counts = Counter(finding.verdict for _, finding in judged_claims(c))
    judged = sum(counts.values()) - counts["unmeasured"]
    if not judged:
        return ""
    said = [
        f"{counts[verdict]} {words}"
        for verdict, words in (
            ("holds", "hold" if counts["holds"] != 1 else "holds"),
            ("fails", "do not" if counts["fails"] != 1 else "does not"),
            ("unclear", "cannot be told"),
        )
        if counts[verdict]
    ]
    rest = f"; {counts['unmeasured']} were not measured" if counts["unmeasured"] else ""
    return f"Of {plural(judged, 'claim')} with figures, {listed(said)}{rest}."


def tiles(c: Comparison) -> list[Tile]:
    """The figures at the top; those that the records do not have are left out."""
    found: list[tuple[Estimate | None, Callable[[float], str], str, Callable[[Estimate], str]]] = []
    if BASELINE in c.evaluated and "mosar" in c.evaluated:
        for factor in c.ends:
            label = f"MoSAR's perplexity against RoPE's at {times(factor)}"
            said = paper_delta("mosar", factor)
            remark = partial(_beside, said=said, factor=factor)
            found.append((c.delta("mosar", factor), percent, label, remark))
    if c.longest is not None and "mosar" in c.routed:
        far = times(c.longest)
        soft, top1, sparse = (Setting("mosar", c.longest, r) for r in ("soft", "top1", "sparse"))
        said = paper_routing("mosar", c.longest).get("gap_pct")
        mass = c.estimate(sparse, mean_mass) or c.estimate(top1, mean_mass)
        found += [
            (
                *(c.relative(top1, soft), percent, f"top-1 against soft routing at {far}"),
                partial(_beside, said=said, factor=c.longest),
            ),
            (
                *(exact_density(c, "mosar", c.longest), _of_all),
                f"of the causal pairs evaluated by sparse attention at {far}",
                lambda rho: f"ρ = {spread(rho, share)}",
            ),
            (
                *(mass, _of_all, f"of the attention is outside of the support at {far}"),
                lambda _: "mean over rows and layers",
            ),
            (
                *(time_ratio(c, "mosar"), lambda ratio: f"{number(ratio, 2)}×"),
                f"as fast with sparse as with top-1 routing at {far}",
                lambda _: "the same checkpoint and text, in turn",
            ),
        ]
    return [Tile(text(e.mean), label, remark(e)) for e, text, label, remark in found if e]


def _of_all(portion: float) -> str:
    return percent(portion * 100, signed=False)


def _beside(estimate: Estimate, said: float | None, factor: float) -> str:
    sd = (
        f"± {number(estimate.sd, 1)}, {estimate.n} seeds" if estimate.sd is not None else "one seed"
    )
    return sd if said is None else f"{sd}; paper {percent(said)} at {paper_length(factor)}"
