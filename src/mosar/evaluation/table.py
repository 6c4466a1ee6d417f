"""Evaluations in a terminal: one row per length and routing."""

from __future__ import annotations

import math
from collections.abc import Sequence

from mosar.records import EvaluationRecord, RetrievalRecord
from mosar.terminal import TerminalTable

_NONE = "–"


def perplexity_table(
    records: Sequence[EvaluationRecord], against: Sequence[EvaluationRecord] = ()
) -> TerminalTable:
    """Perplexities and what the routers did; `against`: another run at the same lengths."""
    found = {(record.length, record.routing): record for record in records}
    first = records[0]
    title = (
        f"{first.cell.name}, step {first.step}: {first.tokens:,} tokens of the validation text at "
        "every length"
    )
    routed = first.reach_soft is not None
    head = ["length", "routing", "perplexity", "±", f"vs {first.train_length}\n%"]
    head += [f"Δ {against[0].cell.name}\n%"] if against else []
    base = {record.length: record for record in against}
    head += ["gap\n%", "reach\nsoft", "reach\ntop-1"] if routed else []
    head += ["density\nρ"]
    head += ["discarded\nmean", "\np95", "\nworst"] if routed else []
    rows = []
    for record in records:
        perplexity = record.perplexity
        row = [
            str(record.length),
            record.routing,
            f"{perplexity:.3f}",
            f"{perplexity * record.loss_stderr:.3f}",
            _percent(perplexity, found.get((record.train_length, record.routing))),
        ]
        if against:
            row.append(_percent(perplexity, base.get(record.length)))
        if routed:
            soft = None if record.routing == "soft" else found.get((record.length, "soft"))
            row += [
                _percent(perplexity, soft),
                _share(record.reach_soft),
                _share(record.reach_top1),
            ]
        row.append(_share(record.density))
        if routed:
            row += _masses(record)
        rows.append([*row, f"{record.tokens / max(record.seconds, 1e-9):,.0f}"])
    return _table(title, [*head, "tokens/s"], rows, sections=True)


def time_ratios(records: Sequence[EvaluationRecord]) -> list[str]:
    """How much faster sparse is than top1, one line per length."""
    seconds = {(record.length, record.routing): record.seconds for record in records}
    lines = []
    for length in dict.fromkeys(record.length for record in records):
        dense, sparse = (seconds.get((length, routing)) for routing in ("top1", "sparse"))
        if dense and sparse:
            factor = length / records[0].train_length
            lines.append(
                f"at {factor:g}x sparse takes {sparse / dense:.2f} of the time of top1 "
                f"({dense / sparse:.2f} times as fast)"
            )
    return lines


def layer_table(record: EvaluationRecord) -> TerminalTable:
    """What the routers of each layer did under one routing."""
    head = ["layer", "density\nρ", "discarded\nmean", "\np95", "\nworst"]
    head += [f"{role} {name}\n%" for role in ("q", "k") for name in record.regimes]
    chosen = record.shares_soft if record.routing == "soft" else record.shares_top1
    rows = []
    for layer, density in enumerate(record.layer_density):
        masses = [_NONE] * 3
        if record.discarded_mass:
            masses = [_mass(record.discarded_mass[layer][key]) for key in ("mean", "p95", "worst")]
        shares = (share for role in ("query", "key") if chosen for share in chosen[role][layer])
        rows.append(
            [str(layer), _share(density), *masses, *(f"{100 * share:.1f}" for share in shares)]
        )
    return _table(f"layers at length {record.length}, {record.routing}", head, rows)


def bucket_table(records: Sequence[EvaluationRecord]) -> TerminalTable:
    """Perplexity by position in the window, at one length."""
    head = ["positions", *(record.routing for record in records)]
    rows = []
    for buckets in zip(*(record.buckets for record in records), strict=True):
        first, end = buckets[0][:2]
        values = (f"{math.exp(min(bucket[2], 700.0)):.3f}" for bucket in buckets)
        rows.append([f"{first:.0f}–{end - 1:.0f}", *values])
    return _table(f"perplexity by position at length {records[0].length}", head, rows)


def retrieval_table(records: Sequence[RetrievalRecord]) -> TerminalTable:
    """Accuracy by distance, a reach marked where its group ends."""
    first = records[0]
    title = (
        f"{first.cell.name}, step {first.step}: {first.task}, accuracy % by distance "
        f"(guessing: {100 * first.chance:.1f})"
    )
    bounds = sorted({(row[0], row[1]) for record in records for row in record.by_distance})
    marks = {int(reach): name for name, reach in first.reaches.items()}
    head = ["length", "routing", "density\nρ", "all"]
    for least, end in bounds:
        last = int(end) - 1
        name = str(last) if least == last else f"{least:.0f}–{last}"
        head.append(f"{name}\n{marks.get(last, '')}")
    rows = []
    for record in records:
        found = {(row[0], row[1]): f"{100 * row[2]:.1f}" for row in record.by_distance}
        cells = (found.get(key, _NONE) for key in bounds)
        density = _NONE if record.density is None else _share(record.density)
        accuracy = f"{100 * record.accuracy:.1f}"
        rows.append([str(record.length), record.routing, density, accuracy, *cells])
    return _table(title, head, rows, sections=True)


def _table(
    title: str, head: Sequence[str], rows: Sequence[Sequence[str]], *, sections: bool = False
) -> TerminalTable:
    """`sections`: with a line where the first column changes."""
    return TerminalTable(
        title=title,
        heading=head,
        rows=rows,
        num_keys=2 if "routing" in head else 1,
        left_aligned=("routing",),
        has_sections=sections,
    )


def _percent(perplexity: float, base: EvaluationRecord | None) -> str:
    return _NONE if base is None else f"{100 * (perplexity / base.perplexity - 1):+.2f}"


def _share(value: float | None) -> str:
    return _NONE if value is None else f"{value:.4f}"


def _masses(record: EvaluationRecord) -> list[str]:
    """Over the layers: the mean, the layer with the highest 95th percentile, the worst row."""
    layers = record.discarded_mass
    if not layers:
        return [_NONE] * 3
    mean = sum(layer["mean"] for layer in layers) / len(layers)
    return [_mass(mean), *(_mass(max(layer[key] for layer in layers)) for key in ("p95", "worst"))]


def _mass(value: float) -> str:
    return f"{value:.4f}" if value >= 1e-3 or value == 0 else f"{value:.1e}"
