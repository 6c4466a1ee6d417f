"""Parameters of the decoder, counted from its configuration, and a rank's part of them."""

from __future__ import annotations

from typing import Literal, NamedTuple

from mosar.geometries import GEOMETRIES, AttentionConfig, MoSAR
from mosar.model.config import ModelConfig
from mosar.planning.mesh import Mesh


class Part(NamedTuple):
    """Parameters of one kind, of the whole model."""

    name: str
    count: int
    split: Literal["whole", "heads", "kv"]
    """What tensor-parallel ranks hold: all of it, their part, or that of the key heads."""
    in_layers: bool = True


def is_routed(attention: AttentionConfig) -> bool:
    return issubclass(GEOMETRIES[attention.geometry], MoSAR)


def parameter_parts(model: ModelConfig, attention: AttentionConfig) -> list[Part]:
    """All parameters; their sum is exactly the number that the model has."""
    layers, size = model.num_layers, model.hidden_size
    query, key = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    parts = [
        Part("embedding (and output head)", model.vocab_size * size, "whole", False),
        Part("query and output projections", layers * 2 * size * query, "heads"),
        Part("key and value projections", layers * 2 * size * key, "kv"),
        Part("feed-forward", layers * 3 * size * model.ffn_size, "heads"),
        Part("norms", layers * 4 * size, "whole"),
        Part("final norm", size, "whole", False),
    ]
    if is_routed(attention):
        config = attention.mosar_config(model.max_length)
        hidden, groups = config.router_hidden, config.routing_groups
        rest = 2 * groups * (hidden + config.num_regimes * (hidden + 1))
        parts += [
            Part("query routers' first layer", layers * hidden * query, "heads"),
            Part("key routers' first layer", layers * hidden * key, "kv"),
            Part("routers' second layer", layers * rest, "whole"),
        ]
    return parts


def total(parts: list[Part]) -> int:
    return sum(part.count for part in parts)


def tensor_part(parts: list[Part], model: ModelConfig, mesh: Mesh) -> float:
    """What one tensor-parallel rank holds before sharding."""
    ways = {"whole": 1, "heads": mesh.tensor, "kv": mesh.kv_parts(model)}
    return sum(part.count / ways[part.split] for part in parts)
