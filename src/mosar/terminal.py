"""Tables in a terminal: one that is too wide continues below, with its first columns repeated."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderableType
from rich.table import Table
from rich.text import Text

# Wide enough for every column of ours.
_WIDTH_OF_FILES = 160


def table_console() -> Console:
    """A console as wide as the terminal; where there is none, tables are not split."""
    console = Console()
    if console.is_terminal:
        return console
    return Console(width=max(console.width, _WIDTH_OF_FILES))


@dataclass(frozen=True, kw_only=True)
class TerminalTable:
    """A title and rows under a heading; rich prints it in as many parts as the width needs."""

    title: str
    heading: Sequence[str]
    rows: Sequence[Sequence[str | Text]]
    num_keys: int = 1
    """So many first columns say which row it is; every part has them."""
    left_aligned: Sequence[str] = ()
    """Columns by their names; the others are aligned right."""
    has_sections: bool = False
    """Draw a line where the first column changes."""

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> Iterator[RenderableType]:
        # A table's own title would be wrapped to the width of the table.
        yield Text(self.title, style="bold")
        yield from self._parts(console, options)

    def _parts(self, console: Console, options: ConsoleOptions) -> Iterator[Table]:
        keys, rest = list(range(self.num_keys)), list(range(self.num_keys, len(self.heading)))
        unlimited = options.update(max_width=10_000)
        while rest:
            size = len(rest)
            while size > 1:
                table = self._table(keys + rest[:size])
                if console.measure(table, options=unlimited).maximum <= options.max_width:
                    break
                size -= 1
            yield self._table(keys + rest[:size])
            rest = rest[size:]

    def _table(self, columns: Sequence[int]) -> Table:
        table = Table(header_style="")
        for column in columns:
            name = self.heading[column]
            side = "left" if name in self.left_aligned else "right"
            table.add_column(name, justify=side, no_wrap=True)
        for row, following in zip(self.rows, [*self.rows[1:], None], strict=True):
            ends = self.has_sections and (following is None or following[0] != row[0])
            table.add_row(*(row[column] for column in columns), end_section=ends)
        return table
