"""A plan: parameters, operations, memory and communication of a run on a mesh, line by line."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from mosar.errors import PlanError
from mosar.planning.density import DensityCurve
from mosar.planning.lines import BASES, Basis, Line, say
from mosar.planning.mesh import fitting_meshes
from mosar.planning.sections import PEAK, Batch, Case, every_line
from mosar.training.config import RunConfig
from mosar.training.distributed.mesh import Mesh
from mosar.training.distributed.share import pass_size

FACTORS = (0.5, 1, 2, 4, 8, 16, 32)


@dataclass(frozen=True)
class Cost:
    """Attention of one token at one context under one curve, forward."""

    curve: str
    context: int
    dense: float
    """FLOP over all causal pairs."""
    sparse: float
    """FLOP inside the support."""
    density: float
    basis: Basis
    share: float
    """Attention's share of the sparse forward pass."""
    cache: float
    """Bytes of the KV cache at this context, on one rank."""
    dense_cache: float


@dataclass(frozen=True)
class Plan:
    config: RunConfig
    mesh: Mesh
    context: int
    batch: Batch
    lines: tuple[Line, ...]
    costs: tuple[Cost, ...]
    notes: tuple[str, ...]

    def value(self, section: str, name: str) -> float:
        """The number of one line."""
        return next(x.value for x in self.lines if (x.section, x.name) == (section, name))

    def to_dict(self) -> dict[str, Any]:
        return {
            "schema": 1,
            "kind": "plan",
            "preset": self.config.preset,
            "variant": self.config.variant,
            "context": self.context,
            "mesh": self.mesh._asdict(),
            "batch": vars(self.batch),
            "bases": dict(BASES),
            "lines": [vars(line) for line in self.lines],
            "attention_by_context": [vars(cost) for cost in self.costs],
            "notes": list(self.notes),
            "config": self.config.to_dict(),
        }


def make_plan(
    config: RunConfig,
    *,
    context: int,
    gpus: int,
    windows: int | None = None,
    limit: float = math.inf,
    curves: Sequence[DensityCurve] = (),
    **sizes: int | None,
) -> Plan:
    """The plan of `config` at a context; the first of `curves` is the one that lines use.

    `limit`: bytes that a rank has. `sizes`: of the mesh, `data`, `shard` and `tensor`; those that
    are not given are chosen: the simplest mesh whose memory stays below the limit.
    """
    if context < 1:
        raise PlanError(f"--context must be at least 1, got {context}")
    best: Plan | None = None
    refused: PlanError | None = None
    given = {axis: size for axis, size in sizes.items() if size is not None}
    for mesh in fitting_meshes(config, gpus, given):
        try:
            plan = _plan(config, mesh, context, windows, curves)
        except PlanError as error:
            refused = refused or error
            continue
        if plan.value(*PEAK) <= limit:
            return plan
        if best is None or plan.value(*PEAK) < best.value(*PEAK):
            best = plan
    if best is None:
        assert refused is not None
        raise refused
    short = (
        f"No such mesh fits into {say(limit, 'B')} per rank; this one needs the least. "
        "Fewer tokens in a pass (--set train.micro_batch), train.checkpoint_activations=true, or "
        "more ranks help."
    )
    return replace(best, notes=(*best.notes, short))


def _plan(
    config: RunConfig,
    mesh: Mesh,
    context: int,
    windows: int | None,
    curves: Sequence[DensityCurve],
) -> Plan:
    notes: list[str] = []
    batch = _batch(config, mesh, windows, notes)
    each = curves or [None]
    lines = every_line(Case(config, mesh, context, batch, each[0]))
    contexts = sorted({max(1, round(f * config.model.max_length)) for f in FACTORS})
    costs = [_cost(Case(config, mesh, n, batch, curve)) for curve in each for n in contexts]
    return Plan(config, mesh, context, batch, tuple(lines), tuple(costs), tuple(notes))


def _batch(config: RunConfig, mesh: Mesh, windows: int | None, notes: list[str]) -> Batch:
    train, readers = config.train, mesh.num_shares
    if windows is None:
        windows = train.windows_per_step
        if windows % readers:
            windows = readers * -(-windows // readers)
            notes.append(
                f"An update has {windows} windows: the preset's {train.windows_per_step} do not "
                f"divide among data x shard = {readers} ranks. --windows sets it."
            )
    elif windows < 1 or windows % readers:
        raise PlanError(
            f"--windows must be a multiple of data x shard = {readers} (each rank reads as many), "
            f"got {windows}"
        )
    own = windows // readers
    size = pass_size(own, train.micro_batch)
    return Batch(windows, size, own // size)


def _cost(case: Case) -> Cost:
    rho, basis, _ = case.density
    sparse = rho * case.dense_flops
    return Cost(
        curve=case.config.variant if case.curve is None else case.curve.name,
        context=case.context,
        dense=case.dense_flops,
        sparse=sparse,
        density=rho,
        basis=basis,
        share=sparse / (case.other_flops + sparse),
        cache=case.cache,
        dense_cache=case.dense_cache,
    )
