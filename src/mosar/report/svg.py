"""Charts as SVG inside the page: colours are CSS variables, so that they follow the theme.

A series carries its values (`data-v`) and places (`data-px`); page.js redraws it on a new scale
when the legend hides its neighbours.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

from mosar.report.charts import (
    Bars,
    Chart,
    Point,
    Series,
    place,
    tick_label,
    ticks,
    x_domain,
    y_domain,
)
from mosar.report.formats import MISSING, percent
from mosar.report.palette import Look


class Box(NamedTuple):
    """The plot inside the picture."""

    left: float
    top: float
    width: float
    height: float


WIDTH, HEIGHT = 520, 320
BOX = Box(70, 16, 438, 252)

# Around (0, 0); a disc of radius 4 has about the same weight.
MARKER_PATHS = {
    "circle": "M-3.6 0a3.6 3.6 0 1 0 7.2 0a3.6 3.6 0 1 0-7.2 0z",
    "square": "M-3.2-3.2h6.4v6.4h-6.4z",
    "diamond": "M0-4.6L4.6 0L0 4.6L-4.6 0z",
    "up": "M0-4.4L4.2 3.2h-8.4z",
    "down": "M0 4.4L4.2-3.2h-8.4z",
    "cross": "M-3.4-3.4L3.4 3.4M-3.4 3.4L3.4-3.4",
    "plus": "M-4.2 0h8.4M0-4.2v8.4",
    "star": "M0-5l1.5 3.2 3.4.4-2.5 2.4.7 3.5L0 2.8l-3.1 1.7.7-3.5-2.5-2.4 3.4-.4z",
}


def colour(look: Look) -> str:
    """Both shades as custom properties; the style sheet takes the one of the theme."""
    return f"--l:{look.light};--d:{look.dark}"


def marker(look: Look, x: float, y: float, extra: str = "") -> str:
    kind = "open" if look.marker in ("cross", "plus") else "full"
    return (
        f'<path class="dot {kind}" d="{MARKER_PATHS[look.marker]}" '
        f'transform="translate({x:.1f} {y:.1f})"{extra}/>'
    )


def sample(look: Look) -> str:
    """The line of a legend."""
    dash = f' stroke-dasharray="{look.dash}"' if look.dash else ""
    return (
        '<svg class="sample" viewBox="0 0 30 12" width="30" height="12" aria-hidden="true">'
        f'<path class="line" d="M1 6H29"{dash}/>{marker(look, 15, 6)}</svg>'
    )


def chart_svg(chart: Chart, box: Box = BOX) -> str:
    """The picture of a chart."""
    low, high = y_domain(chart)
    x_low, x_high = x_domain(chart)
    inset = 0.03 * box.width

    def to_x(value: float) -> float:
        return (
            box.left
            + inset
            + place(value, x_low, x_high, log=chart.x_log) * (box.width - 2 * inset)
        )

    def to_y(value: float) -> float:
        return box.top + (1 - place(value, low, high, log=chart.y_log)) * box.height

    parts = [
        _open(chart, box, low, high, to_x),
        _vertical_axis(chart, box, low, high, to_y),
        _horizontal_axis(chart, box, to_x),
        *(_mark(mark.label, to_x(mark.x), box) for mark in chart.marks),
        f'<clipPath id="clip-{chart.name}"><rect x="{box.left - 6:g}" y="{box.top - 6:g}" '
        f'width="{box.width + 12:g}" height="{box.height + 12:g}"/></clipPath>',
        f'<g clip-path="url(#clip-{chart.name})">',
        *(_series(series, chart, to_x, to_y) for series in chart.series if series.points),
        "</g>",
        f'<line class="cursor" y1="{box.top}" y2="{box.top + box.height}" visibility="hidden"/>',
        "</svg>",
    ]
    return "\n".join(parts)


def describe(chart: Chart) -> str:
    """What a reader who cannot see it is told."""
    said = []
    for series in chart.series:
        if series.points:
            first, last = series.points[0], series.points[-1]
            name = f"{series.label}{f' ({series.note})' if series.note else ''}"
            said.append(f"{name}: {first.text} to {last.text}")
    return f"{chart.title}. {chart.y_label} against {chart.x_label}. " + "; ".join(said) + "."


def _open(chart: Chart, box: Box, low: float, high: float, to_x) -> str:
    labels = dict(chart.x_ticks)
    places = sorted({p.x for s in chart.series for p in s.points})
    stops = [[round(to_x(x), 1), labels.get(x) or f"{x:,.6g}"] for x in places]
    attributes = {
        "viewBox": f"0 0 {WIDTH} {HEIGHT}",
        "role": "img",
        "aria-label": describe(chart),
        "data-box": " ".join(f"{v:g}" for v in box),
        "data-scale": "log" if chart.y_log else "linear",
        "data-stops": json.dumps(stops, ensure_ascii=False),
        "data-xlabel": chart.x_label,
        "data-unit": chart.unit,
    }
    if chart.y_zero:
        attributes["data-zero"] = "1"
    if chart.y_domain is not None:
        attributes["data-domain"] = f"{low:g} {high:g}"
    if chart.cap is not None:
        attributes["data-cap"] = f"{chart.cap:.6g}"
    if chart.line_at is not None:
        attributes["data-line"] = f"{chart.line_at:g}"
    return "<svg " + " ".join(f'{k}="{escape(v)}"' for k, v in attributes.items()) + ">"


def _vertical_axis(chart: Chart, box: Box, low: float, high: float, to_y) -> str:
    values = ticks(low, high, log=chart.y_log)
    right = box.left + box.width
    parts = ['<g class="yaxis">']
    for value in values:
        y = to_y(value)
        parts.append(
            f'<line x1="{box.left:g}" x2="{right:g}" y1="{y:.1f}" y2="{y:.1f}"/>'
            f'<text x="{box.left - 7:g}" y="{y + 4:.1f}">'
            f"{tick_label(value, values, chart.unit)}</text>"
        )
    parts.append("</g>")
    if chart.line_at is not None and low <= chart.line_at <= high:
        y = to_y(chart.line_at)
        parts.append(
            f'<line class="level" x1="{box.left:g}" x2="{right:g}" y1="{y:.1f}" y2="{y:.1f}"/>'
        )
    middle = box.top + box.height / 2
    parts.append(
        f'<text class="name turned" transform="translate(13 {middle:g}) rotate(-90)">'
        f"{escape(chart.y_label)}</text>"
    )
    return "".join(parts)


def _horizontal_axis(chart: Chart, box: Box, to_x) -> str:
    shown = list(chart.x_ticks)
    if not shown:
        low, high = x_domain(chart)
        values = ticks(low, high, log=chart.x_log, wanted=6)
        shown = [(value, tick_label(value, values, "")) for value in values]
    bottom = box.top + box.height
    parts = ['<g class="xaxis">']
    end = -1e9
    for value, label in shown:
        x = to_x(value)
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{bottom:g}" y2="{bottom + 5:g}"/>')
        # On a phone a character is 9 units wide.
        half = 4.6 * len(label)
        if x - half > end:
            parts.append(f'<text x="{x:.1f}" y="{bottom + 20:g}">{escape(label)}</text>')
            end = x + half + 4
    parts.append(
        f'<text class="name" x="{box.left + box.width / 2:g}" y="{HEIGHT - 8}">'
        f"{escape(chart.x_label)}</text></g>"
    )
    return "".join(parts)


def _mark(label: str, x: float, box: Box) -> str:
    return (
        f'<g class="mark"><line x1="{x:.1f}" x2="{x:.1f}" y1="{box.top:g}" '
        f'y2="{box.top + box.height:g}"/>'
        f'<text x="{x:.1f}" y="{box.top - 4:g}">{escape(label)}</text></g>'
    )


def _series(series: Series, chart: Chart, to_x, to_y) -> str:
    points = [point for point in series.points if not chart.y_log or point.y > 0]
    xs, ys = [to_x(p.x) for p in points], [to_y(p.y) for p in points]
    attributes = {
        "class": f"series{' noted' if series.note else ''}",
        "data-key": series.key,
        "data-note": series.note,
        "data-label": series.label + (f" · {series.note}" if series.note else ""),
        "data-px": _joined(xs, 1),
        "data-v": " ".join(f"{p.y:.6g}" for p in points),
        "data-t": "|".join(p.text for p in points),
        "style": colour(series.look),
    }
    band = ""
    if any(p.low is not None for p in points):
        lows, highs = [_low(p) for p in points], [_high(p) for p in points]
        attributes["data-lo"] = " ".join(f"{v:.6g}" for v in lows)
        attributes["data-hi"] = " ".join(f"{v:.6g}" for v in highs)
        edge = [*zip(xs, map(to_y, highs), strict=True)]
        edge += reversed([*zip(xs, map(to_y, lows), strict=True)])
        band = f'<path class="band" d="{_path(edge)}Z"/>'
    dash = series.look.dash if series.dash is None else series.dash
    line = f' stroke-dasharray="{dash}"' if dash else ""
    few = len(points) <= 24
    dots = [marker(series.look, x, y) for x, y in zip(xs, ys, strict=True)] if few else []
    return (
        "<g "
        + " ".join(f'{k}="{escape(v)}"' for k, v in attributes.items() if v)
        + f'>{band}<path class="line" d="{_path(zip(xs, ys, strict=True))}"{line}/>'
        + "".join(dots)
        + "</g>"
    )


def _low(point: Point) -> float:
    return point.y if point.low is None else point.low


def _high(point: Point) -> float:
    return point.y if point.high is None else point.high


def _path(points) -> str:
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)


def _joined(values: Sequence[float], decimals: int) -> str:
    return " ".join(f"{value:.{decimals}f}" for value in values)


def bars_svg(bars: Bars) -> str:
    """Panels of stacked bars side by side, a row of them under each title."""
    count = max(len(panel) for _, panel in bars.panels)
    gap, top, height, left = 34.0, 30.0, 216.0, 44.0
    width = (WIDTH - left - 8 - gap * (len(bars.panels) - 1)) / len(bars.panels)
    said = [
        f"{title}: " + ", ".join(_share_text(look, panel, i) for i, look in enumerate(bars.looks))
        for title, panel in bars.panels
        if panel
    ]
    label = f"{bars.title}. Mean shares over layers. {'; '.join(said)}."
    parts = [
        f'<svg viewBox="0 0 {WIDTH} 296" role="img" aria-label="{escape(label)}" class="bars">'
    ]
    for value in (0, 0.5, 1):
        y = top + (1 - value) * height
        parts.append(
            f'<g class="yaxis"><line x1="{left:g}" x2="{WIDTH - 8}" y1="{y:g}" y2="{y:g}"/>'
            f'<text x="{left - 7:g}" y="{y + 4:g}">{value * 100:g}%</text></g>'
        )
    for index, (title, panel) in enumerate(bars.panels):
        start = left + index * (width + gap)
        parts.append(f'<text class="panel" x="{start:.1f}" y="16">{escape(title)}</text>')
        slot = width / max(count, 1)
        every = -(-count // 9)
        for layer, shares in enumerate(panel):
            x, base = start + layer * slot + slot * 0.09, top + height
            lines = [f"layer {layer + 1}"]
            lines += [
                f"{look.label}: {percent(s * 100, signed=False)}"
                for look, s in zip(bars.looks, shares, strict=True)
            ]
            parts.append(f'<g class="bar" data-tip="{escape("|".join(lines))}">')
            for look, portion in zip(bars.looks, shares, strict=True):
                tall = portion * height
                base -= tall
                parts.append(
                    f'<rect x="{x:.1f}" y="{base:.1f}" width="{slot * 0.82:.1f}" '
                    f'height="{tall:.1f}" style="{colour(look)}"/>'
                )
            parts.append("</g>")
            if layer % every == 0:
                middle = start + (layer + 0.5) * slot
                parts.append(f'<text class="tick" x="{middle:.1f}" y="264">{layer + 1}</text>')
        parts.append(
            f'<text class="tick name" x="{start + width / 2:.1f}" y="286">{bars.x_label}</text>'
        )
    return "".join([*parts, "</svg>"])


def _share_text(look: Look, panel: Sequence[Sequence[float]], index: int) -> str:
    mean = sum(shares[index] for shares in panel) / len(panel) if panel else None
    text = MISSING if mean is None else percent(mean * 100, signed=False)
    return f"{look.label} {text}"
