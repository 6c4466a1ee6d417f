"""The report as one HTML page that needs nothing else: style, script and figures are inside it.

page.html is its template, which escapes whatever it is given but pictures and the page's own files.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any, NamedTuple

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from mosar.report.assets import content_policy, read_asset
from mosar.report.charts import Bars, Chart
from mosar.report.comparison import Comparison
from mosar.report.diagram import Diagram
from mosar.report.drawing import Picture, colour, draw_support
from mosar.report.formats import MISSING, listed
from mosar.report.inline import inline
from mosar.report.palette import Look
from mosar.report.sections import Section, Switch, Verdicts
from mosar.report.summary import abstract, tiles
from mosar.report.tables import Column, Table, TableCell
from mosar.report.verdicts import DECIDED, RULE, VERDICTS

_SIGNS = {"holds": "✓", "fails": "✗", "unclear": "≈", "unmeasured": "–"}
_SEVERAL = {"holds": "hold", "fails": "do not hold"}
# Long tables of reference material are folded.
_REFERENCE = (
    *("settings", "environment", "data", "runs", "variants"),
    *("benchmarks", "decoding", "training-speed"),
)
_MOST_NUMBERS = 60


def render_page(
    c: Comparison,
    sections: list[Section],
    pictures: Mapping[str, Picture],
    figures: Sequence[str] = (),
    looks: Sequence[str] = (),
) -> str:
    """The whole document with the pictures of `draw_pictures`.

    `figures` and `looks` are the names of the files that were made with it.
    """
    style = read_asset("page.css")
    script = read_asset("theme.js") + read_asset("page.js")
    environment = Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined
    )
    environment.filters |= {"colour": colour}
    template = environment.from_string(str(read_asset("page.html")))
    page = template.render(
        name=c.experiment.name,
        abstract=abstract(c),
        tiles=tiles(c),
        sections=sections,
        rows=_rows,
        kind=lambda item: type(item).__name__,
        figures=figures,
        looks=looks,
        hidden=[variant for variant in c.looks if variant not in c.featured],
        chart=lambda chart: _chart(chart, pictures[chart.name]),
        picture=lambda name: inline(pictures[name], name)[0],
        support=lambda grid, name: inline(draw_support(grid), name)[0],
        table=lambda table: _stacked(table, c.looks),
        folds=lambda table: table.name in _REFERENCE,
        verdicts=_verdicts,
        words={"rule": RULE, "decided": DECIDED, "verdicts": VERDICTS, "signs": _SIGNS},
        style=style,
        script=script,
        policy=content_policy(style, script),
    )
    # Macros leave empty lines.
    return page.lstrip() + "\n"


def _rows(section: Section) -> list[tuple[bool, list[Any]]]:
    """Neighbouring figures share a row where the window is wide enough."""
    figures = (Chart, Bars, Switch, Diagram)
    runs = groupby(section.items, key=lambda item: isinstance(item, figures))
    return [(is_figure, list(items)) for is_figure, items in runs]


class Chip(NamedTuple):
    """A button of a legend that switches series on and off."""

    key: str
    label: str
    sample: Markup | None
    style: str


def _chart(chart: Chart, drawn: Picture) -> dict[str, Any]:
    """What the template needs of a chart."""
    picture, samples = inline(drawn, chart.name)
    listed_series = [series for series in chart.series if series.in_legend]
    chips: dict[str, Chip] = {}
    notes = dict.fromkeys(series.note for series in chart.series if series.note)
    for series, sample in zip(listed_series, samples, strict=False):
        chips.setdefault(series.key, Chip(series.key, series.label, sample, colour(series.look)))
    for note in notes if chips else ():
        # The caption explains a single note; several notes need samples of their lines.
        lines = (s for s, series in zip(samples, listed_series, strict=True) if series.note == note)
        sample = next(lines, None) if len(notes) > 1 else None
        chips[f"note:{note}"] = Chip(f"note:{note}", note, sample, "")
    numbers = [["", *(label for _, label in chart.stops)]]
    for series in chart.series:
        texts = {point.x: point.text for point in series.points}
        numbers.append([series.name, *(texts.get(x, MISSING) for x, _ in chart.stops)])
    # The longer side runs down.
    if len(chart.stops) > len(chart.series):
        numbers = [list(row) for row in zip(*numbers, strict=True)]
    numbers[0][0] = chart.x_label
    return {
        "picture": picture,
        "chips": list(chips.values()),
        "numbers": numbers if len(chart.stops) <= _MOST_NUMBERS else [],
        "note": chart.caption + _escaping(chart),
    }


def _escaping(chart: Chart) -> str:
    """Names the lines that leave the picture at the top."""
    highest = [(series, max(series.points, key=lambda point: point.y)) for series in chart.series]
    said = [
        f"{series.name} (up to {point.text})"
        for series, point in highest
        if chart.cap is not None and point.y > chart.cap
    ]
    # Where all lines do, as at the start of training, the caption says so itself.
    if not said or len(said) == len(chart.series):
        return ""
    return f" Out at the top: {listed(said)}; hide others to see one whole."


def _verdicts(item: Verdicts) -> dict[str, Any]:
    """How many of each kind, and the claims in their groups."""
    counts = Counter(finding.verdict for _, finding in item.judged)
    return {
        "counts": [
            (
                verdict,
                counts[verdict],
                _SEVERAL.get(verdict, words) if counts[verdict] > 1 else words,
            )
            for verdict, words in VERDICTS.items()
            if counts[verdict]
        ],
        "groups": groupby(item.judged, key=lambda judged: judged[0].group),
    }


class Stack(NamedTuple):
    """A cell of ours, and the paper's beneath it."""

    ours: TableCell
    theirs: TableCell | None = None


