"""How ranks divide the work: gpus = data x shard x tensor, as `distributed.` has it.

data     copies of the model, each with its part of the batch
shard    ranks that divide parameters, gradients and optimizer, and the batch too
tensor   ranks that divide the heads and the feed-forward of every layer
"""

from __future__ import annotations

from typing import NamedTuple

from mosar.model.config import ModelConfig
from mosar.planning.errors import PlanError


class Mesh(NamedTuple):
    data: int = 1
    shard: int = 1
    tensor: int = 1

    @property
    def gpus(self) -> int:
        return self.data * self.shard * self.tensor

    @property
    def readers(self) -> int:
        """Parts of the batch."""
        return self.data * self.shard

    def kv_parts(self, model: ModelConfig) -> int:
        """Ranks that divide the key heads; where there are fewer heads, each holds all of them."""
        return self.tensor if model.num_kv_heads % self.tensor == 0 else 1


def tensor_obstacle(model: ModelConfig, tensor: int, groups: int = 1) -> str | None:
    """Why so many ranks cannot divide a layer; None where they can."""
    for name in ("num_heads", "ffn_size"):
        if getattr(model, name) % tensor:
            return f"--tensor {tensor} must divide model.{name}={getattr(model, name)}"
    if model.num_kv_heads % tensor and tensor % model.num_kv_heads:
        return (
            f"--tensor {tensor} must divide model.num_kv_heads={model.num_kv_heads}, "
            "or be a multiple of it"
        )
    if groups > 1 and groups % tensor:
        return f"--tensor {tensor} must divide attention.routing_groups={groups}"
    return None


def fitting_meshes(
    model: ModelConfig,
    gpus: int,
    data: int | None,
    shard: int | None,
    tensor: int | None,
    *,
    groups: int = 1,
) -> list[Mesh]:
    """Every mesh of so many ranks with the sizes that are given, the simplest first.

    `groups`: routing groups, of which each stays on one rank. Simple is little tensor parallelism,
    then little sharding: each costs communication.
    """
    given = {"--data": data, "--shard": shard, "--tensor": tensor}
    product = 1
    for size in given.values():
        product *= size or 1
    named = " x ".join(f"{name} {size}" for name, size in given.items() if size)
    if gpus % product or (all(given.values()) and gpus != product):
        raise PlanError(f"{named} must multiply to --gpus {gpus}, or divide it, got {product}")
    if tensor is not None and (obstacle := tensor_obstacle(model, tensor, groups)) is not None:
        raise PlanError(obstacle)
    meshes = []
    for t in _divisors(gpus) if tensor is None else [tensor]:
        if tensor_obstacle(model, t, groups) is not None or gpus % t:
            continue
        for s in _divisors(gpus // t) if shard is None else [shard]:
            d, left_over = divmod(gpus, t * s)
            if not left_over and data in (None, d):
                meshes.append(Mesh(d, s, t))
    if not meshes:
        raise PlanError(f"no mesh of {gpus} ranks has {named} and fits the model's heads")
    return meshes


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
