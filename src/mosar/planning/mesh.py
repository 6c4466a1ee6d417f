"""Meshes that fit a model, with gpus = data x shard x tensor."""

from __future__ import annotations

from collections.abc import Mapping
from math import isqrt, prod

from mosar.errors import PlanError
from mosar.training.config import RunConfig
from mosar.training.distributed.mesh import Mesh, split_obstacle


def fitting_meshes(config: RunConfig, gpus: int, sizes: Mapping[str, int]) -> list[Mesh]:
    """Every mesh of `gpus` ranks with the given sizes, the simplest first.

    Simple means little tensor parallelism, then little sharding, because each needs communication.
    """
    data, shard, tensor = (sizes.get(axis) for axis in Mesh._fields)
    product = prod(sizes.values())
    named = " x ".join(f"--{axis} {sizes[axis]}" for axis in Mesh._fields if axis in sizes)
    if gpus % product or (len(sizes) == len(Mesh._fields) and gpus != product):
        raise PlanError(f"{named} must multiply to --gpus {gpus}, or divide it, got {product}")
    obstacles = {
        t: split_obstacle(config.model, config.attention, t, f"--tensor {t}")
        for t in ([tensor] if tensor else _divisors(gpus))
    }
    if tensor and obstacles[tensor] is not None:
        raise PlanError(str(obstacles[tensor]))
    meshes = [
        Mesh(gpus // (t * s), s, t)
        for t, obstacle in obstacles.items()
        for s in ([shard] if shard else _divisors(gpus // t))
        if obstacle is None and gpus % (t * s) == 0 and data in (None, gpus // (t * s))
    ]
    if not meshes:
        raise PlanError(f"no mesh of {gpus} ranks has {named} and fits the model's heads")
    return meshes


def _divisors(number: int) -> list[int]:
    small = [n for n in range(1, isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})
