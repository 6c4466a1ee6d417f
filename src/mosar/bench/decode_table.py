"""The terminal's view of `mosar bench decode`: tables, and a line about how each was made."""

from __future__ import annotations

from rich.table import Table
from rich.text import Text

from mosar.bench.cases import Shape
from mosar.bench.decode import SHAPES
from mosar.bench.targets import Verdict
from mosar.records import DecodeBenchmark, ModelDecodeBenchmark

_MIB = 2**20
_NONE = "–"
# What a step is meant to reach, by length: (times faster than SDPA, share of the dense bytes).
_TARGETS = {2048: (1.0, None), 16384: (5.0, 0.35)}
# What a whole model of these sizes is meant to reach against transformers, by length.
_MODEL_TARGETS = {("smollm2", 16384): (2.0, 0.35)}


def decode_table(records: list[DecodeBenchmark]) -> Table:
    """A row a shape and length; a line between shapes."""
    title = "one decode step: append a token, attend with its query"
    table = Table(title=title, title_justify="left", title_style="bold", header_style="")
    table.add_column("shape", no_wrap=True)
    for name in (
        "n",
        "keys\nread",
        "SDPA\nµs",
        "ours\nµs",
        "speed-up\n× SDPA",
        "GB/s\nours / SDPA",
        "cache MiB\nours / dense",
        "cache\n× dense",
    ):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("target", no_wrap=True)
    for index, record in enumerate(records):
        ends = index + 1 < len(records) and records[index + 1].shape != record.shape
        table.add_row(*_cells(record), end_section=ends)
    return table


def verdicts(record: DecodeBenchmark) -> list[Verdict]:
    """The targets that apply to a row and have a figure; none for a wrong result."""
    shape = Shape(record.heads, record.kv_heads, record.head_dim)
    if shape not in SHAPES or record.length not in _TARGETS or not record.correct:
        return []
    speedup, memory = _TARGETS[record.length]
    found = []
    if record.speedup is not None:
        found.append(Verdict(f"≥ {speedup:g}×", record.speedup >= speedup))
    if memory is not None:
        found.append(Verdict(f"cache ≤ {memory:g}", record.memory_ratio <= memory))
    return found


def decode_footer(records: list[DecodeBenchmark]) -> str:
    """Machine, and how the figures were taken."""
    machine, first = records[0].environment, records[0]
    rounds = [len(m.samples_ms) for r in records for m in r.measurements.values() if m.samples_ms]
    counted = " to ".join(map(str, sorted({min(rounds), max(rounds)}))) if rounds else "no"
    forms = sorted({record.dense_form for record in records} - {"none"})
    return (
        f"{machine['cpu']}, {machine['cpu_capability']}, {machine['threads']} threads, float32, "
        f"batch 1; torch {machine['torch']}. Times: medians of {counted} interleaved passes of "
        f"{first.steps} steps that end at n tokens. SDPA reads a dense cache made before, in its "
        f"quickest form ({', '.join(forms) or 'none'}). "
        f"Labels: {first.labels}, seed {first.seed}. GB/s count the keys and values read."
    )


def _cells(record: DecodeBenchmark) -> list[str | Text]:
    head = [record.shape, str(record.length), f"{record.keys_read:.0f}"]
    if not record.correct:
        return [*head, *[_NONE] * 6, Text("WRONG: out", style="bold red")]
    times = [record.median_ms(name) for name in ("sdpa", "ours")]
    rates = [record.gigabytes_per_second(name) for name in ("ours", "sdpa")]
    return [
        *head,
        *(_NONE if t is None else f"{1e3 * t:.0f}" for t in times),
        _NONE if record.speedup is None else f"{record.speedup:.2f}",
        " / ".join(_NONE if rate is None else f"{rate:.1f}" for rate in rates),
        f"{record.allocated_bytes / _MIB:.2f} / {record.dense_bytes / _MIB:.2f}",
        f"{record.memory_ratio:.3f}",
        _judged(verdicts(record)),
    ]


def model_table(records: list[ModelDecodeBenchmark]) -> Table:
    """A row a length."""
    title = "whole models, one token after another"
    table = Table(title=title, title_justify="left", title_style="bold", header_style="")
    table.add_column("sizes of", no_wrap=True)
    for name in (
        "n",
        "tokens/s\ntransformers",
        "tokens/s\nours, dense",
        "tokens/s\nours",
        "speed-up ×\ntransformers",
        "speed-up ×\ndense",
        "cache MiB\nours / transformers",
        "cache ×\ntransformers",
    ):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("target", no_wrap=True)
    for record in records:
        table.add_row(*_model_cells(record))
    return table


def model_verdicts(record: ModelDecodeBenchmark) -> list[Verdict]:
    """The targets that apply to a row and have a figure; none for a wrong result."""
    target = _MODEL_TARGETS.get((record.model, record.length))
    speedup, memory = (f("transformers") for f in (record.speedup, record.memory_ratio))
    if target is None or speedup is None or memory is None:
        return []
    return [
        Verdict(f"≥ {target[0]:g}×", speedup >= target[0]),
        Verdict(f"cache ≤ {target[1]:g}", memory <= target[1]),
    ]


def model_footer(records: list[ModelDecodeBenchmark]) -> str:
    """Machine, and how the figures were taken."""
    machine, first = records[0].environment, records[0]
    reasons = sorted(
        f"{name}: {m.unavailable}. "
        for name, m in first.measurements.items()
        if m.unavailable is not None
    )
    return (
        f"{machine['cpu']}, {machine['cpu_capability']}, {machine['threads']} threads, float32, "
        f"batch 1, random weights; torch {machine['torch']}. Medians of interleaved passes of "
        f"{first.steps} tokens that end at n. transformers: Llama with DynamicCache and SDPA; "
        "ours, dense: our decoder, rope, with a dense cache; ours: mosar, sparse. "
        f"{''.join(reasons)}Labels: {first.labels}, seed {first.seed}."
    )


def _model_cells(record: ModelDecodeBenchmark) -> list[str | Text]:
    head = [record.model, str(record.length)]
    if not record.correct:
        return [*head, *[_NONE] * 7, Text("WRONG: logits", style="bold red")]
    others = ("transformers", "dense")
    rates = [record.tokens_per_second(name) for name in (*others, "ours")]
    memory = record.memory_ratio("transformers")
    sizes = [record.cache_bytes.get(name) for name in ("ours", "transformers")]
    return [
        *head,
        *(_NONE if rate is None else f"{rate:.1f}" for rate in rates),
        *(_NONE if x is None else f"{x:.2f}" for x in map(record.speedup, others)),
        " / ".join(_NONE if size is None else f"{size / _MIB:.1f}" for size in sizes),
        _NONE if memory is None else f"{memory:.3f}",
        _judged(model_verdicts(record)),
    ]


def _judged(found: list[Verdict]) -> Text:
    return Text(", ").join(
        Text(f"{target} {'✓' if met else '✗'}", style="green" if met else "yellow")
        for target, met in found
    ) or Text(_NONE)
