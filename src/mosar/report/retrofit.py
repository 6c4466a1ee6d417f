"""The report of retrofitted models: what routing costs and what it saves, as markdown.

A folder of `mosar retrofit`, or one that holds several of them: then their points make a frontier.
Reads adapter.json and the records; equal records give an equal report.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from mosar.errors import DamagedFile
from mosar.files import parse_json, unsealed
from mosar.records import RetrofitEvaluation, RetrofitNeedles, RetrofitSpeed, read_records
from mosar.report.curves import break_even
from mosar.report.density_law import PREDICTED, fit_density_law, law_cells
from mosar.report.markup import markdown

DESCRIPTION, RECORDS = "adapter.json", "evaluations/retrofit.jsonl"
REPORT, FIGURE = "report.md", "frontier.png"
# The speed-up from which routing is worth it.
_WORTH = 1.1
_ORDER = ("dense", "soft", "top1", "sparse", "window")


@dataclass(frozen=True)
class RetrofittedRun:
    """A run folder: what it is and what was found about it, the newest record of each kind."""

    name: str
    description: dict[str, Any]
    records: tuple[RetrofitEvaluation, ...]
    speeds: tuple[RetrofitSpeed, ...]
    needles: tuple[RetrofitNeedles, ...] = ()

    @property
    def target(self) -> float | None:
        """The density it was trained for."""
        return self.description["notes"].get("settings", {}).get("target_density")


@dataclass(frozen=True)
class FrontierPoint:
    """One way to read fewer pairs: how many, and what it costs."""

    name: str
    density: float
    gap: float
    """Perplexity over that of dense attention, minus 1."""


def find_runs(folder: Path) -> list[Path]:
    """`folder` if it is a retrofitted run, else those in it."""
    if (folder / DESCRIPTION).is_file():
        return [folder]
    return sorted(path.parent for path in folder.glob(f"*/{DESCRIPTION}"))


def load_run(folder: Path) -> RetrofittedRun:
    """The run and its records, of its present routers and of the text that was read last."""
    path = folder / DESCRIPTION
    try:
        description, _ = unsealed(parse_json(path.read_bytes()))
    except ValueError as error:
        raise DamagedFile(f"{path}: {error}; copy the adapter again, or train it again") from None
    found = read_records(folder / RECORDS) if (folder / RECORDS).is_file() else []
    evaluations = [r for r in found if isinstance(r, RetrofitEvaluation)]
    text = evaluations[-1].text if evaluations else ""
    adapter = description["weights_sha256"]
    newest: dict[Any, RetrofitEvaluation] = {}
    for record in evaluations:
        if record.text == text and record.adapter in ("", adapter):
            key = record.length, _ORDER.index(record.routing), record.regimes.get("S", 0.0)
            newest[key] = record
    speeds = {r.setting: r for r in found if isinstance(r, RetrofitSpeed) and r.adapter == adapter}
    needles = {
        (r.length, r.task, r.routing): r
        for r in found
        if isinstance(r, RetrofitNeedles) and r.adapter in ("", adapter)
    }
    return RetrofittedRun(
        folder.resolve().name,
        description,
        tuple(newest[key] for key in sorted(newest)),
        tuple(speeds[setting] for setting in sorted(speeds)),
        tuple(needles.values()),
    )


def frontier(
    runs: Sequence[RetrofittedRun], length: int
) -> tuple[list[FrontierPoint], list[FrontierPoint]]:
    """The learned points and those of fixed windows at one length, by density.

    Runs that were evaluated on another text than the first are left out.
    """
    records = [r for run in _of_one_text(runs) for r in run.records if r.length == length]
    dense = next((r for r in records if r.routing == "dense"), None)
    learned: dict[str, FrontierPoint] = {}
    windows: dict[str, FrontierPoint] = {}
    for record in records:
        if dense is None or record.routing not in ("sparse", "window"):
            continue
        gap = math.exp(record.loss - dense.loss) - 1
        if record.routing == "sparse":
            name, into = record.adapter, learned
        else:
            name, into = f"window {record.regimes['S']:g}", windows
        into[name] = FrontierPoint(name, record.density, gap)
    names = {run.description["weights_sha256"]: run.name for run in runs}
    points = [FrontierPoint(names[p.name], p.density, p.gap) for p in learned.values()]
    return tuple(sorted(x, key=lambda p: p.density) for x in (points, [*windows.values()]))  # pyright: ignore


def gap_at(points: Sequence[FrontierPoint], density: float) -> float | None:
    """The gap of fixed windows at a density, on straight lines of the logarithms; None outside."""
    for low, high in pairwise(points):
        if low.density <= density <= high.density and min(low.gap, high.gap) > 0:
            share = math.log(density / low.density) / math.log(high.density / low.density)
            return math.exp((1 - share) * math.log(low.gap) + share * math.log(high.gap))
    return None


def write_retrofit_report(folder: Path) -> Path:
    """Writes report.md and, where there are windows to compare with, the figure; its path."""
    runs = [load_run(path) for path in find_runs(folder)]
    if not any(run.records for run in runs):
        raise ValueError(f"{folder} holds no evaluated retrofit; run mosar evaluate on it first")
    drawn = any(all(frontier(runs, length)) for length in _lengths(runs))
    if drawn:
        from mosar.report.figures import draw_frontier, render_figure

        panels = {n: frontier(runs, n) for n in _lengths(runs)}
        (folder / FIGURE).write_bytes(render_figure(draw_frontier(panels), "png", dpi=130))
    path = folder / REPORT
    path.write_text(retrofit_markdown(runs, figure=drawn), encoding="utf-8")
    return path


def retrofit_markdown(runs: Sequence[RetrofittedRun], *, figure: bool = False) -> str:
    """Tables of perplexity, density and its law, frontier, times, cache; layers of one run."""
    base = runs[0].description["base"]
    parts = [
        f"# {markdown(Path(base['source']).name or base['architecture'])}, retrofitted\n",
        _intro(runs[0].description),
        _perplexity(_of_one_text(runs)),
        _frontier_table(runs, figure),
        _density_law(_of_one_text(runs)),
        _speed(runs),
        *(_needles(run, len(runs) > 1) for run in runs),
    ]
    sparse = [record for record in runs[0].records if record.routing == "sparse"]
    if len(runs) == 1 and sparse:
        longest = max(sparse, key=lambda record: record.length)
        parts.append(_layers(longest, runs[0].description.get("layers")))
    return "\n".join(part for part in parts if part)


def _of_one_text(runs: Sequence[RetrofittedRun]) -> list[RetrofittedRun]:
    read = [run for run in runs if run.records]
    return [run for run in read if run.records[0].text == read[0].records[0].text]


def _lengths(runs: Sequence[RetrofittedRun]) -> list[int]:
    return sorted({record.length for run in _of_one_text(runs) for record in run.records})


def _intro(description: dict[str, Any]) -> str:
    geometry, base = description["geometry"], description["base"]
    regimes = ", ".join(f"{r['name']} {r['reach']:g}" for r in geometry["regimes"])
    said = (
        f"{base['architecture']}, {base['parameters']:,} parameters, frozen. Regimes (reach): "
        f"{regimes}; composition {geometry['composition']}, {geometry['routing_groups']} routing "
        f"groups, {geometry['num_sinks']} sinks. Weights checksum {base['checksum'][:16]}."
    )
    return f"{markdown(said)}\n"


def _perplexity(runs: Sequence[RetrofittedRun]) -> str:
    lines = [
        "## Perplexity\n",
        "| length | routing | windows | perplexity | against dense | density | attention lost |",
        "|---:|---|---:|---:|---:|---:|---:|",
    ]
    shown = set()
    for length in _lengths(runs):
        records = [(run, r) for run in runs for r in run.records if r.length == length]
        records.sort(key=lambda pair: _ORDER.index(pair[1].routing))
        dense = next((r.loss for _, r in records if r.routing == "dense"), None)
        for run, record in records:
            name = _routing_name(run, record, len(runs) > 1)
            if (length, name) not in shown:
                shown.add((length, name))
                lines.append(_perplexity_row(record, markdown(name), dense))
    return "\n".join(lines) + "\n"


def _routing_name(run: RetrofittedRun, record: RetrofitEvaluation, several: bool) -> str:
    if record.routing == "window":
        return f"window {record.regimes['S']:g}"
    return f"{record.routing}, {run.name}" if several and record.adapter else record.routing


def _perplexity_row(record: RetrofitEvaluation, name: str, dense: float | None) -> str:
    gap = ""
    if dense is not None and record.routing != "dense":
        gap = f"{100 * (math.exp(record.loss - dense) - 1):+.2f} %"
    routed = record.routing in ("sparse", "window")
    return (
        f"| {record.length:,} | {name} | {record.windows} | {record.perplexity:.3f} "
        f"| {gap} | {f'{record.density:.3f}' if routed else ''} "
        f"| {f'{100 * record.lost:.1f} %' if routed else ''} |"
    )


def _frontier_table(runs: Sequence[RetrofittedRun], figure: bool) -> str:
    lines = []
    for length in _lengths(runs):
        learned, windows = frontier(runs, length)
        for point in learned:
            same = gap_at(windows, point.density)
            if same is not None:
                name = markdown(point.name)
                lines.append(
                    f"| {length:,} | {name} | {point.density:.3f} | {100 * point.gap:+.2f} % "
                    f"| {100 * same:+.2f} % | {same / point.gap if point.gap > 0 else 0:.1f}× |"
                )
    if not lines and not figure:
        return ""
    head = [
        "## Frontier\n",
        "The gap of learned routing and of a fixed window with the same sinks at the same density, "
        "from the windows that were evaluated.\n",
        "| length | run | density | learned | window | times smaller |",
        "|---:|---|---:|---:|---:|---:|",
    ]
    image = [f"\n![Perplexity gap against density]({FIGURE})"] if figure else []
    return "\n".join((head + lines if lines else head[:1]) + image) + "\n"


def _density_law(runs: Sequence[RetrofittedRun]) -> str:
    lines = []
    for run in runs:
        counted = {r.length: r.density for r in run.records if r.routing == "sparse"}
        law = fit_density_law(counted)
        if law is not None:
            cells = " | ".join(cell.text for cell in law_cells(law))
            span = f"{law.lengths[0]:,} to {law.lengths[-1]:,}"
            lines.append(f"| {markdown(run.name)} | {span} | {cells} |")
    if not lines:
        return ""
    head = [
        "## The density law\n",
        "Fitted to the densities above: a query reads w keys at any length, and a share c of all "
        "pairs. If c is not 0, the cost is quadratic in the end. Error: the largest where it was "
        "fitted. Densities at longer lengths are predicted, not counted.\n",
        "| run | fitted to | w | c | error | "
        + " | ".join(f"{length:,}" for length in PREDICTED)
        + " |",
        "|---|---|" + "---:|" * (3 + len(PREDICTED)),
    ]
    return "\n".join(head + lines) + "\n"


def _speed(runs: Sequence[RetrofittedRun]) -> str:
    if not any(run.speeds for run in runs):
        return ""
    several = len(runs) > 1
    timed = [row for run in runs for row in run.speeds]
    counts = sorted({len(row.prefill["dense"].samples_ms) for row in timed})
    rounds = " or ".join(map(str, counts))
    # Whatever is the same in all rows is not a column.
    varied = len({row.setting[:2] for row in timed}) > 1
    columns = (("run",) if several else ()) + (("prompts", "weights") if varied else ())
    lines = [
        "## Prefill, decoding and cache\n",
        "The whole model with its cache: seconds of a prompt without logits, then milliseconds a "
        f"token. The quickest of {rounds}, dense and sparse in turn; bytes after the prompt.\n",
        f"| length |{''.join(f' {column} |' for column in columns)} prefill dense, s | sparse, s "
        "| speed-up | decode dense, ms | sparse, ms | speed-up | cache dense, MiB | sparse, MiB "
        "| share |",
        "|---:|" + "---|" * len(columns) + "---:|" * 9,
    ]
    for run in runs:
        for row in run.speeds:
            lines.append(_speed_row(row, run.name if several else None, varied))
    found = [line for run in runs for line in _break_even(run, several, varied)]
    return "\n".join([*lines, *([""] if found else []), *found]) + "\n"


def _break_even(run: RetrofittedRun, several: bool, varied: bool) -> list[str]:
    """From which length on routing pays, where at least two lengths were timed."""
    lines = []
    for batch, dtype in dict.fromkeys(row.setting[:2] for row in run.speeds):
        rows = [row for row in run.speeds if row.setting[:2] == (batch, dtype)]
        if len(rows) < 2:
            continue
        lengths = [row.length for row in rows]
        prefill = _pays(lengths, [row.prefill_speedup or 1.0 for row in rows])
        decode = _pays(lengths, [row.decode_speedup or 1.0 for row in rows])
        named = ([run.name] if several else []) + ([f"prompts: {batch}", dtype] if varied else [])
        of = f" ({markdown(', '.join(named))})" if named else ""
        lines.append(f"- At least a tenth faster{of}: prefill {prefill}, decoding {decode}.")
    return lines


def _pays(lengths: Sequence[int], speedups: Sequence[float]) -> str:
    start = break_even(lengths, [speedup / _WORTH for speedup in speedups])
    if start is None:
        return "at none of these lengths"
    if start == lengths[0]:
        return "at all of these lengths"
    return f"from about {float(f'{start:.2g}'):,.0f} tokens"


def _speed_row(row: RetrofitSpeed, name: str | None, varied: bool) -> str:
    prefill, decode = (
        [times[routing].min_ms or math.nan for routing in ("dense", "sparse")]
        for times in (row.prefill, row.decode)
    )
    dense, sparse = (row.cache_bytes[routing] / 2**20 for routing in ("dense", "sparse"))
    cells = [
        f"{row.length:,}",
        *([] if name is None else [markdown(name)]),
        *([str(row.setting[0]), row.setting[1]] if varied else []),
        *(f"{ms / 1e3:.2f}" for ms in prefill),
        f"{prefill[0] / prefill[1]:.2f}×",
        *(f"{ms:.1f}" for ms in decode),
        f"{decode[0] / decode[1]:.2f}×",
        *(f"{dense:.1f}", f"{sparse:.1f}", f"{sparse / dense:.2f}"),
    ]
    return f"| {' | '.join(cells)} |"


def _needles(run: RetrofittedRun, several: bool) -> str:
    """Tasks that the dense model does with a score of at least a half count."""
    if not run.needles:
        return ""
    by_task: dict[tuple[int, str], dict[str, RetrofitNeedles]] = {}
    for record in run.needles:
        by_task.setdefault((record.length, record.task), {})[record.routing] = record
    lines = [
        f"## Needles{f', {markdown(run.name)}' if several else ''}\n",
        "The share of the expected words in the answers; questions in brackets. A task counts "
        "where the dense model has at least half of them.\n",
        "| length | task | dense | sparse | window | density | window's reach |",
        "|---:|---|---:|---:|---:|---:|---:|",
    ]
    kept: dict[int, list[tuple[float, float]]] = {}
    for (length, task), found in sorted(by_task.items(), key=lambda item: item[0][0]):
        dense, sparse, window = (found.get(name) for name in ("dense", "sparse", "window"))
        cells = [f"{100 * r.score:.0f} %" if r else "" for r in (dense, sparse, window)]
        if dense is not None:
            cells[0] += f" ({len(dense.scores)})"
            if not dense.is_solved:
                cells[0] += ", does not count"
            elif sparse is not None:
                kept.setdefault(length, []).append((sparse.score, dense.score))
        density = f"{sparse.density:.3f}" if sparse else ""
        reach = f"{window.reach:g}" if window and window.reach is not None else ""
        lines.append(f"| {length:,} | {task} | {' | '.join(cells)} | {density} | {reach} |")
    lines.append("")
    for length, scores in kept.items():
        tasks = "1 task counts" if len(scores) == 1 else f"{len(scores)} tasks count"
        share = sum(ours for ours, _ in scores) / sum(theirs for _, theirs in scores)
        lines.append(
            f"- {length:,} tokens: of what the dense model answers, sparse routing keeps "
            f"{100 * share:.0f} % ({tasks})."
        )
    for length in sorted({length for length, _ in by_task} - set(kept)):
        lines.append(f"- {length:,} tokens: no task counts.")
    return "\n".join(lines) + "\n"


def _layers(record: RetrofitEvaluation, indices: Sequence[int] | None) -> str:
    """indices: of the layers with routers; None: all of them."""
    groups = len(record.layer_density[0])
    indices = range(len(record.layer_density)) if indices is None else indices
    lines = [
        f"## Layers, sparse routing at {record.length:,} tokens\n",
        "Density by routing group, then the attention lost, mean over groups.\n",
        "| layer | " + " | ".join(f"group {g}" for g in range(groups)) + " | mean | lost |",
        "|---:" * (groups + 3) + "|",
    ]
    for index, density, lost in zip(indices, record.layer_density, record.layer_lost, strict=True):
        cells = " | ".join(f"{value:.3f}" for value in density)
        mean, missed = statistics.fmean(density), 100 * statistics.fmean(lost)
        lines.append(f"| {index} | {cells} | {mean:.3f} | {missed:.1f} % |")
    return "\n".join(lines) + "\n"
