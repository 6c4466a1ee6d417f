"""The main table in a terminal."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table as RichTable
from rich.text import Text

from mosar.report.comparison import Comparison
from mosar.report.experiment import Experiment
from mosar.report.tables import Column, Table, TableCell, main_table


def main_table_renderable(experiment: Experiment, width: int | None = None) -> RichTable:
    """The main table for `rich.print`: our figures and the paper's differences, as much of it as
    `width` columns hold (default: the terminal's)."""
    table = main_table(Comparison(experiment), grouped=False)
    room = width or Console().width
    unbounded = Console(width=10_000)
    for level in range(_LEVELS):
        result = _renderable(table, level)
        if Measurement.get(unbounded, unbounded.options, result).maximum <= room:
            break
    return result


def main_table_text(experiment: Experiment, width: int = 100) -> str:
    """The same as plain text."""
    console = Console(width=width, color_system=None, force_terminal=False)
    with console.capture() as captured:
        console.print(main_table_renderable(experiment, width))
    return captured.get()


# What a narrow terminal leaves out, in this order: the spread of the reach, the paper's columns,
# all spreads, the differences.
_LEVELS = 5


def _keeps(column: Column, level: int) -> bool:
    if not column.brief or (level >= 2 and column.label.startswith("paper")):
        return False
    return level < 4 or not column.group.startswith("vs")


def _text(cell: TableCell, column: Column, level: int) -> str:
    text = cell.text.replace(" ± ", "±").replace(" %", "%")
    if level >= 3 or (level >= 1 and column.group == "reach"):
        mean, plus_minus, _ = text.partition("±")
        return mean + ("%" if plus_minus and text.endswith("%") else "")
    return text


def _renderable(table: Table, level: int) -> RichTable:
    shown = [index for index, column in enumerate(table.columns) if _keeps(column, level)]
    result = RichTable(
        box=box.SIMPLE_HEAD, title=table.title, title_justify="left", padding=(0, 1, 0, 0)
    )
    previous = ""
    for index in shown:
        column = table.columns[index]
        group = "" if column.group == previous else column.group
        previous = column.group
        # "perplexity, 4×" becomes two short lines.
        words = group.replace("perplexity", "ppl").split(",")
        head = [*(word.strip() for word in words), ""][:2]
        result.add_column(
            "\n".join([*head, column.label.replace("paper, ", "paper ")]).strip("\n"),
            justify="right" if column.numeric else "left",
            no_wrap=True,
            vertical="bottom",
        )
    for row in table.rows:
        result.add_row(
            *(
                Text(
                    _text(row[index], table.columns[index], level),
                    style="bold" if row[index].best else "dim" if row[index].muted else "",
                )
                for index in shown
            )
        )
    return result
