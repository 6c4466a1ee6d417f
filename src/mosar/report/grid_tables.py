"""Tables along the axes of a grid."""

from __future__ import annotations

from mosar.records import Cell
from mosar.report.comparison import Comparison, perplexity_of, relative_percent
from mosar.report.formats import MISSING, percent, perplexity, setting, share, slug, times
from mosar.report.tables import Column, Table, TableCell, estimate_cell, four_share, plain_cell


def change_table(c: Comparison) -> Table:
    """Variants with one setting changed at a time, against the same variant without the change."""
    rows, keys = [], []
    for variant, changes in c.changes.items():
        for change, cells in changes.items():
            row = [plain_cell(f"{c.looks[variant].label}, {change or 'unchanged'}")]
            for factor in c.ends:
                own, base = (
                    c.along_axis(some, factor, None, perplexity_of)
                    for some in (cells, changes.get("", []))
                )
                against = relative_percent(own, base) if change else None
                row += [estimate_cell(own, perplexity), estimate_cell(against, percent)]
                row.append(estimate_cell(c.density_of(cells, factor), four_share))
            seeds = len({cell.seed for cell in cells})
            rows.append((*row, plain_cell(str(seeds), seeds)))
            keys.append(variant)
    columns = [Column("variant, change", numeric=False)]
    for factor in c.ends:
        names = ("perplexity", "vs unchanged", "density ρ")
        columns += [Column(name, times(factor)) for name in names]
    columns.append(Column("seeds"))
    return Table(
        name="changes",
        title="One change at a time",
        caption="Each row changes one setting of a variant. Perplexity is that of the routing it "
        "was trained with; differences are taken within each seed.",
        columns=tuple(columns),
        rows=tuple(rows),
        keys=tuple(keys),
    )


def axis_table(c: Comparison, key: str) -> Table:
    """The figures of the charts along an axis of a grid: every value at the ends of the lengths."""
    rows, keys = [], []
    for variant in c.looks:
        for value, by_variant in c.axes[key]:
            cells = by_variant.get(variant, [])
            for factor in c.ends:
                figures = _figures(c, cells, factor)
                if any(cell.text != MISSING for cell in figures):
                    name = f"{c.looks[variant].label}, {setting(value)}"
                    rows.append((plain_cell(name), plain_cell(times(factor), factor), *figures))
                    keys.append(variant)
    return Table(
        name=slug(f"along-{key}"),
        title=f"Along {key}",
        caption="Perplexity of the routing that was trained, of top-1 and of sparse routing; what "
        "sparse execution costs against the first, within each seed; the exact density; and the "
        "share of top-1's attention that sparse execution discards, mean over the layers.",
        columns=(
            *(Column(name, numeric=False) for name in (f"variant, {key}", "length")),
            *(Column(name, "perplexity") for name in ("as trained", "top-1", "sparse", "gap")),
            Column("density ρ"),
            Column("discarded mass"),
        ),
        rows=tuple(rows),
        keys=tuple(keys),
    )


def _figures(c: Comparison, cells: list[Cell], factor: float) -> list[TableCell]:
    own, top1, sparse = (
        c.along_axis(cells, factor, routing, perplexity_of) for routing in (None, "top1", "sparse")
    )
    return [
        *(estimate_cell(estimate, perplexity) for estimate in (own, top1, sparse)),
        estimate_cell(c.gap_of(cells, factor), percent),
        estimate_cell(c.density_of(cells, factor), four_share),
        estimate_cell(c.mass_of(cells, factor), share),
    ]
