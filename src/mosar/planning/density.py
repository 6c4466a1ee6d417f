"""Support density and kept keys at any context, from the routing shares of trained models.

    rho(n)  = Σ_mn P_mn f_mn(n),   f_mn(n) = share of n tokens' causal pairs with d <= delta_mn
    kept(n) = Σ_n k_n min(n, max_m delta_mn)

P_mn is the share of pairs whose query chose m and whose key chose n, averaged over layers. We
assume that queries and keys choose independently of each other and of their position. For the
records of `results/small`, this is within 1 % of the exact count; docs/plan.md has the table.
Contexts are multiples of the training length. Sinks are added to both, because every query reads
them and no cache evicts them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from statistics import fmean
from typing import Any

from mosar.core.config import MoSARConfig
from mosar.core.regimes import support_reach
from mosar.errors import PlanError, TrainingError
from mosar.evaluation.store import EVALUATIONS
from mosar.planning.lines import Basis
from mosar.records import EvaluationRecord, Record, TrainingRecord, read_records
from mosar.training.config import RunConfig
from mosar.training.run_folder import METRICS, read_config

Matrix = tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class Point:
    """What a trained model chose at one length."""

    factor: float
    """Length divided by the training length."""
    pairs: Matrix
    """P: [query regime][key regime], sums to 1."""
    density: float | None = None
    """The exact density if it was counted, mean over seeds."""


@dataclass(frozen=True)
class DensityCurve:
    name: str
    source: str
    points: tuple[Point, ...]
    """By increasing factor."""
    geometry: MoSARConfig | None = None
    """The geometry of the models that were counted; the counts are measurements only for it. None
    if the models differ, or it is not known."""

    def shares(self, config: MoSARConfig, context: int) -> Matrix:
        """P at a context: interpolated in log(context) between points, constant beyond them."""
        points, factor = self.points, context / config.max_length
        if len(points[0].pairs) != config.num_regimes:
            raise PlanError(
                f"the density curve has {len(points[0].pairs)} regimes, but the model has "
                f"{config.num_regimes}; give --density a number"
            )
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
        """rho at a context, whether it was measured, and where it comes from."""
        factor = context / config.max_length
        for point in self.points:
            if point.density is None or self.geometry != config:
                break
            if math.isclose(point.factor, factor):
                return point.density, "measured", f"counted: {self.source}"
        beyond = "" if factor <= self.points[-1].factor else ", beyond what was measured"
        rho = modelled_density(self.shares(config, context), config, context)
        return rho, "modelled", f"from shares of {self.source}{beyond}"

    def kept_keys(self, config: MoSARConfig, context: int) -> float:
        """The number of keys in a layer's cache after this many tokens, with eviction."""
        pairs = self.shares(config, context)
        shares = [sum(column) for column in zip(*pairs, strict=True)]
        near = [_reached(far, context) for far in support_reach(config).amax(dim=0).tolist()]
        kept = [keys + min(config.num_sinks, context - keys) for keys in near]
        return sum(share * count for share, count in zip(shares, kept, strict=True))

    def last_keys(self, config: MoSARConfig, context: int) -> float:
        """The number of keys that the next token reads, including its own."""

        def read(reach: float) -> int:
            near = min(context, _reached(reach, context) + 1)
            return near + min(config.num_sinks, context - near)

        return _mean_of_pairs(self.shares(config, context), config, read)


def covered(reach: float, context: int, sinks: int = 0) -> float:
    """f: the share of a context's causal pairs within a reach (inclusive), or with a sink."""
    farthest = min(_reached(reach, context), context - 1)
    inside = (farthest + 1) * context - farthest * (farthest + 1) / 2
    # For the sink at j, add the queries beyond the reach.
    inside += sum(max(0, context - 1 - farthest - j) for j in range(sinks))
    return inside / (context * (context + 1) / 2)


def _reached(reach: float, context: int) -> int:
    """The number of keys within a reach of the token after a context; the reach may be infinite."""
    return math.floor(min(reach, context))


def modelled_density(pairs: Matrix, config: MoSARConfig, context: int) -> float:
    return _mean_of_pairs(pairs, config, lambda reach: covered(reach, context, config.num_sinks))


