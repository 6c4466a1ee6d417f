"""The terminal's view of `mosar bench train`: a table, and a line about how it was made."""

from __future__ import annotations

from rich.table import Table
from rich.text import Text

from mosar.bench.training_steps import OTHERS, OURS
from mosar.records import TrainingBenchmark

_MIB = 2**20
_NONE = "–"
# What the training step is meant to reach, in ratios of one run: by column, (length, least).
_MOSAR_OVER_ROPE = {512: 0.75, 2048: 0.8}
_MEMORY_LENGTH, _MEMORY_RATIO = 2048, 1.25


def training_table(records: list[TrainingBenchmark]) -> Table:
    """A row a length and soft-cap setting; tokens a second, then ratios."""
    table = Table(title="training step, tokens/s", title_justify="left", title_style="bold")
    table.add_column("n", justify="right")
    table.add_column("soft-caps", no_wrap=True)
    for name in (*OURS, *OTHERS):
        table.add_column(name.replace("-", "\n"), justify="right", no_wrap=True)
    for name in ("rope\n/ gemma2", "rope\n/ nanogpt", "mosar\n/ rope", "memory MiB\nmosar / rope"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("target", no_wrap=True)
    for record in records:
        table.add_row(*_cells(record))
    return table


def verdicts(record: TrainingBenchmark) -> dict[str, bool]:
    """The targets that apply to a row and have a figure, by their text; none for a wrong result."""
    found = {}
    gemma2 = record.fastest_gemma2
    ratios = {
        "rope ≥ gemma2": None if gemma2 is None else record.ratio("rope", gemma2),
        "rope ≥ nanogpt": record.ratio("rope", "nanogpt"),
    }
    found |= {text: ratio >= 1 for text, ratio in ratios.items() if ratio is not None}
    least, ratio = _MOSAR_OVER_ROPE.get(record.length), record.ratio("mosar", "rope")
    if least is not None and ratio is not None:
        found[f"mosar ≥ {least:g} rope"] = ratio >= least
    memory = record.memory_ratio
    if record.correct and record.length == _MEMORY_LENGTH and memory is not None:
        found[f"memory ≤ {_MEMORY_RATIO:g}×"] = memory <= _MEMORY_RATIO
    return found


def training_footer(records: list[TrainingBenchmark]) -> str:
    """Machine, and how the figures were taken."""
    machine, first = records[0].environment, records[0]
    rounds = [len(m.samples_ms) for r in records for m in r.measurements.values() if m.samples_ms]
    counted = " to ".join(map(str, sorted({min(rounds), max(rounds)}))) if rounds else "no"
    gemm = max(record.gemm_gflops for record in records)
    reasons = {
        f"{name}: {measurement.unavailable}"
        for record in records
        for name, measurement in record.measurements.items()
        if measurement.unavailable
    }
    return (
        f"{machine['cpu']}, {machine['cpu_capability']}, {machine['threads']} threads, float32; "
        f"torch {machine['torch']}; GEMM peak {gemm:.0f} GFLOP/s in this run. Preset "
        f"{first.preset}, {first.parameters.get('rope', 0):,} parameters of rope. A step is "
        f"forward, backward, clipping and AdamW; medians of {counted} interleaved rounds. gemma2 "
        "is the faster of transformers' two. Memory: peak of parameters, optimizer and two steps "
        "in a fresh process." + "".join(f"\n{reason}" for reason in sorted(reasons))
    )


def _cells(record: TrainingBenchmark) -> list[str | Text]:
    cells: list[str | Text] = [str(record.length), record.setting]
    if not record.correct:
        failed = [name for name, check in record.checks.items() if not check.passed]
        wrong = Text(f"WRONG: {', '.join(failed)}", style="bold red")
        return [*cells, *[_NONE] * (len(OURS) + len(OTHERS) + 4), wrong]
    for name in (*OURS, *OTHERS):
        rate = record.tokens_per_second(name)
        cells.append(_NONE if rate is None else f"{rate:,.0f}")
    gemma2 = record.fastest_gemma2
    for other, mine in ((gemma2, "rope"), ("nanogpt", "rope"), ("rope", "mosar")):
        ratio = None if other is None else record.ratio(mine, other)
        cells.append(_NONE if ratio is None else f"{ratio:.2f}×")
    peaks = [record.measurements[name].peak_bytes for name in reversed(OURS)]
    cells.append(
        _NONE if None in peaks else " / ".join(f"{(peak or 0) / _MIB:,.0f}" for peak in peaks)
    )
    return [*cells, _verdict_cell(verdicts(record))]


def _verdict_cell(found: dict[str, bool]) -> Text:
    marks = [
        Text(f"{target} {'✓' if met else '✗'}", style="green" if met else "yellow")
        for target, met in found.items()
    ]
    return Text("\n").join(marks) if marks else Text(_NONE)
