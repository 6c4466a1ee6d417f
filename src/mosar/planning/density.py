"""Support density and kept keys at any context, from shares of regimes that trained models chose.

    rho(n)  = Σ_mn P_mn f_mn(n),   f_mn(n) = share of n tokens' causal pairs with d <= delta_mn
    kept(n) = Σ_n k_n min(n, max_m delta_mn)

P_mn is the share of query and key choices (m, n), mean over layers: queries and keys are taken to
choose independently of each other and of position. On the records of `results/small` that is within
1 % of the exact count; docs/plan.md has the table. Contexts are factors of the training length.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from statistics import fmean
from typing import Any

from mosar.core.config import MoSARConfig
from mosar.core.regimes import support_reach
from mosar.planning.errors import PlanError
from mosar.planning.lines import Basis
from mosar.records import EvaluationRecord, Record, read_records

Matrix = tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class Point:
    """What a trained model chose at one length."""

    factor: float
    """Length over training length."""
    pairs: Matrix
    """P: [query regime][key regime], sums to 1."""
    density: float | None = None
    """The exact count where there is one, mean over seeds."""


@dataclass(frozen=True)
class DensityCurve:
    name: str
    source: str
    points: tuple[Point, ...]
    """By increasing factor."""
    train_length: int | None = None
    """Of the model that was counted; its counts are measurements for that length only."""

    def shares(self, factor: float) -> Matrix:
        """P at a factor: between points by the logarithm, beyond them as at the last."""
        points = self.points
        if factor <= points[0].factor:
            return points[0].pairs
        if factor >= points[-1].factor:
            return points[-1].pairs
        right = next(i for i, point in enumerate(points) if point.factor >= factor)
        low, high = points[right - 1], points[right]
        t = math.log(factor / low.factor) / math.log(high.factor / low.factor)
        return tuple(
            tuple((1 - t) * a + t * b for a, b in zip(*rows, strict=True))
            for rows in zip(low.pairs, high.pairs, strict=True)
        )

    def density(self, config: MoSARConfig, context: int) -> tuple[float, Basis, str]:
        """rho at a context, whether it was measured, and how it is known."""
        factor = context / config.max_length
        for point in self.points:
            if point.density is None or not math.isclose(point.factor, factor):
                continue
            if self.train_length == config.max_length:
                return point.density, "measured", f"counted: {self.source}"
            how = f"counted at {factor:g}x the length of another model: {self.source}"
            return point.density, "modelled", how
        beyond = "" if factor <= self.points[-1].factor else ", beyond what was measured"
        rho = modelled_density(self.shares(factor), config, context)
        return rho, "modelled", f"from shares of {self.source}{beyond}"

    def kept_keys(self, config: MoSARConfig, context: int) -> float:
        """Keys of a layer that a cache with eviction holds after so many tokens."""
        pairs = self.shares(context / config.max_length)
        reach = support_reach(config)
        keys = [sum(column) for column in zip(*pairs, strict=True)]
        far = [float(value) for value in reach.max(dim=0).values]
        kept = [math.floor(min(reach, context)) for reach in far]
        return sum(share * count for share, count in zip(keys, kept, strict=True))

    def last_keys(self, config: MoSARConfig, context: int) -> float:
        """Keys that one more token reads after so many, itself included."""
        pairs, reach = self.shares(context / config.max_length), support_reach(config)
        return sum(
            share * min(context, math.floor(min(float(reach[m, n]), context)) + 1)
            for m, row in enumerate(pairs)
            for n, share in enumerate(row)
        )


def covered(reach: float, context: int) -> float:
    """f: the share of the causal pairs of a context within a reach (inclusive)."""
    farthest = min(math.floor(min(reach, context)), context - 1)
    inside = (farthest + 1) * context - farthest * (farthest + 1) / 2
    return inside / (context * (context + 1) / 2)


def modelled_density(pairs: Matrix, config: MoSARConfig, context: int) -> float:
    reach = support_reach(config)
    if (len(pairs), len(pairs[0])) != tuple(reach.shape):
        raise PlanError(
            f"density curves are of {len(pairs)} regimes, the model has {config.num_regimes}; "
            "give --density a number"
        )
    return sum(
        share * covered(float(reach[m, n]), context)
        for m, row in enumerate(pairs)
        for n, share in enumerate(row)
    )


def outer(query: Sequence[float], key: Sequence[float]) -> Matrix:
    return tuple(tuple(q * k for k in key) for q in query)


def constant_curve(density: float) -> DensityCurve:
    """A density that the user states, whatever the context."""
    return _Stated("stated", "the given number", (Point(1.0, ((1.0,),), density),))


class _Stated(DensityCurve):
    def density(self, config: MoSARConfig, context: int) -> tuple[float, Basis, str]:
        rho = self.points[0].density
        assert rho is not None
        return rho, "modelled", "as given"

    def kept_keys(self, config: MoSARConfig, context: int) -> float:
        return float(context)

    def last_keys(self, config: MoSARConfig, context: int) -> float:
        return self.density(config, context)[0] * context


def packaged_curves() -> dict[str, DensityCurve]:
    """The curves that come with the package, by "source/variant"."""
    text = files("mosar.planning").joinpath("density.json").read_text(encoding="utf-8")
    return {name: _decode(name, values) for name, values in json.loads(text).items()}


def curves_from_records(folder: Path) -> dict[str, DensityCurve]:
    """A curve for each routed variant, from the evaluations below a folder; mean over seeds."""
    found: dict[str, dict[float, list[EvaluationRecord]]] = {}
    for path in sorted(folder.rglob("*.jsonl")):
        for record in _read(path):
            if isinstance(record, EvaluationRecord) and record.routing == "sparse":
                by_factor = found.setdefault(record.cell.variant, {})
                by_factor.setdefault(record.length / record.train_length, []).append(record)
    curves = {}
    for variant, by_factor in found.items():
        every = [record for records in by_factor.values() for record in records]
        seeds = len({record.cell.seed for record in every})
        lengths = {record.train_length for record in every}
        points = [
            Point(
                factor,
                _mean([_pairs(record) for record in records]),
                fmean(record.density for record in records),
            )
            for factor, records in sorted(by_factor.items())
        ]
        source = f"{folder.name}, {seeds} seed{'s' * (seeds > 1)}"
        name = f"{folder.name}/{variant}"
        trained = lengths.pop() if len(lengths) == 1 else None
        curves[name] = DensityCurve(name, source, tuple(points), trained)
    return curves


def _read(path: Path) -> list[Record]:
    try:
        return read_records(path)
    except OSError as error:
        raise PlanError(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise PlanError(str(error)) from None


def _pairs(record: EvaluationRecord) -> Matrix:
    sides = zip(record.shares_top1["query"], record.shares_top1["key"], strict=True)
    return _mean([outer(query, key) for query, key in sides])


def _mean(matrices: Sequence[Matrix]) -> Matrix:
    return tuple(
        tuple(fmean(entries) for entries in zip(*rows, strict=True))
        for rows in zip(*matrices, strict=True)
    )


def encode_curves(curves: dict[str, DensityCurve]) -> str:
    """As `density.json` holds them, a point a line."""
    encoded = []
    for name, curve in curves.items():
        points = [
            json.dumps(
                {
                    "factor": point.factor,
                    "density": None if point.density is None else round(point.density, 6),
                    "pairs": [[round(entry, 6) for entry in row] for row in point.pairs],
                }
            )
            for point in curve.points
        ]
        listed = ",\n  ".join(points)
        encoded.append(
            f' {json.dumps(name)}: {{"source": {json.dumps(curve.source)}, '
            f'"train_length": {json.dumps(curve.train_length)}, "points": [\n  {listed}\n ]}}'
        )
    return "{\n" + ",\n".join(encoded) + "\n}\n"


def _decode(name: str, values: dict[str, Any]) -> DensityCurve:
    points = [
        Point(p["factor"], tuple(tuple(row) for row in p["pairs"]), p["density"])
        for p in values["points"]
    ]
    return DensityCurve(name, values["source"], tuple(points), values["train_length"])
