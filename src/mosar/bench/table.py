"""The terminal's view of benchmark records: one table a mode, and a line about how it was made."""

from __future__ import annotations

from typing import Any

from rich.table import Table
from rich.text import Text

from mosar.bench.targets import verdicts
from mosar.records import AttentionBenchmark

_TIMES = {
    "sdpa": "SDPA\nms",
    "flash": "flash\nms",
    "reference": "reference\nms",
    "flex": "flex\nms",
    "flex-sorted": "flex\nsorted ms",
    "ours": "ours\nms",
}
_RATIOS = (
    "speed-up\n× SDPA",
    "speed-up\n× ρ",
    "plan\n%",
    "memory MiB\nours / SDPA",
    "GFLOP/s\n(% of peak)",
)
_DESCRIPTIONS = {
    "sparse": "forward, the pairs of the support only",
    "sparse-train": "forward + backward, the pairs of the support only",
    "soft-train": "forward + backward of soft routing, all pairs",
    "distance-train": "forward + backward with a soft-cap, all pairs",
}
_MIB = 2**20
_NONE = "–"


def attention_table(records: list[AttentionBenchmark], peak: float) -> Table:
    """The rows of one mode against the machine's peak; a line between shapes."""
    title = f"{records[0].mode}: {_DESCRIPTIONS[records[0].mode]}"
    table = Table(title=title, title_justify="left", title_style="bold", header_style="")
    competitors = _shown_competitors(records)
    table.add_column("shape", no_wrap=True)
    for name in ("n", "ρ", *(_TIMES[name] for name in competitors), *_RATIOS):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("target", no_wrap=True)
    for index, record in enumerate(records):
        ends = index + 1 < len(records) and records[index + 1].shape != record.shape
        table.add_row(*_cells(record, competitors, peak), end_section=ends)
    return table


def _shown_competitors(records: list[AttentionBenchmark]) -> list[str]:
    """Who was asked for; in training only who has a time, FlexAttention having no backward."""
    shown = {name for r in records for name, m in r.measurements.items() if m.samples_ms}
    if not records[0].trains:
        shown |= {name for record in records for name in record.measurements}
    return [name for name in _TIMES if name in shown | {"sdpa", "ours"}]


def attention_footer(records: list[AttentionBenchmark]) -> str:
    """Machine, peak, and how the figures were taken."""
    first = records[0]
    machine = first.environment
    rounds = [len(m.samples_ms) for r in records for m in r.measurements.values() if m.samples_ms]
    counted = " to ".join(map(str, sorted({min(rounds), max(rounds)}))) if rounds else "no"
    drawn = next((record.labels for record in records if record.labels != "none"), "none")
    return (
        f"{_machine_name(machine)}; "
        f"torch {machine['torch']}; GEMM peak {best_gemm(records):.0f} GFLOP/s in this run. "
        f"Times and ratios: medians of {counted} interleaved rounds. "
        f"Labels: {drawn}, seed {first.seed}. "
        f"Memory: peak of one call{'' if 'device' in machine else ' in a fresh process'} above its "
        "inputs. "
        "GFLOP/s count exact pairs."
    )


def _machine_name(machine: dict[str, Any]) -> str:
    if "device" in machine:
        triton = machine["triton"]
        kernels = "no Triton: ours on torch operators" if triton is None else f"Triton {triton}"
        return f"{machine['device']}, {machine['dtype']}; {kernels}"
    return f"{machine['cpu']}, {machine['cpu_capability']}, {machine['threads']} threads, float32"


def _cells(record: AttentionBenchmark, competitors: list[str], peak: float) -> list[str | Text]:
    head = [record.shape, str(record.length), f"{record.density:.3f}"]
    if not record.correct:
        failed = [name for name, check in record.checks.items() if not check.passed]
        wrong = Text(f"WRONG: {', '.join(failed)}", style="bold red")
        return [*head, *[_NONE] * (len(competitors) + len(_RATIOS)), wrong]
    share = None if record.gflops is None else 100 * record.gflops / peak
    return [
        *head,
        *(_number(record.median_ms(name)) for name in competitors),
        _number(record.speedup, 2),
        _number(record.speedup_times_density, 2),
        _number(None if record.plan_share is None else 100 * record.plan_share, 1),
        _memory(record),
        _NONE if record.gflops is None else f"{record.gflops:.0f} ({share:.0f})",
        _judgement(record),
    ]


def best_gemm(records: list[AttentionBenchmark]) -> float:
    """The best matrix product of the run, which every row is shown against."""
    return max(record.gemm_gflops for record in records)


def _number(value: float | None, digits: int | None = None) -> str:
    """Three significant digits, or a fixed number of decimals."""
    if value is None:
        return _NONE
    if digits is None:
        digits = 0 if value >= 99.95 else 1 if value >= 9.995 else 2
    return f"{value:.{digits}f}"


def _memory(record: AttentionBenchmark) -> str:
    peaks = [record.peak_bytes(name) for name in ("ours", "sdpa")]
    if peaks == [None, None]:
        return _NONE
    return " / ".join(_NONE if peak is None else f"{peak / _MIB:.1f}" for peak in peaks)


def _judgement(record: AttentionBenchmark) -> Text:
    text = Text(", ").join(
        Text(f"{target} {'✓' if met else '✗'}", style="green" if met else "yellow")
        for target, met in verdicts(record)
    )
    return text or Text(_NONE)
