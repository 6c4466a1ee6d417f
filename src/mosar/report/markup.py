"""Tables as Markdown and as LaTeX (booktabs)."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby

from mosar.report.tables import Column, Table, TableCell

_MARKDOWN_ESCAPES = str.maketrans({c: f"\\{c}" for c in "\\|*_`<>[]#"})
# What may stand in a cell: LaTeX's own characters, and signs that pdfLaTeX has no glyph for.
_LATEX = {
    "\\": r"\textbackslash{}",
    "{": r"\{",
    "}": r"\}",
    "$": r"\$",
    "&": r"\&",
    "%": r"\%",
    "#": r"\#",
    "_": r"\_",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    '"': r"\textquotedbl{}",
    "\u2212": r"\ensuremath{-}",
    "±": r"\ensuremath{\pm}",
    "×": r"\ensuremath{\times}",
    "→": r"\ensuremath{\rightarrow}",
    "·": r"\ensuremath{\cdot}",
    "ρ": r"\ensuremath{\rho}",
    "δ": r"\ensuremath{\delta}",
    "Δ": r"\ensuremath{\Delta}",
    "≤": r"\ensuremath{\leq}",
    "≥": r"\ensuremath{\geq}",
    "≈": r"\ensuremath{\approx}",
    "∞": r"\ensuremath{\infty}",
    "–": "--",
    "—": "---",
    "…": r"\ldots{}",
    "“": "``",
    "”": "''",
    "’": "'",
    "\u00a0": "~",
}


def markdown_tables(tables: Iterable[Table], title: str) -> str:
    """One document with every table."""
    parts = [f"# {markdown(title)}\n"]
    for table in tables:
        parts.append(f"## {markdown(table.title)}\n")
        if table.caption:
            parts.append(f"{markdown(table.caption)}\n")
        parts.append(_markdown_table(table))
    return "\n".join(parts)


def _markdown_table(table: Table) -> str:
    lines = [
        _markdown_row(markdown(_full_label(column)) for column in table.columns),
        _markdown_row("---:" if column.numeric else "---" for column in table.columns),
    ]
    group = None
    for index, row in enumerate(table.rows):
        if table.groups and table.groups[index] != group:
            group = table.groups[index]
            blank = [""] * (len(table.columns) - 1)
            lines.append(_markdown_row([f"**{markdown(group)}**", *blank]))
        lines.append(_markdown_row(_markdown_cell(cell) for cell in row))
    return "\n".join(lines) + "\n"


def _markdown_row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _markdown_cell(cell: TableCell) -> str:
    text = markdown(cell.text)
    return f"**{text}**" if cell.best else text


def markdown(text: str) -> str:
    """Escapes a text so that Markdown shows it unchanged."""
    return " ".join(text.translate(_MARKDOWN_ESCAPES).split())


def _full_label(column: Column) -> str:
    return f"{column.group}: {column.label}" if column.group else column.label


def latex_tables(tables: Iterable[Table]) -> str:
    r"""A table environment each; the document needs \usepackage{booktabs} and [T1]{fontenc}."""
    head = "% Needs \\usepackage{booktabs} and \\usepackage[T1]{fontenc}; wide tables may want\n"
    head += "% \\usepackage{graphicx} and \\resizebox{\\textwidth}{!}{...} around the tabular.\n"
    return head + "\n".join(_latex_table(table) for table in tables)


def _latex_table(table: Table) -> str:
    # Sentences need columns that break lines.
    wide = not any(column.numeric for column in table.columns)
    lines = [
        r"\begin{table}[t]",
        r"\centering",
        r"\footnotesize",
        rf"\caption{{{latex(_caption(table))}}}",
        rf"\label{{tab:{latex_label(table.name)}}}",
        r"\setlength{\tabcolsep}{3pt}",
        rf"\begin{{tabular}}{{{_latex_columns(table, wide)}}}",
        r"\toprule",
        *_latex_head(table.columns),
        r"\midrule",
    ]
    group = None
    for index, row in enumerate(table.rows):
        if table.groups and table.groups[index] != group:
            if group is not None:
                lines.append(r"\addlinespace")
            group = table.groups[index]
            span = len(table.columns)
            lines.append(rf"\multicolumn{{{span}}}{{l}}{{\textit{{{latex(group)}}}}} \\")
        lines.append(" & ".join(_latex_cell(cell) for cell in row) + r" \\")
    lines += [r"\bottomrule", r"\end{tabular}", r"\end{table}", ""]
    return "\n".join(lines)


def _caption(table: Table) -> str:
    return f"{table.title}. {table.caption}" if table.caption else f"{table.title}."


def _latex_columns(table: Table, wide: bool) -> str:
    if wide and len(table.columns) == 5:
        widths = (0.3, 0.2, 0.22, 0.1, 0.14)
        return "".join(rf"p{{{width}\textwidth}}" for width in widths)
    return "".join("r" if column.numeric else "l" for column in table.columns)


def _latex_head(columns: tuple[Column, ...]) -> list[str]:
    lines = []
    if any(column.group for column in columns):
        spans, rules, start = [], [], 1
        for group, members in groupby(columns, key=lambda column: column.group):
            width = len(list(members))
            spans.append(rf"\multicolumn{{{width}}}{{c}}{{{latex(group)}}}")
            if group:
                rules.append(rf"\cmidrule(lr){{{start}-{start + width - 1}}}")
            start += width
        lines += [" & ".join(spans) + r" \\", " ".join(rules)]
    return [*lines, " & ".join(latex(column.label) for column in columns) + r" \\"]


def _latex_cell(cell: TableCell) -> str:
    text = latex(cell.text)
    return rf"\textbf{{{text}}}" if cell.best else text


def latex(text: str) -> str:
    """Escapes a text for pdfLaTeX; characters that it cannot set become question marks."""
    return "".join(
        _LATEX.get(character) or (character if character.isascii() or character in "éèüöä" else "?")
        for character in " ".join(text.split())
    )


def latex_label(name: str) -> str:
    return "".join(character if character.isalnum() else "-" for character in name)
