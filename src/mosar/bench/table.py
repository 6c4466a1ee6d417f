"""Benchmark records in a terminal: a table, and a line about the machine."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from rich.text import Text

from mosar.records import Benchmark
from mosar.terminal import TerminalTable

MIB = 2**-20
_NONE = "–"


class Column(NamedTuple):
    """A figure of each record."""

    name: str
    value: Callable[[Any], object]
    """A number, a text, None if there is no figure, or a tuple of these."""
    spec: str = ""
    """The format of the value."""
    scale: float = 1
    """Numbers are multiplied by it."""
    is_head: bool = False
    """Whether it identifies the row; then it is shown for a wrong result too."""
    is_optional: bool = False
    """Whether it is left out if no row has a figure."""

    def cell(self, record: Benchmark) -> str:
        found = self.value(record) if record.correct or self.is_head else None
        values = found if isinstance(found, tuple) else (found,)
        if all(value is None for value in values):
            return _NONE
        return " / ".join(map(self._format, values))

    def _format(self, value: object) -> str:
        if value is None:
            return _NONE
        return format(value * self.scale if isinstance(value, (int, float)) else value, self.spec)


class Verdict(NamedTuple):
    """A target and whether it is met."""

    target: str
    met: bool


def verdict(
    target: str, figure: float | None, *, least: float = -math.inf, most: float = math.inf
) -> list[Verdict]:
    """The verdict on a figure; none without a figure."""
    return [] if figure is None else [Verdict(target, least <= figure <= most)]


def make_table(
    title: str,
    columns: Sequence[Column],
    records: Sequence[Benchmark],
    verdicts: Callable[[Any], Sequence[Verdict]],
) -> TerminalTable:
    """One row per record, its targets at the end; a line where the first column changes."""
    texts = {column: [column.cell(record) for record in records] for column in columns}
    shown = [c for c in columns if not (c.is_optional and set(texts[c]) == {_NONE})]
    cells = zip(*(texts[column] for column in shown), strict=True)
    return TerminalTable(
        title=title,
        heading=[*(column.name for column in shown), "target"],
        rows=[
            [*row, _last_cell(record, verdicts(record))]
            for record, row in zip(records, cells, strict=True)
        ],
        num_keys=sum(column.is_head for column in shown),
        left_aligned=(shown[0].name, "target"),
        has_sections=True,
    )


def _last_cell(record: Benchmark, verdicts: Sequence[Verdict]) -> Text:
    if not record.correct:
        failed = [name for name, check in record.checks.items() if not check.passed]
        return Text(f"WRONG: {', '.join(failed)}", style="bold red")
    return Text(", " if len(verdicts) < 3 else "\n").join(
        Text(f"{target} {'✓' if met else '✗'}", style="green" if met else "yellow")
        for target, met in verdicts
    ) or Text(_NONE)


def footer(records: Sequence[Benchmark], notes: str) -> str:
    """The machine, how the figures were measured, and why some are missing."""
    machine = records[0].environment
    if "device" in machine:
        triton = machine["triton"]
        kernels = "no Triton: ours on torch operators" if triton is None else f"Triton {triton}"
        where = f"{machine['device']}, {machine['dtype']}; {kernels}"
    else:
        threads = f"{machine['cpu_capability']}, {machine['threads']} threads"
        where = f"{machine['cpu']}, {threads}, float32"
    measured = [(name, m) for record in records for name, m in record.measurements.items()]
    rounds = [len(m.samples_ms) for _, m in measured if m.samples_ms]
    counted = " to ".join(map(str, sorted({min(rounds), max(rounds)}))) if rounds else "no"
    reasons = sorted({f"\n{name}: {m.unavailable}" for name, m in measured if m.unavailable})
    return (
        f"{where}; torch {machine['torch']}. Times and ratios: medians of {counted} interleaved "
        f"rounds. {notes}{''.join(reasons)}"
    )
