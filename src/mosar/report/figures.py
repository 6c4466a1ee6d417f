"""Figures: the gates g_mn(d) of all regime pairs over distance; speed-up over length.

A figure is a plain matplotlib Figure (no pyplot, no global state); `render_figure` turns it into
the bytes of a file, the same bytes whenever the same figure is drawn.
"""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import matplotlib as mpl
import torch
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.legend import Legend

from mosar.core.config import MoSARConfig
from mosar.core.regimes import RegimeKernel, pair_geometry
from mosar.records import AttentionBenchmark

FORMATS = ("png", "svg", "pdf")
INK, MUTED, _FLOOR, GRID = "#1f2430", "#6b7280", "#9ca3af", "#e5e7eb"
# The six pairs of three regimes, SS to GG; dark enough on white, apart in hue and lightness.
_COLOURS = ("#e0457b", "#f2913d", "#c9b200", "#2f9e6e", "#2f86c9", "#5b3fa8")
STYLE: dict[Any, Any] = {
    "axes.edgecolor": MUTED,
    "axes.facecolor": "#ffffff",
    "axes.labelcolor": INK,
    "axes.linewidth": 0.8,
    "figure.facecolor": "#ffffff",
    "font.family": "DejaVu Sans",
    "font.size": 10.5,
    "mathtext.fontset": "dejavusans",
    "svg.hashsalt": "mosar",
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "text.color": INK,
}


def draw_decay_kernels(config: MoSARConfig, max_distance: int | None = None) -> Figure:
    """The gate of every distinct regime pair at the distances 0..max_distance.

    Pairs are unordered: g_mn = g_nm. By default the axis ends an eighth beyond the longest reach.
    """
    if max_distance is None:
        max_distance = math.ceil(float(pair_geometry(config).reach.max()) * 1.125)
    if max_distance < 1:
        raise ValueError(f"max_distance must be >= 1, got {max_distance}")
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(9.6, 3.9), layout="constrained")
        axes = figure.add_subplot()
        _draw_gates(axes, config, max_distance)
        _draw_floor(axes, config, max_distance)
        _mark_reaches(axes, config, max_distance)
        axes.set(xlim=(0, max_distance), ylim=(-0.06, 1.04))
        axes.set_yticks([0, 0.25, 0.5, 0.75, 1], ["0", "", "0.5", "", "1"])
        axes.set_xlabel("distance  $d = i - j$  (ticks at the reaches)")
        axes.set_ylabel("gate  $g_{mn}(d)$")
        axes.grid(axis="y", color=GRID, linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines["left"].set_bounds(0, 1)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(length=3.5)
        legend = axes.legend(
            title="pair   reach",
            prop={"family": "DejaVu Sans Mono", "size": 10},
            loc="center left",
            bbox_to_anchor=(1.01, 0.5),
            frameon=False,
            handlelength=1.6,
            labelspacing=0.6,
            alignment="left",
        )
        legend.get_title().set(color=MUTED, fontsize=10)
        _show_as_text(legend)
    return figure


def render_figure(figure: Figure, file_format: str, dpi: int = 200) -> bytes:
    """The bytes of a figure as one of FORMATS, without a date, so that they can be compared."""
    if file_format not in FORMATS:
        raise ValueError(f"a figure's format must be one of {FORMATS}, got {file_format!r}")
    dates = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}
    buffer = io.BytesIO()
    with mpl.rc_context(STYLE):
        figure.savefig(buffer, format=file_format, dpi=dpi, metadata=dates.get(file_format))
    return buffer.getvalue()


def regime_pairs(config: MoSARConfig) -> list[tuple[int, int]]:
    """Distinct pairs (m <= n): SS, SM, MM, SG, MG, GG for three regimes."""
    return [(m, n) for n in range(config.num_regimes) for m in range(n + 1)]


def pair_name(config: MoSARConfig, m: int, n: int) -> str:
    """ "SM", or "short–medium" where names are words."""
    names = [config.regimes[m].name, config.regimes[n].name]
    return ("" if max(map(len, names)) == 1 else "–").join(names)


