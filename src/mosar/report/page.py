"""The report as one HTML page that needs nothing else: style, script and figures are inside it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import groupby

from mosar.report.charts import Bars, Chart, escapes
from mosar.report.comparison import Comparison
from mosar.report.diagram import diagram_svg
from mosar.report.elements import Markup, asset, document, join, source_hash, tag
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
from mosar.report.support import SupportGrid, grid_svg
from mosar.report.svg import bars_svg, chart_svg, colour, line_sample, sample
from mosar.report.tables import Table
from mosar.report.verdicts import DECIDED, RULE, VERDICTS

_SIGNS = {"holds": "✓", "fails": "✗", "unclear": "≈", "unmeasured": "–"}
_SEVERAL = {"holds": "hold", "fails": "do not hold"}
_ICON = (
    "data:image/svg+xml,"
    "%3Csvg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 16 16'%3E%3Cpath fill='%23d55e00' "
    "d='M1 1h4v4h4v4h4v6H1z'/%3E%3C/svg%3E"
)


def render_page(c: Comparison, sections: list[Section], figures: list[str]) -> str:
    """The whole document; `figures` are the names of the files that were made with it."""
    name = c.experiment.name
    looks = variant_looks({*c.variants, *(record.cell.variant for record in c.retrievals)})
    style, script = asset("page.css"), asset("page.js")
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", http_equiv="Content-Security-Policy", content=_policy(style, script)),
        tag("meta", name="generator", content="mosar report"),
        tag("meta", name="figures", content=" ".join(figures)),
        tag("meta", name="color-scheme", content="light dark"),
        tag("link", rel="icon", href=_ICON),
        tag("title", f"MoSAR: {name}"),
        tag("style", style),
    )
    made = join(["Made by ", tag("code", "mosar report"), " from the records of "])
    body = tag(
        "body",
        tag("a", "Skip to the results", class_="skip", href="#results"),
        _bar(sections),
        tag("main", _head(c), *(_section(section, looks) for section in sections)),
        tag("footer", tag("p", made, tag("code", name), "; the same records give the same page.")),
        tag("div", id="tip", role="status", aria_live="polite", hidden="hidden"),
        tag("script", script),
    )
    return document(head, body)


def _policy(style: Markup, script: Markup) -> str:
    """Nothing is fetched and no script runs but the page's own, whatever a record says."""
    return "; ".join(
        [
            "default-src 'none'",
            f"script-src {source_hash(script)}",
            "require-trusted-types-for 'script'",
            f"style-src {source_hash(style)}",
            # Colours of series: custom properties in style attributes.
            "style-src-attr 'unsafe-inline'",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
        ]
    )


def _bar(sections: list[Section]) -> Markup:
    half = tag("path", d="M10 2.8a7.2 7.2 0 0 1 0 14.4z", fill="currentColor")
    ring = {"fill": "none", "stroke": "currentColor", "stroke_width": 1.6}
    icon = tag(
        "svg",
        tag("circle", cx=10, cy=10, r=7.2, **ring),
        half,
        viewBox="0 0 20 20",
        width=18,
        height=18,
        aria_hidden="true",
    )
    switch = "Switch between light and dark"
    return tag(
        "header",
        tag("a", "mosar", class_="brand", href="#top"),
        tag(
            "nav",
            *(tag("a", s.short or s.title, href=f"#{s.name}") for s in sections),
            aria_label="Sections",
        ),
        tag("button", "Show all", id="all", type="button", hidden="hidden"),
        tag("button", icon, id="theme", type="button", aria_label=switch),
        class_="bar",
    )


def _head(c: Comparison) -> Markup:
    cards = [
        tag(
            "div",
            tag("dt", tile.label),
            tag("dd", tile.value),
            tag("dd", tile.remark, class_="remark"),
            class_="tile",
        )
        for tile in tiles(c)
    ]
    return tag(
        "section",
        tag("p", "Learned attention geometry", class_="kicker"),
        tag("h1", c.experiment.name),
        tag("p", abstract(c), class_="abstract"),
        *([tag("dl", *cards, class_="tiles")] if cards else []),
        class_="head",
        id="top",
    )


