"""Tables in a terminal: they fit its width, and no figure is left out."""

from io import StringIO

import pytest
from rich.console import Console

from mosar.terminal import TerminalTable, table_console

TABLE = TerminalTable(
    title="perplexity of a run",
    heading=["length", "routing", *(f"column {number}" for number in range(12))],
    rows=[
        [str(length), routing, *(f"{length + number}.{number}" for number in range(12))]
        for length in (128, 256)
        for routing in ("soft", "sparse")
    ],
    num_keys=2,
    left_aligned=("routing",),
    has_sections=True,
)


@pytest.mark.parametrize("width", [40, 80, 100, 400])
def test_a_table_fits_the_width_with_every_figure(width):
    console = Console(width=width, file=StringIO())
    console.print(TABLE)
    text = console.file.getvalue()
    lines = text.splitlines()
    assert max(map(len, lines)) <= width
    assert all(cell in text for row in TABLE.rows for cell in row)
    parts = sum(line.startswith("┏") for line in lines)
    assert parts == 1 if width == 400 else parts > 1
    # Every part says which rows it has, and has a line between the two lengths.
    assert text.count("routing") == parts == text.count("├")
    assert "…" not in text


def test_without_a_terminal_tables_are_not_split(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert table_console().width >= 160
