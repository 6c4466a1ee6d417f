"""Parameters of the decoder, counted from its configuration, and a rank's part of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple

from mosar.model.config import ModelConfig
from mosar.training.config import RunConfig
from mosar.training.mesh import Mesh


class Part(NamedTuple):
    """Parameters of one kind, of the whole model."""

    name: str
    count: int
    weights: int
    """Those among them of matrices that every token is multiplied with."""
    split: Literal["whole", "heads", "keys"]
    """What tensor-parallel ranks hold: all of it, their part, or that of the key heads."""
    place: Literal["root", "layers", "geometry"] = "layers"


def parameter_parts(config: RunConfig) -> list[Part]:
    """All parameters; their sum is exactly the number that the model has."""
    model = config.model
    layers, size = model.num_layers, model.hidden_size
    query, key = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    head = model.vocab_size * size
    parts = [
        Part("embedding (and output head)", head, head, "whole", "root"),
        _matrix("query and output projections", layers * 2 * size * query, "heads"),
        _matrix("key and value projections", layers * 2 * size * key, "keys"),
        _matrix("feed-forward", layers * 3 * size * model.ffn_size, "heads"),
        Part("norms", layers * 4 * size, 0, "whole"),
        Part("final norm", size, 0, "whole", "root"),
    ]
    geometry = config.attention.build(model.head_shape)
    return parts + [
        Part(part.name, layers * part.count, layers * part.weights, part.split, "geometry")
        for part in geometry.parameter_parts()
    ]


def _matrix(name: str, count: int, split: Literal["heads", "keys"]) -> Part:
    return Part(name, count, count, split)


def total(parts: Iterable[Part]) -> int:
    return sum(part.count for part in parts)


def ways(part: Part, model: ModelConfig, mesh: Mesh) -> int:
    """Over how many tensor-parallel ranks a part is divided."""
    if part.split == "whole" or (part.split == "keys" and mesh.copies_keys(model.num_kv_heads)):
        return 1
    return mesh.tensor


def tensor_part(parts: Iterable[Part], model: ModelConfig, mesh: Mesh) -> float:
    """What one tensor-parallel rank holds before sharding."""
    return sum(part.count / ways(part, model, mesh) for part in parts)
