"""Meshes of so many ranks that a model fits, gpus = data x shard x tensor."""

from __future__ import annotations

from math import isqrt

from mosar.errors import PlanError
from mosar.geometries import AttentionConfig
from mosar.model.config import ModelConfig
from mosar.training.distributed.mesh import Mesh, split_obstacle


def fitting_meshes(
    model: ModelConfig,
    attention: AttentionConfig,
    gpus: int,
    data: int | None = None,
    shard: int | None = None,
    tensor: int | None = None,
) -> list[Mesh]:
    """Every mesh of so many ranks with the sizes that are given, the simplest first.

    Simple is little tensor parallelism, then little sharding: each costs communication.
    """
    given = {"--data": data, "--shard": shard, "--tensor": tensor}
    product = 1
    for size in given.values():
        product *= size or 1
    named = " x ".join(f"{name} {size}" for name, size in given.items() if size)
    if gpus % product or (all(given.values()) and gpus != product):
        raise PlanError(f"{named} must multiply to --gpus {gpus}, or divide it, got {product}")
    if tensor is not None:
        obstacle = split_obstacle(model, attention, tensor, f"--tensor {tensor}")
        if obstacle is not None:
            raise PlanError(obstacle)
    meshes = []
    for t in _divisors(gpus) if tensor is None else [tensor]:
        if split_obstacle(model, attention, t, "") is not None:
            continue
        for s in _divisors(gpus // t) if shard is None else [shard]:
            d, left_over = divmod(gpus, t * s)
            if not left_over and data in (None, d):
                meshes.append(Mesh(d, s, t))
    if not meshes:
        raise PlanError(f"no mesh of {gpus} ranks has {named} and fits the model's heads")
    return meshes


def _divisors(number: int) -> list[int]:
    small = [n for n in range(1, isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})
