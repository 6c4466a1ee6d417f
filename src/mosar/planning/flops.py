"""Floating-point operations of one token, products of matrices only (a multiply-add is two).

    forward of a weight matrix [a, b]      2 a b
    attention at context n                 4 H D a pair (scores and values), (n + 1) / 2 pairs
    backward                               twice the forward; attention 2.5 times (scores again)

Norms, soft-caps, gates and softmax are left out: a few percent at the sizes that matter.
"""

from __future__ import annotations

from mosar.geometries import AttentionConfig
from mosar.model.config import ModelConfig
from mosar.planning.parameters import is_routed

BACKWARD_ATTENTION = 2.5


def matrix_flops(model: ModelConfig) -> float:
    """Projections, feed-forward and output head, forward."""
    heads = 2 * model.num_heads + 2 * model.num_kv_heads
    layer = model.hidden_size * (heads * model.head_dim + 3 * model.ffn_size)
    return 2.0 * (model.num_layers * layer + model.vocab_size * model.hidden_size)


def router_flops(model: ModelConfig, attention: AttentionConfig) -> float:
    """Both routers of every layer, forward; 0 without routers."""
    if not is_routed(attention):
        return 0.0
    config = attention.mosar_config(model.max_length)
    heads = (model.num_heads + model.num_kv_heads) * model.head_dim
    second = 2 * config.routing_groups * config.num_regimes
    return 2.0 * model.num_layers * config.router_hidden * (heads + second)


def attention_flops(model: ModelConfig, pairs: float) -> float:
    """Forward, for a token that attends to so many keys."""
    return 4.0 * model.num_layers * model.num_heads * model.head_dim * pairs


def causal_pairs(context: int) -> float:
    """Keys of a token, mean over a context."""
    return (context + 1) / 2


def training_flops(
    model: ModelConfig, attention: AttentionConfig, context: int, *, recompute: bool
) -> float:
    """Forward and backward of one token; soft routing evaluates every causal pair."""
    forward = matrix_flops(model) + router_flops(model, attention)
    pairs = attention_flops(model, causal_pairs(context))
    again = forward - 2.0 * model.vocab_size * model.hidden_size + pairs if recompute else 0.0
    return 3 * forward + (1 + BACKWARD_ATTENTION) * pairs + again