def pair_colours(count: int) -> list[str]:
    """One colour a pair, by its place among the pairs and not by its reach."""
    if count <= len(_COLOURS):
        # The ends stay: SS and GG look alike in every figure.
        last = len(_COLOURS) - 1
        return [_COLOURS[round(i * last / max(count - 1, 1))] for i in range(count)]
    spectrum = mpl.colormaps["turbo"]
    return [to_hex(spectrum(0.95 - 0.9 * i / (count - 1))) for i in range(count)]


def _show_as_text(legend: Legend) -> None:
    """A name with dollar signs is no formula."""
    for text in legend.get_texts():
        text.set_parse_math(False)


def _draw_gates(axes: Axes, config: MoSARConfig, max_distance: int) -> None:
    """One line a pair, and a dot where it reaches the floor."""
    # Every distance, or as many as a picture can show.
    distances_D = torch.linspace(0, max_distance, min(max_distance + 1, 20_001)).double().round()
    gate_DRR = RegimeKernel(config)(distances_D, torch.float64)
    reach_RR = pair_geometry(config).reach
    pairs = regime_pairs(config)
    colours, labels = pair_colours(len(pairs)), _legend_labels(config, pairs)
    for (m, n), colour, label in zip(pairs, colours, labels, strict=True):
        reach = float(reach_RR[m, n])
        axes.plot(
            distances_D.numpy(),
            gate_DRR[:, m, n].numpy(),
            color=colour,
            linewidth=2.4,
            solid_capstyle="round",
            label=label,
            gid=f"gate-{pair_name(config, m, n)}",
            # The shorter lies higher: where plateaus coincide, the first to fall is seen.
            zorder=4 - reach / float(reach_RR.max()),
            clip_on=False,
        )
        if reach <= max_distance and (m, n) != pairs[-1]:
            axes.plot(
                reach,
                math.exp(-config.barrier),
                marker="o",
                color=colour,
                markersize=6.5,
                markeredgecolor="white",
                markeredgewidth=1.2,
                zorder=6,
                clip_on=False,
            )


def _draw_floor(axes: Axes, config: MoSARConfig, max_distance: int) -> None:
    """The floor e^-B, which all pairs but GG share, in no pair's colour."""
    floor, shortest = math.exp(-config.barrier), float(pair_geometry(config).reach.min())
    if shortest >= max_distance:
        return
    ends = [shortest, max_distance]
    axes.plot(ends, [floor, floor], color=_FLOOR, linewidth=2.8, zorder=5, clip_on=False)
    axes.annotate(
        f"floor $e^{{-{config.barrier:g}}}$",
        (max_distance, floor),
        xytext=(0, 6),
        textcoords="offset points",
        ha="right",
        color=MUTED,
        fontsize=9.5,
    )


def _legend_labels(config: MoSARConfig, pairs: list[tuple[int, int]]) -> list[str]:
    """Name and reach of each pair in two columns; the legend's font has one width."""
    names = [pair_name(config, m, n) for m, n in pairs]
    reaches = [f"{float(pair_geometry(config).reach[pair]):g}" for pair in pairs]
    wide, long = max(map(len, names)), max(map(len, reaches))
    labels = [
        f"{name:<{wide}}  {reach:>{long}}" for name, reach in zip(names, reaches, strict=True)
    ]
    return [*labels[:-1], f"{labels[-1]}, no decay"]


def _mark_reaches(axes: Axes, config: MoSARConfig, max_distance: int) -> None:
    """A tick at every reach; labels where there is room for them."""
    reaches = sorted({float(reach) for reach in pair_geometry(config).reach.flatten()})
    ticks = [0.0] + [reach for reach in reaches if reach <= max_distance]
    character = 0.0155 * max_distance
    end, labels = -math.inf, []
    for tick in ticks:
        half = character * len(f"{tick:g}") / 2
        fits = tick - half > end
        labels.append(f"{tick:g}" if fits else "")
        end = tick + half + character / 2 if fits else end
    axes.set_xticks(ticks, labels)


