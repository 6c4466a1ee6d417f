"""How the density falls with length: the paper's cost n·w + L(n), fitted to what was counted.

    keys(n) = w + c (n + 1) / 2,   rho(n) = keys(n) / ((n + 1) / 2) = 2 w / (n + 1) + c

keys(n) is what a query reads on average, of the (n + 1) / 2 keys at or before it. w keys are read
at any length, and a share c of all causal pairs: where c > 0, the cost is quadratic in the end.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mosar.report.comparison import Comparison
from mosar.report.formats import MISSING, number, percent, share, times
from mosar.report.tables import Column, Table, TableCell
from mosar.report.verdicts import exact_density

PREDICTED = (32_768, 131_072)
FITTED_UP_TO = 16
"""Multiples of the training length; longer ones are left out, to check the law."""


@dataclass(frozen=True)
class DensityLaw:
    keys: float
    """w, the keys that a query reads at any length."""
    share: float
    """c, of all causal pairs."""
    lengths: tuple[int, ...] = ()
    """Those that it was fitted to, in tokens."""
    error: float = 0.0
    """The largest relative error there."""

    def density(self, length: int) -> float:
        return min(1.0, 2 * self.keys / (length + 1) + self.share)


def fit_density_law(counted: Mapping[int, float]) -> DensityLaw | None:
    """By least squares of the relative errors, w and c not negative; None below three lengths.

    counted: the exact density by length in tokens. Where all pairs are read, it tells nothing.
    """
    counted = {length: density for length, density in counted.items() if 0 < density < 1}
    if len(counted) < 3:
        return None
    # a w + b c = 1 for every length.
    rows = [(2 / ((length + 1) * density), 1 / density) for length, density in counted.items()]
    aa, ab, bb = (sum(row[i] * row[j] for row in rows) for i, j in ((0, 0), (0, 1), (1, 1)))
    a, b = (sum(row[i] for row in rows) for i in (0, 1))
    determinant = aa * bb - ab * ab
    keys, constant = (a * bb - b * ab) / determinant, (b * aa - a * ab) / determinant
    if constant < 0:
        keys, constant = a / aa, 0.0
    elif keys < 0:
        keys, constant = 0.0, b / bb
    law = DensityLaw(keys, constant)
    error = max(abs(law.density(length) / density - 1) for length, density in counted.items())
    return DensityLaw(keys, constant, tuple(sorted(counted)), error)


def law_table(c: Comparison) -> Table:
    """The law of each variant with routers that was counted at three lengths or more."""
    length = c.train_length
    found = {variant: _law_row(c, variant, length) for variant in c.routed} if length else {}
    rows = {variant: row for variant, row in found.items() if row is not None}
    return Table(
        name="density_law",
        title="The density law",
        caption="Fitted to the exact densities: a query reads w keys at any length, and a share c "
        "of all pairs. If c is not 0, the cost is quadratic in the end. Error: the largest where "
        f"it was fitted. Lengths beyond {times(FITTED_UP_TO)} are left out of the fit, and the "
        "longest checks it. The law assumes that routers choose as they do where it was fitted; "
        "at positions that they were not trained on they may not.",
        columns=(
            *(Column(name, numeric=False) for name in ("variant", "fitted to")),
            *(Column(name) for name in ("w", "c", "error")),
            *(Column(f"{length:,}", "predicted density") for length in PREDICTED),
            *(Column(name, "check") for name in ("tokens", "predicted", "counted")),
        ),
        rows=tuple(rows.values()),
        keys=tuple(rows),
    )


def _law_row(c: Comparison, variant: str, train_length: int) -> tuple[TableCell, ...] | None:
    found = {factor: exact_density(c, variant, factor) for factor in c.factors}
    counted = {round(f * train_length): rho.mean for f, rho in found.items() if rho is not None}
    most = FITTED_UP_TO * train_length
    law = fit_density_law({n: density for n, density in counted.items() if n <= most})
    if law is None:
        return None
    checked, farthest = [TableCell(MISSING)] * 3, max(counted)
    if farthest > most:
        pair = law.density(farthest), counted[farthest]
        checked = [TableCell(f"{farthest:,}", farthest), *(TableCell(share(x, 4), x) for x in pair)]
    span = " to ".join(times(law.lengths[end] / train_length) for end in (0, -1))
    label = c.looks[variant].label
    return TableCell(label, label), TableCell(span, span), *law_cells(law), *checked


def law_cells(law: DensityLaw) -> list[TableCell]:
    """w, c, the error, and the densities at `PREDICTED`."""
    densities = [law.density(length) for length in PREDICTED]
    return [
        TableCell(number(law.keys, 1), law.keys),
        TableCell(share(law.share, 4), law.share),
        TableCell(percent(100 * law.error, signed=False), law.error),
        *(TableCell(share(density, 4), density) for density in densities),
    ]