def _section(section: Section, looks: dict[str, Look]) -> Markup:
    title = f"{section.name}-title"
    parts = [tag("h2", section.title, id=title)]
    if section.lead:
        parts.append(tag("p", section.lead, class_="lead"))
    # Neighbouring figures share a row where the window is wide enough.
    for is_figure, items in groupby(section.items, key=_is_figure):
        rendered = [_item(item, looks) for item in items]
        parts += [tag("div", *rendered, class_="figures")] if is_figure else rendered
    return tag("section", *parts, id=section.name, aria_labelledby=title)


def _is_figure(item: Item) -> bool:
    return isinstance(item, (Chart, Bars, Switch, Drawing))


def _item(item: Item, looks: dict[str, Look]) -> Markup:
    match item:
        case Missing():
            return tag("p", item.text, class_="missing")
        case Text():
            return tag("p", item.text)
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
                tag("div", *(_item(part, looks) for part in side), class_="stack")
                for side in (item.left, item.right)
            )
            return tag("div", *stacks, class_="columns")
        case Verdicts():
            return _verdicts(item)
        case Table():
            return table_block(item, looks)


def _figure(name: str, title: str, parts: Iterable[str], note: str, kind: str = "chart") -> Markup:
    """A card with a title above and a note below."""
    return tag(
        "figure",
        tag("figcaption", title),
        *parts,
        tag("p", note, class_="note"),
        class_=f"card {kind}",
        id=f"fig-{name}",
    )