def _stacked(table: Table, looks: Mapping[str, Look]) -> dict[str, Any]:
    """Groups of columns with their widths, columns, and rows with the paper's figures beneath."""
    columns, keys = list(table.columns), table.keys or ("",) * len(table.rows)
    rows = [(key, [Stack(cell) for cell in row]) for key, row in zip(keys, table.rows, strict=True)]
    if table.beneath == "columns":
        ends = [*columns[1:], Column("")]
        pairs = [
            (index, after if after.label.startswith("paper") and after.group == own.group else None)
            for index, (own, after) in enumerate(zip(columns, ends, strict=True))
            if not own.label.startswith("paper")
        ]
        rows = [
            (key, [Stack(row[i].ours, row[i + 1].ours if theirs else None) for i, theirs in pairs])
            for key, row in rows
        ]
        columns = [
            replace(columns[i], label=columns[i].label + (f" / {theirs.label}" if theirs else ""))
            for i, theirs in pairs
        ]
    elif table.beneath == "rows":
        both, rows = rows, []
        for key, row in both:
            figures = row[3:]
            if row[2].ours.text.startswith("paper") and rows:
                above = rows[-1][1]
                above[2:] = [Stack(a.ours, b.ours) for a, b in zip(above[2:], figures, strict=True)]
            else:
                rows.append((key, [*row[:2], *figures]))
        columns = [*columns[:2], *columns[3:]]
    names = [_stacked_label(column) for column in columns]
    groups = [(g, len(list(found))) for g, found in groupby(columns, key=lambda c: c.group)]
    return {
        "groups": groups if any(group for group, _ in groups) else [],
        "columns": columns,
        "names": names,
        "rows": [
            (looks.get(key), row, heading)
            for (key, row), heading in zip(rows, _headings(table, len(rows)), strict=True)
        ],
    }


def _headings(table: Table, rows: int) -> list[str]:
    """The heading over each row: its group, where a new one begins."""
    if not table.groups:
        return [""] * rows
    pairs = zip(table.groups, ("", *table.groups), strict=False)
    return [own if own != before else "" for own, before in pairs]


def _stacked_label(column: Column) -> str:
    """How a cell is named where columns have no headings, on a narrow screen."""
    own = "" if column.label.startswith("ours") else column.label
    return " · ".join(part for part in (column.group, own) if part)