def draw_speedup(records: Sequence[AttentionBenchmark]) -> Figure:
    """Speed-up over dense SDPA against length, one panel a mode and one line a shape.

    Beside them what the density alone would give, 1/rho, and where ours starts to be faster. Rows
    that are wrong or were not timed are left out.
    """
    records = [record for record in records if record.speedup is not None]
    if not records:
        raise ValueError("there is no speed-up to draw: no record has one")
    modes = list(dict.fromkeys(record.mode for record in records))
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(6.6 * len(modes), 4.4), layout="constrained")
        for index, mode in enumerate(modes):
            axes = figure.add_subplot(1, len(modes), index + 1)
            _draw_speedup_panel(axes, [record for record in records if record.mode == mode])
    return figure


def break_even(lengths: Sequence[int], speedups: Sequence[float]) -> float | None:
    """The length from which the speed-up stays above 1, on straight lines between measurements in
    logarithms; the first length where it always is, None where it ends below."""
    if speedups[-1] < 1:
        return None
    points = list(zip(map(math.log, lengths), map(math.log, speedups), strict=True))
    crossings = [(a, b) for a, b in pairwise(points) if a[1] < 0 <= b[1]]
    if not crossings:
        return float(lengths[0])
    (x, y), (next_x, next_y) = crossings[-1]
    return math.exp(x - y * (next_x - x) / (next_y - y))


def _draw_speedup_panel(axes: Axes, records: list[AttentionBenchmark]) -> None:
    shapes = list(dict.fromkeys(record.shape for record in records))
    axes.axhline(1, color=_FLOOR, linewidth=1.6, zorder=2, label="dense SDPA")
    ideal = {record.length: 1 / record.density for record in records}
    lengths = sorted(ideal)
    axes.plot(
        lengths,
        [ideal[n] for n in lengths],
        color=INK,
        linewidth=1.4,
        linestyle=(0, (4, 3)),
        gid="ideal",
        label="1/ρ, all that sparsity promises",
        zorder=3,
    )
    for shape, colour in zip(shapes, pair_colours(len(shapes)), strict=True):
        rows = sorted((r for r in records if r.shape == shape), key=lambda record: record.length)
        _draw_speedup_line(axes, rows, colour)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xticks(lengths, [str(n) for n in lengths])
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}×")
    axes.set_xlabel("length  $n$")
    axes.set_ylabel("speed-up over dense SDPA")
    labels = "" if records[0].labels == "none" else f", labels: {records[0].labels}"
    axes.set_title(f"{records[0].mode}{labels}", loc="left", fontsize=11, parse_math=False)
    axes.grid(color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    _show_as_text(axes.legend(frameon=False, loc="upper left", fontsize=9.5))


def _draw_speedup_line(axes: Axes, rows: list[AttentionBenchmark], colour: str) -> None:
    """A shape's speed-ups, and a ring at its break-even point."""
    lengths = [row.length for row in rows]
    speedups = [row.speedup or math.nan for row in rows]
    even = break_even(lengths, speedups)
    if even is None:
        remark = "slower at the end"
    elif even == lengths[0]:
        remark = f"faster from {lengths[0]} or less"
    else:
        remark = f"faster from {even:.0f}"
        axes.plot(
            even,
            1,
            marker="o",
            markersize=9,
            markerfacecolor="white",
            markeredgecolor=colour,
            markeredgewidth=2,
            linestyle="none",
            gid=f"break-even-{rows[0].shape}",
            zorder=5,
        )
    axes.plot(
        lengths,
        speedups,
        color=colour,
        linewidth=2.4,
        marker="o",
        markersize=5,
        gid=f"speedup-{rows[0].shape}",
        label=f"{rows[0].shape}: {remark}",
        zorder=4,
    )
