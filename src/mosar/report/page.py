"""The report as one HTML page that needs nothing else: style, script and figures are inside it."""

from __future__ import annotations

from collections import Counter
from html import escape
from importlib.resources import files
from itertools import groupby

from mosar.report.charts import Bars, Chart, escapes
from mosar.report.comparison import Comparison
from mosar.report.diagram import diagram_svg
from mosar.report.formats import listed
from mosar.report.page_tables import table_block
from mosar.report.palette import Look, variant_looks
from mosar.report.sections import (
    Columns,
    Drawing,
    Item,
    Missing,
    Section,
    Supports,
    Switch,
    Text,
    Verdicts,
)
from mosar.report.summary import abstract, tiles
from mosar.report.support import grid_svg
from mosar.report.svg import bars_svg, chart_svg, colour, sample
from mosar.report.tables import Table
from mosar.report.verdicts import RULE, VERDICTS

_SIGNS = {"holds": "✓", "fails": "✗", "noise": "≈", "unmeasured": "–"}
_SEVERAL = {"holds": "hold", "fails": "do not hold"}
# Nothing may be fetched, whatever a record says.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
_ICON = (
    "data:image/svg+xml,"
    "%3Csvg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 16 16'%3E%3Cpath fill='%23d55e00' "
    "d='M1 1h4v4h4v4h4v6H1z'/%3E%3C/svg%3E"
)


def render_page(c: Comparison, sections: list[Section], figures: list[str]) -> str:
    """The whole document; `figures` are the names of the files that were made with it."""
    title = f"MoSAR: {c.experiment.name}"
    looks = variant_looks({*c.variants, *(record.cell.variant for record in c.retrievals)})
    body = "\n".join(_section(section, looks) for section in sections)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<meta name="generator" content="mosar report">
<meta name="figures" content="{escape(" ".join(figures))}">
<meta name="color-scheme" content="light dark">
<link rel="icon" href="{_ICON}">
<title>{escape(title)}</title>
<style>
{_asset("page.css")}</style>
</head>
<body>
<a class="skip" href="#results">Skip to the results</a>
{_bar(sections)}
<main>
{_head(c)}
{body}
</main>
<footer><p>Made by <code>mosar report</code> from the records of
<code>{escape(c.experiment.name)}</code>; the same records give the same page.</p></footer>
<div id="tip" role="status" aria-live="polite" hidden></div>
<script>
{_asset("page.js")}</script>
</body>
</html>
"""


def _asset(name: str) -> str:
    return files("mosar.report").joinpath(name).read_text(encoding="utf-8")


def _bar(sections: list[Section]) -> str:
    links = "".join(f'<a href="#{s.name}">{escape(s.short or s.title)}</a>' for s in sections)
    return f"""<header class="bar">
<a class="brand" href="#top">mosar</a>
<nav aria-label="Sections">{links}</nav>
<button id="all" type="button" hidden>Show all</button>
<button id="theme" type="button" aria-label="Switch between light and dark">
<svg viewBox="0 0 20 20" width="18" height="18" aria-hidden="true"><circle cx="10" cy="10" r="7.2"
fill="none" stroke="currentColor" stroke-width="1.6"/><path d="M10 2.8a7.2 7.2 0 0 1 0 14.4z"
fill="currentColor"/></svg></button>
</header>"""


def _head(c: Comparison) -> str:
    cards = "".join(
        f'<div class="tile"><dt>{escape(tile.label)}</dt><dd>{escape(tile.value)}</dd>'
        f'<dd class="remark">{escape(tile.remark)}</dd></div>'
        for tile in tiles(c)
    )
    figures = f'<dl class="tiles">{cards}</dl>' if cards else ""
    return f"""<section class="head" id="top">