def _chart(chart: Chart) -> Markup:
    plot = tag(
        "div",
        chart_svg(chart),
        class_="plot",
        tabindex=0,
        role="group",
        aria_label=f"{chart.title}: arrow keys read the values",
    )
    return tag(
        "figure",
        tag("figcaption", chart.title),
        *_legend(chart),
        tag("p", chart.y_label, class_="yname", aria_hidden="true"),
        plot,
        tag("p", chart.caption + _escaping(chart), class_="note"),
        *_numbers(chart),
        class_="card chart",
        id=f"fig-{chart.name}",
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


def _legend(chart: Chart) -> list[Markup]:
    """Buttons that switch series on and off."""
    looks = {series.key: (series.label, series.look) for series in chart.series}
    notes = {
        series.note: series.look.dash if series.dash is None else series.dash
        for series in chart.series
        if series.note
    }
    if len(looks) + len(notes) < 2:
        return []
    chips = [
        _chip(key, [sample(look), label], style=colour(look))
        for key, (label, look) in looks.items()
    ]
    # One note is explained by the caption; of several the line tells which is which.
    chips += [
        _chip(f"note:{note}", [line_sample(dash), note] if len(notes) > 1 else [note], " plain")
        for note, dash in notes.items()
    ]
    return [tag("div", *chips, class_="legend", role="group", aria_label="Show or hide")]


def _chip(key: str, parts: list[str], kind: str = "", style: str = "") -> Markup:
    attributes = {"type": "button", "aria_pressed": "true", "data_key": key, "style": style}
    return tag("button", *parts, class_=f"chip{kind}", **attributes)


def _numbers(chart: Chart) -> list[Markup]:
    """The values as a table, for those who want them or cannot see the picture."""
    places = sorted({point.x for series in chart.series for point in series.points})
    if len(places) > 60:
        return []
    labels = dict(chart.x_ticks)
    names = [s.label + (f", {s.note}" if s.note else "") for s in chart.series]
    rows = []
    for x in places:
        found = [{p.x: p.text for p in series.points}.get(x, "–") for series in chart.series]
        first = tag("th", labels.get(x) or f"{x:,.6g}", scope="row")
        rows.append(tag("tr", first, *(tag("td", text) for text in found)))
    table = tag(
        "table",
        tag("thead", _column_heads(chart.x_label, *names)),
        tag("tbody", *rows),
    )
    label = f"{chart.title}: numbers"
    box = tag("div", table, class_="scroll", tabindex=0, role="group", aria_label=label)
    return [tag("details", tag("summary", "Numbers"), box)]


def _column_heads(*names: str) -> Markup:
    return tag("tr", *(tag("th", name, scope="col") for name in names))


def _bars(bars: Bars) -> Markup:
    keys = [
        tag("span", tag("i"), look.label, class_="key", style=colour(look)) for look in bars.looks
    ]
    parts = [tag("div", *keys, class_="legend"), tag("div", bars_svg(bars), class_="plot")]
    return _figure(bars.name, bars.title, parts, bars.caption)


def _options(labels: Iterable[str], initial: int) -> list[Markup]:
    return [
        tag("option", label, value=index, selected="selected" if index == initial else None)
        for index, label in enumerate(labels)
    ]


def _panel(index: int, initial: int, *parts: str, **attributes: str) -> Markup:
    hidden = None if index == initial else "hidden"
    return tag("div", *parts, data_panel=index, hidden=hidden, **attributes)


def _switch(switch: Switch) -> Markup:
    """One figure of several, chosen from a list."""
    panels = [
        _panel(index, switch.initial, _item(item, {}), class_="panel")
        for index, (_, item) in enumerate(switch.options)
    ]
    if len(switch.options) == 1:
        return tag("div", *panels, class_="switch")
    options = _options((label for label, _ in switch.options), switch.initial)
    choose = tag("label", f"{switch.label} ", tag("select", *options), class_="choose")
    return tag("div", choose, *panels, class_="switch", id=f"switch-{switch.name}")


def _supports(item: Supports) -> Markup:
    def drawn(g: SupportGrid) -> list[Markup]:
        return [grid_svg(g), tag("p", g.remark)]

    grids = [tag("div", tag("h4", g.title), *drawn(g), class_="geometry") for g in item.fixed]
    if item.routed:
        options = _options((g.title for g in item.routed), item.initial)
        panels = [_panel(i, item.initial, *drawn(g)) for i, g in enumerate(item.routed)]
        choose = tag("h4", tag("select", *options, aria_label="Layer"))
        grids.append(tag("div", choose, *panels, class_="geometry switch"))
    parts = [tag("div", *grids, class_="geometries")]
    return _figure("geometry_grids", item.title, parts, item.caption, "wide")


def _drawing(item: Drawing) -> Markup:
    label = (
        f"{item.title}: tokens, embedding; in each layer RMSNorm, Q, K and V, RoPE on Q and K, a "
        "query router and a key router whose mixture of gates is added to causal attention as a "
        "bias, RMSNorm, residual sum, a gated MLP between RMSNorms, residual sum; then logits."
    )
    parts = [tag("div", diagram_svg(item.diagram, label), class_="plot")]
    return _figure("architecture", item.title, parts, item.caption)


def _verdicts(item: Verdicts) -> Markup:
    counts = Counter(finding.verdict for _, finding in item.judged)
    chips = []
    for verdict, words in VERDICTS.items():
        if counts[verdict]:
            text = _SEVERAL.get(verdict, words) if counts[verdict] > 1 else words
            attributes = {"type": "button", "aria_pressed": "true", "data_verdict": verdict}
            number = tag("b", str(counts[verdict]))
            chips.append(tag("button", number, f" {text}", class_=f"badge {verdict}", **attributes))
    rows, group = [], None
    for claim, finding in item.judged:
        if claim.group != group:
            group = claim.group
            heading = tag("th", group, colspan=4, scope="colgroup")
            rows.append(tag("tr", heading, class_="group"))
        rule = [tag("small", claim.rule, class_="rule")] if claim.rule else []
        basis = [tag("small", finding.basis)] if finding.basis else []
        sign = tag("i", _SIGNS[finding.verdict], aria_hidden="true")
        badge = tag(
            "span", sign, f" {VERDICTS[finding.verdict]}", class_=f"badge {finding.verdict}"
        )
        rows.append(
            tag(
                "tr",
                tag("th", claim.text, *rule, scope="row"),
                tag("td", *_parts(finding.paper), data_label="paper"),
                tag("td", *_parts(finding.ours), data_label="ours"),
                tag("td", badge, *basis, data_label="verdict"),
                data_verdict=finding.verdict,
                id=f"claim-{claim.name}",
            )
        )
    heads = _column_heads("the paper’s claim", "paper", "ours", "verdict")
    table = tag("table", tag("thead", heads), tag("tbody", *rows), class_="claims")
    return join(
        [
            tag("p", RULE, class_="lead"),
            tag("p", DECIDED, class_="note decided"),
            tag("div", *chips, class_="filter", role="group", aria_label="Show verdicts"),
            tag("div", table, class_="card flush"),
        ]
    )


def _parts(text: str) -> list[Markup]:
    """Figures of several lengths under each other."""
    return [tag("span", part) for part in text.split(" · ")]
