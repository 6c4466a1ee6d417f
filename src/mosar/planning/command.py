"""What `mosar plan` does between its options and its output."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mosar.errors import PlanError
from mosar.planning.density import (
    DensityCurve,
    constant_curve,
    curves_from_records,
    packaged_curves,
)
from mosar.planning.plan import Plan, make_plan
from mosar.training.config import RunConfig, resolve_config

ASSUMED_VOCABULARY = 4096


def plan_command(
    *,
    preset: str,
    variant: str,
    context: int | None,
    gpus: int | None,
    data: int | None,
    shard: int | None,
    tensor: int | None,
    windows: int | None,
    memory: float,
    density: str | None,
    changes: Sequence[str],
) -> Plan:
    """The plan that the options ask for; ValueError for wrong settings, PlanError for misfits."""
    config = resolve_config(
        variant=variant,
        preset=preset,
        data=".",
        vocab_size=ASSUMED_VOCABULARY,
        # A plan is of GPUs, whatever it is made on: their precision counts.
        changes=["train.device=cuda", *changes],
    )
    mesh = config.distributed
    data = data or mesh.data
    shard = shard or (mesh.shard if mesh.shard > 1 else None)
    tensor = tensor or (mesh.tensor if mesh.tensor > 1 else None)
    if gpus is None:
        gpus = (data or 1) * (shard or 1) * (tensor or 1)
    return make_plan(
        config,
        context=config.model.max_length if context is None else context,
        gpus=gpus,
        data=data,
        shard=shard,
        tensor=tensor,
        windows=windows,
        limit=memory * 2**30,
        curves=choose_curves(config, density),
    )


def choose_curves(config: RunConfig, density: str | None) -> list[DensityCurve]:
    """The curves of a routed variant, the one that is asked for first; none for the others."""
    if not config.attention.geometry_class.routed:
        if density is not None:
            raise PlanError(f"--density is for routed variants, {config.variant} has no routers")
        return []
    packaged = packaged_curves()
    sources = sorted({name.split("/")[0] for name in packaged})
    if density is None:
        # The published model has published shares; smaller ones are nearer to our own records.
        density = "paper" if config.preset == "paper" else "small"
    if density in sources:
        order = [density, *(source for source in sources if source != density)]
        curves = [packaged.get(f"{source}/{config.variant}") for source in order]
        if None in curves:
            raise PlanError(
                f"there is no density curve of {config.variant} with attention.geometry="
                f"{config.attention.geometry}; give --density a number or a folder with records, "
                "or name the routed variant with --variant"
            )
        return [curve for curve in curves if curve is not None]
    try:
        number = float(density)
    except ValueError:
        number = None
    if number is not None:
        if not 0 < number <= 1:
            raise PlanError(f"--density must be a share in (0, 1], got {density}")
        return [constant_curve(number)]
    folder = Path(density).resolve()
    if not density or not folder.is_dir():
        raise PlanError(
            f"--density must be {', '.join(sources)}, a number, or a folder with records, "
            f"got {density!r}"
        )
    found = curves_from_records(folder)
    curve = found.get(f"{folder.name}/{config.variant}")
    if curve is None:
        raise PlanError(
            f"no evaluation of {config.variant} under sparse routing below {density}; there are "
            f"{', '.join(found) or 'none at all'}"
        )
    return [curve]