def _mean_of_pairs(pairs: Matrix, config: MoSARConfig, count: Callable[[float], float]) -> float:
    """Σ_mn P_mn count(delta_mn)."""
    return sum(
        share * count(reach)
        for shares, reaches in zip(pairs, support_reach(config).tolist(), strict=True)
        for share, reach in zip(shares, reaches, strict=True)
    )


def outer(query: Sequence[float], key: Sequence[float]) -> Matrix:
    return tuple(tuple(q * k for k in key) for q in query)


def constant_curve(density: float, why: str = "as given") -> DensityCurve:
    """A given density, the same at every context."""
    return _Stated("stated", why, (Point(1.0, ((1.0,),), density),))


class _Stated(DensityCurve):
    def density(self, config: MoSARConfig, context: int) -> tuple[float, Basis, str]:
        rho = self.points[0].density
        assert rho is not None
        return rho, "modelled", self.source

    def kept_keys(self, config: MoSARConfig, context: int) -> float:
        return float(context)

    def last_keys(self, config: MoSARConfig, context: int) -> float:
        return self.density(config, context)[0] * context


def packaged_curves() -> dict[str, DensityCurve]:
    """The curves that come with the package, by "source/variant"."""
    text = files("mosar.planning").joinpath("density.json").read_text(encoding="utf-8")
    return {name: _decode(name, values) for name, values in json.loads(text).items()}


def curves_from_records(folder: Path) -> dict[str, DensityCurve]:
    """A curve for each routed variant, from the evaluations below a folder; mean over seeds.

    The folder is an evaluated run, an experiment, or a folder with files of records.
    """
    folder = folder.resolve()
    found: dict[str, dict[float, list[EvaluationRecord]]] = {}
    geometries: dict[str, set[MoSARConfig | None]] = {}
    for record, geometry in _evaluations_of_run(folder) or _evaluations_below(folder):
        by_factor = found.setdefault(record.cell.variant, {})
        by_factor.setdefault(record.length / record.train_length, []).append(record)
        geometries.setdefault(record.cell.variant, set()).add(geometry)
    curves = {}
    for variant, by_factor in found.items():
        seeds = len({r.cell.seed for records in by_factor.values() for r in records})
        trained = geometries[variant]
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
        geometry = trained.pop() if len(trained) == 1 else None
        curves[name] = DensityCurve(name, source, tuple(points), geometry)
    return curves


Evaluated = tuple[EvaluationRecord, MoSARConfig | None]


def _evaluations_of_run(folder: Path) -> list[Evaluated]:
    """The evaluations of a run's newest evaluated step; empty if the folder is not a run."""
    run = folder.parent if folder.name == EVALUATIONS else folder
    records = [r for path in sorted((run / EVALUATIONS).glob("*.json")) for r in _sparse(path)]
    if not records:
        return []
    try:
        geometry = read_config(run).regimes
    except TrainingError:
        geometry = None
    newest = max(record.step for record in records)
    return [(record, geometry) for record in records if record.step == newest]


def _evaluations_below(folder: Path) -> list[Evaluated]:
    """The evaluations in all files of records; a cell's file also has its training record."""
    found = []
    for path in sorted(folder.rglob("*.jsonl")):
        if path.name == METRICS:
            continue
        trained = {r.cell.name: r for r in _read(path) if isinstance(r, TrainingRecord)}
        for record in _sparse(path):
            run = trained.get(record.cell.name)
            found.append((record, None if run is None else _geometry_of_record(run)))
    return found


def _sparse(path: Path) -> list[EvaluationRecord]:
    return [r for r in _read(path) if isinstance(r, EvaluationRecord) and r.routing == "sparse"]


def _geometry_of_record(record: TrainingRecord) -> MoSARConfig | None:
    """The geometry of a training record; None if this version cannot read its configuration."""
    try:
        return RunConfig.from_dict(record.config).regimes
    except ValueError:
        return None


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


def _decode(name: str, values: dict[str, Any]) -> DensityCurve:
    points = [
        Point(p["factor"], tuple(tuple(row) for row in p["pairs"]), p["density"])
        for p in values["points"]
    ]
    geometry = values["geometry"] and MoSARConfig.from_dict(values["geometry"])
    return DensityCurve(name, values["source"], tuple(points), geometry)
