"""Tables of the page: sortable, in a box of their own, the paper's figures beneath ours."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

from mosar.report.elements import Markup, tag
from mosar.report.palette import Look
from mosar.report.svg import colour
from mosar.report.tables import Column, Table, TableCell


def table_block(table: Table, looks: dict[str, Look]) -> Markup:
    box = {"class_": "scroll", "tabindex": 0, "role": "group", "aria_label": table.title}
    parts = [tag("div", _table(table, looks), **box)]
    if table.caption:
        parts.append(tag("p", table.caption, class_="note"))
    title = tag("h3", table.title)
    card = {"class_": "card flush", "id": f"table-{table.name}"}
    if table.name in _REFERENCE:
        # Reference matter: there when it is wanted.
        opened = "open" if len(table.rows) <= 12 else None
        return tag("details", tag("summary", title), *parts, **card, open=opened)
    return tag("div", title, *parts, **card)


# Folded up where they are long.
_REFERENCE = (
    *("settings", "environment", "data", "runs", "variants"),
    *("benchmarks", "decoding", "training-speed"),
)


@dataclass(frozen=True)
class _Stack:
    """A cell of ours, and the paper's beneath it."""

    ours: TableCell
    theirs: TableCell | None = None


def _table(table: Table, looks: dict[str, Look]) -> Markup:
    columns, rows, keys = _stacked(table)
    labels = []
    for column in columns:
        button = tag("button", column.label, type="button")
        kind = "number" if column.numeric else "text"
        labels.append(tag("th", button, scope="col", class_=kind, aria_sort="none"))
    body = []
    for index, row in enumerate(rows):
        look = looks.get(keys[index]) if keys else None
        cells = [
            _table_cell(stack, column.numeric, place == 0, look is not None)
            for place, (column, stack) in enumerate(zip(columns, row, strict=True))
        ]
        body.append(tag("tr", *cells, style=colour(look) if look else None))
    head = tag("thead", *_group_row(columns), tag("tr", *labels))
    return tag("table", head, tag("tbody", *body), class_="sortable")


def _stacked(table: Table) -> tuple[list[Column], list[list[_Stack]], list[str]]:
    """Columns, rows and keys with the paper's figures beneath ours."""
    columns, keys = list(table.columns), list(table.keys)
    if table.beneath == "columns":
        ends = [*table.columns[1:], Column("")]
        pairs = [
            (index, after.label.startswith("paper") and after.group == column.group)
            for index, (column, after) in enumerate(zip(table.columns, ends, strict=True))
            if not column.label.startswith("paper")
        ]
        merged = []
        for index, paired in pairs:
            column = table.columns[index]
            theirs = f" / {table.columns[index + 1].label}" if paired else ""
            merged.append(Column(column.label + theirs, column.group, column.numeric))
        return (
            merged,
            [
                [_Stack(row[index], row[index + 1] if paired else None) for index, paired in pairs]
                for row in table.rows
            ],
            keys,
        )
    rows: list[list[_Stack]] = []
    kept: list[str] = []
    for index, row in enumerate(table.rows):
        if table.beneath == "rows" and row[2].text.startswith("paper") and rows:
            above = rows[-1]
            rows[-1] = [*above[:2], *(map(_put_beneath, above[2:], row[3:]))]
            continue
        shown = [*row[:2], *row[3:]] if table.beneath == "rows" else row
        rows.append([_Stack(cell) for cell in shown])
        kept += keys[index : index + 1]
    if table.beneath == "rows":
        columns = [*columns[:2], *columns[3:]]
    return columns, rows, kept


def _put_beneath(stack: _Stack, cell: TableCell) -> _Stack:
    return _Stack(stack.ours, cell)


def _group_row(columns: list[Column]) -> list[Markup]:
    if not any(column.group for column in columns):
        return []
    cells = []
    for group, members in groupby(columns, key=lambda column: column.group):
        name, scope = ("th", "colgroup") if group else ("td", None)
        cells.append(tag(name, group, colspan=len(list(members)), scope=scope))
    return [tag("tr", *cells, class_="groups")]


def _table_cell(stack: _Stack, numeric: bool, first: bool, dot: bool) -> Markup:
    cell = stack.ours
    flags = {
        "number": numeric,
        "brief": not numeric and len(cell.text) <= 24,
        "best": cell.best,
        "muted": cell.muted,
    }
    swatch = [tag("i", class_="swatch", aria_hidden="true")] if first and dot else []
    parts: list[str] = [*swatch, cell.text]
    if stack.theirs is not None:
        best = " best" if stack.theirs.best else ""
        parts.append(tag("small", stack.theirs.text, class_=f"theirs{best}"))
    name, scope = ("th", "row") if first else ("td", None)
    classes = " ".join(flag for flag, wanted in flags.items() if wanted)
    sort = None if cell.sort is None else str(cell.sort)
    return tag(name, *parts, scope=scope, class_=classes, data_sort=sort)
