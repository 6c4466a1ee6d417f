"""Parameters of the decoder, counted from its configuration."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple

from mosar.geometries import AttentionConfig
from mosar.model.config import ModelConfig


class Part(NamedTuple):
    """Parameters of one kind, of the whole model."""

    name: str
    count: int
    weights: int
    """How many of them are in matrices that every token is multiplied with."""
    split: Literal["whole", "heads", "keys"]
    """What tensor-parallel ranks hold: all of it, their part, or that of the key heads."""
    place: Literal["root", "layers", "geometry"] = "layers"


def parameter_parts(model: ModelConfig, attention: AttentionConfig) -> list[Part]:
    """All parameters by kind; their sum is exactly the model's number of parameters."""
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
    geometry = attention.build(model.head_shape)
    return parts + [
        Part(part.name, layers * part.count, layers * part.weights, part.split, "geometry")
        for part in geometry.parameter_parts()
    ]


def _matrix(name: str, count: int, split: Literal["heads", "keys"]) -> Part:
    return Part(name, count, count, split)


def total(parts: Iterable[Part]) -> int:
    return sum(part.count for part in parts)
