"""Tables of the page: sortable, in a box of their own, the paper's figures beneath ours."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from itertools import groupby

from mosar.report.palette import Look
from mosar.report.svg import colour
from mosar.report.tables import Column, Table, TableCell


def table_block(table: Table, looks: dict[str, Look]) -> str:
    caption = f'<p class="note">{escape(table.caption)}</p>' if table.caption else ""
    long = table.name in _REFERENCE
    body = (
        f'<div class="scroll" tabindex="0" role="group" aria-label="{escape(table.title)}">'
        f"{_table(table, looks)}</div>"
    )
    if long:
        # Reference matter: there when it is wanted.
        opened = " open" if len(table.rows) <= 12 else ""
        return (
            f'<details class="card flush" id="table-{table.name}"{opened}>'
            f"<summary><h3>{escape(table.title)}</h3></summary>{body}{caption}</details>"
        )
    return (
        f'<div class="card flush" id="table-{table.name}"><h3>{escape(table.title)}</h3>'
        f"{body}{caption}</div>"
    )


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


def _table(table: Table, looks: dict[str, Look]) -> str:
    columns, rows, keys = _stacked(table)
    labels = "".join(
        f'<th scope="col" class="{"number" if column.numeric else "text"}" aria-sort="none">'
        f'<button type="button">{escape(column.label)}</button></th>'
        for column in columns
    )
    body = []
    for index, row in enumerate(rows):
        look = looks.get(keys[index]) if keys else None
        style = f' style="{colour(look)}"' if look else ""
        cells = [
            _table_cell(stack, column.numeric, place == 0, bool(style))
            for place, (column, stack) in enumerate(zip(columns, row, strict=True))
        ]
        body.append(f"<tr{style}>{''.join(cells)}</tr>")
    return (
        f'<table class="sortable"><thead>{_group_row(columns)}<tr>{labels}</tr></thead>'
        f"<tbody>{''.join(body)}</tbody></table>"
    )


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


def _group_row(columns: list[Column]) -> str:
    if not any(column.group for column in columns):
        return ""
    cells = []
    for group, members in groupby(columns, key=lambda column: column.group):
        span = len(list(members))
        tag, scope = ("th", ' scope="colgroup"') if group else ("td", "")
        cells.append(f'<{tag} colspan="{span}"{scope}>{escape(group)}</{tag}>')
    return f'<tr class="groups">{"".join(cells)}</tr>'


def _table_cell(stack: _Stack, numeric: bool, first: bool, dot: bool) -> str:
    cell = stack.ours
    flags = {
        "number": numeric,
        "brief": not numeric and len(cell.text) <= 24,
        "best": cell.best,
        "muted": cell.muted,
    }
    classes = " ".join(name for name, wanted in flags.items() if wanted)
    kind = f' class="{classes}"' if classes else ""
    sort = f' data-sort="{escape(str(cell.sort))}"' if cell.sort is not None else ""
    mark = '<i class="swatch" aria-hidden="true"></i>' if first and dot else ""
    tag, scope = ("th", ' scope="row"') if first else ("td", "")
    theirs = ""
    if stack.theirs is not None:
        best = " best" if stack.theirs.best else ""
        theirs = f'<small class="theirs{best}">{escape(stack.theirs.text)}</small>'
    return f"<{tag}{scope}{kind}{sort}>{mark}{escape(cell.text)}{theirs}</{tag}>"
