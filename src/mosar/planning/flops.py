"""Floating-point operations of one token, products of matrices only (a multiply-add is two).

    forward of a weight matrix [a, b]      2 a b
    attention at context n                 4 H D per pair (scores and values), (n + 1) / 2 pairs
    backward                               twice the forward; attention 2.5 times

With a mesh, these are the operations of one rank for a token that it sees: tensor-parallel ranks
share the work on divided parameters, and each computes everything else, above all the output head.
Norms, soft-caps, gates and softmax are left out: they are a few percent at the sizes that matter.
"""

from __future__ import annotations

from mosar.model.config import ModelConfig
from mosar.model.parameters import parameter_parts
from mosar.planning.parameters import ways
from mosar.training.config import RunConfig
from mosar.training.distributed.mesh import Mesh

BACKWARD_ATTENTION = 2.5
ALONE = Mesh()


def matrix_flops(config: RunConfig, mesh: Mesh = ALONE) -> float:
    """Projections, feed-forward and output head, forward."""
    return _forward(config, mesh, "layers") + _forward(config, mesh, "root")


def router_flops(config: RunConfig, mesh: Mesh = ALONE) -> float:
    """Both routers of every layer, forward; 0 without routers."""
    return _forward(config, mesh, "geometry")


def _forward(config: RunConfig, mesh: Mesh, place: str) -> float:
    parts = [
        part for part in parameter_parts(config.model, config.attention) if part.place == place
    ]
    return sum(2.0 * part.weights / ways(part, config.model, mesh) for part in parts)


def attention_flops(model: ModelConfig, pairs: float, mesh: Mesh = ALONE) -> float:
    """Forward, for a token that attends to this many keys."""
    return 4.0 * model.num_layers * model.num_heads * model.head_dim * pairs / mesh.tensor


def causal_pairs(context: int) -> float:
    """Mean number of keys of a token in a context."""
    return (context + 1) / 2


def training_flops(config: RunConfig, context: int, mesh: Mesh = ALONE) -> float:
    """Forward and backward of one token; soft routing evaluates every causal pair."""
    layers = _forward(config, mesh, "layers") + _forward(config, mesh, "geometry")
    pairs = attention_flops(config.model, causal_pairs(context), mesh)
    again = layers + pairs if config.train.checkpoint_activations else 0.0
    head = _forward(config, mesh, "root")
    return 3 * (layers + head) + (1 + BACKWARD_ATTENTION) * pairs + again
