"""The part of the decoder's parameters that a rank holds."""

from __future__ import annotations

from collections.abc import Iterable

from mosar.model.config import ModelConfig
from mosar.model.parameters import Part
from mosar.training.distributed.mesh import Mesh


def ways(part: Part, model: ModelConfig, mesh: Mesh) -> int:
    """Over how many tensor-parallel ranks a part is divided."""
    if part.split == "whole" or (part.split == "keys" and mesh.copies_keys(model.num_kv_heads)):
        return 1
    return mesh.tensor


def tensor_part(parts: Iterable[Part], model: ModelConfig, mesh: Mesh) -> float:
    """What one tensor-parallel rank holds before sharding."""
    return sum(part.count / ways(part, model, mesh) for part in parts)
