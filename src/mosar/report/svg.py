"""Charts as SVG inside the page: colours are CSS variables, so that they follow the theme.

A series carries its values (`data-v`) and places (`data-px`); page.js redraws it on a new scale
when the legend hides its neighbours.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
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
from mosar.report.elements import Markup, tag
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


def marker(look: Look, x: float, y: float) -> Markup:
    kind = "open" if look.marker in ("cross", "plus") else "full"
    where = f"translate({x:.1f} {y:.1f})"
    return tag("path", class_=f"dot {kind}", d=MARKER_PATHS[look.marker], transform=where)


def sample(look: Look) -> Markup:
    """The line of a legend."""
    return line_sample(look.dash, marker(look, 15, 6))


def line_sample(dash: str, *more: Markup) -> Markup:
    line = tag("path", class_="line", d="M1 6H29", stroke_dasharray=dash)
    box = {"viewBox": "0 0 30 12", "width": 30, "height": 12}
    return tag("svg", line, *more, class_="sample", **box, aria_hidden="true")


def chart_svg(chart: Chart, box: Box = BOX) -> Markup:
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

    clip = f"clip-{chart.name}"
    frame = tag("rect", x=box.left - 6, y=box.top - 6, width=box.width + 12, height=box.height + 12)
    series = [_series(series, chart, to_x, to_y) for series in chart.series if series.points]
    cursor = {"y1": box.top, "y2": box.top + box.height, "visibility": "hidden"}
    return tag(
        "svg",
        *_vertical_axis(chart, box, low, high, to_y),
        _horizontal_axis(chart, box, to_x),
        *(_mark(mark.label, to_x(mark.x), box) for mark in chart.marks),
        tag("clipPath", frame, id=clip),
        tag("g", *series, clip_path=f"url(#{clip})"),
        tag("line", class_="cursor", **cursor),
        **_chart_attributes(chart, box, low, high, to_x),
    )


def describe(chart: Chart) -> str:
    """What a reader who cannot see it is told."""
    said = []
    for series in chart.series:
        if series.points:
            first, last = series.points[0], series.points[-1]
            name = f"{series.label}{f' ({series.note})' if series.note else ''}"
            said.append(f"{name}: {first.text} to {last.text}")
    return f"{chart.title}. {chart.y_label} against {chart.x_label}. " + "; ".join(said) + "."


def _chart_attributes(
    chart: Chart, box: Box, low: float, high: float, to_x: Callable[[float], float]
) -> dict[str, str | None]:
    """What page.js reads."""
    labels = dict(chart.x_ticks)
    places = sorted({p.x for s in chart.series for p in s.points})
    stops = [[round(to_x(x), 1), labels.get(x) or f"{x:,.6g}"] for x in places]
    return {
        "viewBox": f"0 0 {WIDTH} {HEIGHT}",
        "role": "img",
        "aria_label": describe(chart),
        "data_box": " ".join(f"{v:g}" for v in box),
        "data_scale": "log" if chart.y_log else "linear",
        "data_stops": json.dumps(stops, ensure_ascii=False),
        "data_xlabel": chart.x_label,
        "data_unit": chart.unit,
        "data_zero": "1" if chart.y_zero else None,
        "data_domain": None if chart.y_domain is None else f"{low:g} {high:g}",
        "data_cap": None if chart.cap is None else f"{chart.cap:.6g}",
        "data_line": None if chart.line_at is None else f"{chart.line_at:g}",
    }


def _level(box: Box, y: float, kind: str | None = None) -> Markup:
    """A horizontal line over the whole plot."""
    height = f"{y:.1f}"
    return tag("line", class_=kind, x1=box.left, x2=box.left + box.width, y1=height, y2=height)


def _upright(x: float, top: float, bottom: float) -> Markup:
    return tag("line", x1=f"{x:.1f}", x2=f"{x:.1f}", y1=top, y2=bottom)


def _vertical_axis(
    chart: Chart, box: Box, low: float, high: float, to_y: Callable[[float], float]
) -> list[Markup]:
    values = ticks(low, high, log=chart.y_log)
    parts = []
    for value in values:
        y = to_y(value)
        label = tick_label(value, values, chart.unit)
        parts += [_level(box, y), tag("text", label, x=box.left - 7, y=f"{y + 4:.1f}")]
    found = [tag("g", *parts, class_="yaxis")]
    if chart.line_at is not None and low <= chart.line_at <= high:
        found.append(_level(box, to_y(chart.line_at), "level"))
    turned = f"translate(13 {box.top + box.height / 2:g}) rotate(-90)"
    return [*found, tag("text", chart.y_label, class_="name turned", transform=turned)]


def _horizontal_axis(chart: Chart, box: Box, to_x: Callable[[float], float]) -> Markup:
    shown = list(chart.x_ticks)
    if not shown:
        low, high = x_domain(chart)
        values = ticks(low, high, log=chart.x_log, wanted=6)
        shown = [(value, tick_label(value, values, "")) for value in values]
    bottom = box.top + box.height
    parts = []
    end = -1e9
    for value, label in shown:
        x = to_x(value)
        parts.append(_upright(x, bottom, bottom + 5))
        # On a phone a character is 9 units wide.
        half = 4.6 * len(label)
        if x - half > end:
            parts.append(tag("text", label, x=f"{x:.1f}", y=bottom + 20))
            end = x + half + 4
    middle = box.left + box.width / 2
    name = tag("text", chart.x_label, class_="name", x=middle, y=HEIGHT - 8)
    return tag("g", *parts, name, class_="xaxis")


def _mark(label: str, x: float, box: Box) -> Markup:
    line = _upright(x, box.top, box.top + box.height)
    return tag("g", line, tag("text", label, x=f"{x:.1f}", y=box.top - 4), class_="mark")


def _series(
    series: Series,
    chart: Chart,
    to_x: Callable[[float], float],
    to_y: Callable[[float], float],
) -> Markup:
    points = [point for point in series.points if not chart.y_log or point.y > 0]
    xs, ys = [to_x(p.x) for p in points], [to_y(p.y) for p in points]
    attributes = {
        "class_": f"series{' noted' if series.note else ''}",
        "data_key": series.key,
        "data_note": series.note,
        "data_label": series.label + (f" · {series.note}" if series.note else ""),
        "data_px": " ".join(f"{x:.1f}" for x in xs),
        "data_v": " ".join(f"{p.y:.6g}" for p in points),
        "data_t": "|".join(p.text for p in points),
        "style": colour(series.look),
    }
    parts = []
    if any(p.low is not None for p in points):
        lows, highs = [_low(p) for p in points], [_high(p) for p in points]
        attributes["data_lo"] = " ".join(f"{v:.6g}" for v in lows)
        attributes["data_hi"] = " ".join(f"{v:.6g}" for v in highs)
        edge = [*zip(xs, map(to_y, highs), strict=True)]
        edge += reversed([*zip(xs, map(to_y, lows), strict=True)])
        parts.append(tag("path", class_="band", d=f"{_path(edge)}Z"))
    dash = series.look.dash if series.dash is None else series.dash
    path = _path(zip(xs, ys, strict=True))
    parts.append(tag("path", class_="line", d=path, stroke_dasharray=dash))
    if len(points) <= 24:
        parts += [marker(series.look, x, y) for x, y in zip(xs, ys, strict=True)]
    return tag("g", *parts, **attributes)


def _low(point: Point) -> float:
    return point.y if point.low is None else point.low


def _high(point: Point) -> float:
    return point.y if point.high is None else point.high


def _path(points: Iterable[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)


def bars_svg(bars: Bars) -> Markup:
    """Panels of stacked bars side by side, a row of them under each title."""
    count = max(len(panel) for _, panel in bars.panels)
    gap, left = 34.0, 44.0
    width = (WIDTH - left - 8 - gap * (len(bars.panels) - 1)) / len(bars.panels)
    box = Box(left, 30.0, WIDTH - left - 8, 216.0)
    parts = []
    for value in (0, 0.5, 1):
        y = box.top + (1 - value) * box.height
        text = tag("text", f"{value * 100:g}%", x=left - 7, y=y + 4)
        parts.append(tag("g", _level(box, y), text, class_="yaxis"))
    for index, (title, panel) in enumerate(bars.panels):
        start = left + index * (width + gap)
        parts.append(tag("text", title, class_="panel", x=f"{start:.1f}", y=16))
        slot = width / max(count, 1)
        every = -(-count // 9)
        for layer, shares in enumerate(panel):
            parts.append(_bar(bars, layer, shares, start + layer * slot, slot, box))
            if layer % every == 0:
                middle = f"{start + (layer + 0.5) * slot:.1f}"
                parts.append(tag("text", str(layer + 1), class_="tick", x=middle, y=264))
        middle = f"{start + width / 2:.1f}"
        parts.append(tag("text", bars.x_label, class_="tick name", x=middle, y=286))
    said = [
        f"{title}: " + ", ".join(_share_text(look, panel, i) for i, look in enumerate(bars.looks))
        for title, panel in bars.panels
        if panel
    ]
    label = f"{bars.title}. Mean shares over layers. {'; '.join(said)}."
    size = f"0 0 {WIDTH} 296"
    return tag("svg", *parts, viewBox=size, role="img", aria_label=label, class_="bars")


def _bar(
    bars: Bars, layer: int, shares: Sequence[float], start: float, slot: float, box: Box
) -> Markup:
    """A layer's shares on top of each other."""
    said, parts, base = [f"layer {layer + 1}"], [], box.top + box.height
    for look, portion in zip(bars.looks, shares, strict=True):
        said.append(f"{look.label}: {percent(portion * 100, signed=False)}")
        tall = portion * box.height
        base -= tall
        size = {"width": f"{slot * 0.82:.1f}", "height": f"{tall:.1f}"}
        where = {"x": f"{start + slot * 0.09:.1f}", "y": f"{base:.1f}"}
        parts.append(tag("rect", **where, **size, style=colour(look)))
    return tag("g", *parts, class_="bar", data_tip="|".join(said))


def _share_text(look: Look, panel: Sequence[Sequence[float]], index: int) -> str:
    mean = sum(shares[index] for shares in panel) / len(panel) if panel else None
    text = MISSING if mean is None else percent(mean * 100, signed=False)
    return f"{look.label} {text}"