<p class="kicker">Learned attention geometry</p>
<h1>{escape(c.experiment.name)}</h1>
<p class="abstract">{escape(abstract(c))}</p>
{figures}
</section>"""


def _section(section: Section, looks: dict[str, Look]) -> str:
    lead = f'<p class="lead">{escape(section.lead)}</p>' if section.lead else ""
    parts = []
    # Neighbouring figures share a row where the window is wide enough.
    for is_figure, items in groupby(section.items, key=_is_figure):
        rendered = "\n".join(_item(item, looks) for item in items)
        parts.append(f'<div class="figures">{rendered}</div>' if is_figure else rendered)
    body = "\n".join(parts)
    return (
        f'<section id="{section.name}" aria-labelledby="{section.name}-title">\n'
        f'<h2 id="{section.name}-title">{escape(section.title)}</h2>\n{lead}\n{body}\n</section>'
    )


def _is_figure(item: Item) -> bool:
    return isinstance(item, (Chart, Bars, Switch, Drawing))


def _item(item: Item, looks: dict[str, Look]) -> str:
    match item:
        case Missing():
            return f'<p class="missing">{escape(item.text)}</p>'
        case Text():
            return f"<p>{escape(item.text)}</p>"
        case Chart():
            return _chart(item)
        case Bars():
            return _bars(item)
        case Switch():
            return _switch(item)
        case Supports():
            return _supports(item)
        case Drawing():
            return _drawing(item)
        case Columns():
            stacks = (
                f'<div class="stack">{"".join(_item(part, looks) for part in side)}</div>'
                for side in (item.left, item.right)
            )
            return f'<div class="columns">{"".join(stacks)}</div>'
        case Verdicts():
            return _verdicts(item)
        case Table():
            return table_block(item, looks)


def _chart(chart: Chart) -> str:
    return (
        f'<figure class="card chart" id="fig-{chart.name}">\n{_caption(chart.title)}'
        f'{_legend(chart)}<p class="yname" aria-hidden="true">{escape(chart.y_label)}</p>'
        f'<div class="plot" tabindex="0" role="group" '
        f'aria-label="{escape(chart.title)}: arrow keys read the values">'
        f'{chart_svg(chart)}</div>\n<p class="note">{escape(chart.caption + _escaping(chart))}</p>'
        f"{_numbers(chart)}</figure>"
    )


def _escaping(chart: Chart) -> str:
    """What is higher than the picture."""
    said = [
        f"{series.label}{f', {series.note}' if series.note else ''} (up to {point.text})"
        for series, point in escapes(chart)
    ]
    # Of all lines, as at the start of training, the caption speaks itself.
    if not said or len(said) == len(chart.series):
        return ""
    return f" Out at the top: {listed(said)}; hide others to see one whole."


def _caption(title: str) -> str:
    return f"<figcaption>{escape(title)}</figcaption>\n"


def _legend(chart: Chart) -> str:
    """Buttons that switch series on and off."""
    looks = {series.key: (series.label, series.look) for series in chart.series}
    notes = {
        series.note: series.look.dash if series.dash is None else series.dash
        for series in chart.series
        if series.note
    }
    if len(looks) + len(notes) < 2:
        return ""
    chips = [
        f'<button type="button" class="chip" aria-pressed="true" data-key="{escape(key)}" '
        f'style="{colour(look)}">{sample(look)}{escape(label)}</button>'
        for key, (label, look) in looks.items()
    ]
    # One note is explained by the caption; of several the line tells which is which.
    chips += [
        f'<button type="button" class="chip plain" aria-pressed="true" '
        f'data-key="note:{escape(note)}">{_line(dash) if len(notes) > 1 else ""}'
        f"{escape(note)}</button>"
        for note, dash in notes.items()
    ]
    return f'<div class="legend" role="group" aria-label="Show or hide">{"".join(chips)}</div>\n'


def _line(dash: str) -> str:
    dashes = f' stroke-dasharray="{dash}"' if dash else ""
    return (
        '<svg class="sample" viewBox="0 0 30 12" width="30" height="12" aria-hidden="true">'
        f'<path class="line" d="M1 6H29"{dashes}/></svg>'
    )


def _numbers(chart: Chart) -> str:
    """The values as a table, for those who want them or cannot see the picture."""
    places = sorted({point.x for series in chart.series for point in series.points})
    if len(places) > 60:
        return ""
    labels = dict(chart.x_ticks)
    names = [s.label + (f", {s.note}" if s.note else "") for s in chart.series]
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in [chart.x_label, *names])
    rows = []
    for x in places:
        found = [{p.x: p.text for p in series.points}.get(x, "–") for series in chart.series]
        cells = "".join(f"<td>{escape(text)}</td>" for text in found)
        rows.append(f'<tr><th scope="row">{escape(labels.get(x) or f"{x:,.6g}")}</th>{cells}</tr>')
    label = escape(f"{chart.title}: numbers")
    return (
        "<details><summary>Numbers</summary>"
        f'<div class="scroll" tabindex="0" role="group" aria-label="{label}">'
        f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table></div></details>"
    )


def _bars(bars: Bars) -> str:
    keys = "".join(
        f'<span class="key" style="{colour(look)}"><i></i>{escape(look.label)}</span>'
        for look in bars.looks
    )
    return (
        f'<figure class="card chart" id="fig-{bars.name}">\n{_caption(bars.title)}'
        f'<div class="legend">{keys}</div><div class="plot">{bars_svg(bars)}</div>\n'
        f'<p class="note">{escape(bars.caption)}</p></figure>'
    )


def _switch(switch: Switch) -> str:
    """One figure of several, chosen from a list."""
    options = "".join(
        f'<option value="{index}"{" selected" if index == switch.initial else ""}>'
        f"{escape(label)}</option>"
        for index, (label, _) in enumerate(switch.options)
    )
    panels = "".join(
        f'<div class="panel" data-panel="{index}"{"" if index == switch.initial else " hidden"}>'
        f"{_item(item, {})}</div>"
        for index, (_, item) in enumerate(switch.options)
    )
    if len(switch.options) == 1:
        return f'<div class="switch">{panels}</div>'
    return (
        f'<div class="switch" id="switch-{escape(switch.name)}"><label class="choose">'
        f"{escape(switch.label)} <select>{options}</select></label>{panels}</div>"
    )


def _supports(item: Supports) -> str:
    def grid(g) -> str:
        name = escape(g.title)
        return f'<div class="geometry"><h4>{name}</h4>{grid_svg(g)}<p>ρ = {g.density:.3f}</p></div>'

    fixed = "".join(grid(g) for g in item.fixed)
    routed = ""
    if item.routed:
        options = "".join(
            f'<option value="{i}"{" selected" if i == item.initial else ""}>{escape(g.title)}'
            "</option>"
            for i, g in enumerate(item.routed)
        )
        panels = "".join(
            f'<div data-panel="{i}"{"" if i == item.initial else " hidden"}>{grid_svg(g)}'
            f"<p>ρ = {g.density:.3f}</p></div>"
            for i, g in enumerate(item.routed)
        )
        routed = (
            '<div class="geometry switch"><h4><select aria-label="Layer">'
            f"{options}</select></h4>{panels}</div>"
        )
    return (
        f'<figure class="card wide" id="fig-geometry_grids">\n{_caption(item.title)}'
        f'<div class="geometries">{fixed}{routed}</div><p class="note">{escape(item.caption)}</p>'
        "</figure>"
    )


def _drawing(item: Drawing) -> str:
    label = (
        f"{item.title}: tokens, embedding; in each layer RMSNorm, Q, K and V, RoPE on Q and K, a "
        "query router and a key router whose mixture of gates is added to causal attention as a "
        "bias, RMSNorm, residual sum, a gated MLP between RMSNorms, residual sum; then logits."
    )
    return (
        f'<figure class="card chart" id="fig-architecture">\n{_caption(item.title)}'
        f'<div class="plot">{diagram_svg(item.diagram, label)}</div>'
        f'<p class="note">{escape(item.caption)}</p></figure>'
    )


def _verdicts(item: Verdicts) -> str:
    counts = Counter(finding.verdict for _, finding in item.judged)
    chips = "".join(
        f'<button type="button" class="badge {verdict}" aria-pressed="true" '
        f'data-verdict="{verdict}"><b>{counts[verdict]}</b> '
        f"{_SEVERAL.get(verdict, words) if counts[verdict] > 1 else words}</button>"
        for verdict, words in VERDICTS.items()
        if counts[verdict]
    )
    rows, group = [], None
    for claim, finding in item.judged:
        if claim.group != group:
            group = claim.group
            rows.append(
                f'<tr class="group"><th colspan="4" scope="colgroup">{escape(group)}</th></tr>'
            )
        rule = f'<small class="rule">{escape(claim.rule)}</small>' if claim.rule else ""
        basis = f"<small>{escape(finding.basis)}</small>" if finding.basis else ""
        rows.append(
            f'<tr data-verdict="{finding.verdict}" id="claim-{claim.name}">'
            f'<th scope="row">{escape(claim.text)}{rule}</th>'
            f'<td data-label="paper">{_parts(finding.paper)}</td>'
            f'<td data-label="ours">{_parts(finding.ours)}</td>'
            f'<td data-label="verdict"><span class="badge {finding.verdict}">'
            f"<i aria-hidden=true>{_SIGNS[finding.verdict]}</i> {VERDICTS[finding.verdict]}"
            f"</span>{basis}</td></tr>"
        )
    return (
        f'<p class="lead">{escape(RULE)}</p><div class="filter" role="group" '
        f'aria-label="Show verdicts">{chips}</div>'
        '<div class="card flush"><table class="claims"><thead><tr>'
        '<th scope="col">the paper’s claim</th><th scope="col">paper</th>'
        '<th scope="col">ours</th><th scope="col">verdict</th></tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def _parts(text: str) -> str:
    """Figures of several lengths under each other."""
    return "".join(f"<span>{escape(part)}</span>" for part in text.split(" · "))
