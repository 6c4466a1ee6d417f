"""Memory of one rank, in training and for a KV cache.

    parameters, gradients, AdamW     4 + 4 + 8 bytes per parameter: always float32
    activations                      the tensors that a layer saves for its backward pass
    loss                             gradients of head and hidden states, and a chunk of logits

Saved tensors are those of the CPU kernels, listed one by one below; a test compares the sum with
what torch really saves. Buffers of kernels, of the allocator and of the network are left out.
"""

from __future__ import annotations

from typing import NamedTuple

from mosar.model.config import ModelConfig
from mosar.model.parameters import parameter_parts
from mosar.planning.parameters import tensor_part
from mosar.training.config import RunConfig
from mosar.training.distributed.mesh import Mesh


class Saved(NamedTuple):
    """A tensor that a layer saves: numbers per token, and bytes each in fp32 and bf16 training."""

    name: str
    numbers: float
    fp32: int
    bf16: int


def saved_by_layer(config: RunConfig, mesh: Mesh) -> list[Saved]:
    """What one layer keeps for its backward pass, per token, on one rank."""
    model = config.model
    size = model.hidden_size
    heads = model.num_heads / mesh.tensor
    query = heads * model.head_dim
    key = _key_heads(model, mesh) * model.head_dim
    ffn = model.ffn_size / mesh.tensor
    saved = [
        Saved("inputs of the norms before attention and feed-forward", 2 * size, 4, 4),
        Saved("inputs of the norms after them", 2 * size, 4, 2),
        Saved("scales of the norms", 4, 4, 4),
        # Under autocast, q, k, v, gate and up each make a bfloat16 copy of the input.
        Saved("input of the projections", size, 4, 3 * 2),
        Saved("input of the feed-forward", size, 4, 2 * 2),
        Saved("q, k and v", query + 2 * key, 4, 4),
        Saved("output of attention", query, 4, 4),
        Saved("input of the output projection", query, 4, 2),
        Saved("log-sum-exps", 2 * heads, 4, 4),
        Saved("gate and up", 2 * ffn, 4, 2),
        Saved("input of the down projection", ffn, 4, 2),
        Saved("GELU of the gate", ffn, 0, 2),
    ]
    if not config.attention.geometry_class.native:
        saved.append(
            Saved("scores, soft-capped ones and weights", 3 * heads * model.max_length, 4, 4)
        )
    if config.attention.geometry_class.routed:
        mosar = config.regimes
        groups = _groups(config, mesh)
        # One process computes its routers again in the backward pass, from q and k as they came.
        shared = mesh.tensor > 1
        saved += [
            Saved("routing probabilities", 2 * groups * mosar.num_regimes, 4, 4),
            Saved("q and k as the routers read them", query + key, 0, 4 if shared else 2),
        ]
        if shared:
            hidden = 4 * groups * mosar.router_hidden
            saved.append(Saved("routers, before and after GELU", hidden, 4, 4))
    return saved


def _key_heads(model: ModelConfig, mesh: Mesh) -> float:
    heads = model.num_kv_heads
    return heads if mesh.copies_keys(heads) else heads / mesh.tensor


def _groups(config: RunConfig, mesh: Mesh) -> float:
    groups = config.regimes.routing_groups
    return groups / mesh.tensor if groups > 1 else 1


def layer_bytes(config: RunConfig, mesh: Mesh) -> float:
    """Bytes that one layer saves per token."""
    return sum(
        saved.numbers * (saved.bf16 if config.train.precision == "bf16" else saved.fp32)
        for saved in saved_by_layer(config, mesh)
    )


def activation_bytes(config: RunConfig, mesh: Mesh, tokens: int) -> float:
    """Saved tensors of all layers in a pass; with checkpointing their inputs, and one layer."""
    model = config.model
    layer = layer_bytes(config, mesh)
    final_norm = 4 * (model.hidden_size + 1)
    if config.train.checkpoint_activations:
        return tokens * (model.num_layers * 4 * model.hidden_size + layer + final_norm)
    return tokens * (model.num_layers * layer + final_norm)


def loss_bytes(config: RunConfig, tokens: int) -> float:
    """Gradients of hidden states and head, which the loss holds until its backward pass."""
    return 4.0 * config.model.hidden_size * (tokens + config.model.vocab_size)


def logits_bytes(config: RunConfig, tokens: int) -> float:
    """A chunk of logits in float32, twice with a soft-cap; freed before the backward pass.

    In bfloat16, a narrow chunk beside it takes the gradient.
    """
    rows = config.train.loss_chunk or max(256, (1 << 21) // config.model.vocab_size)
    arrays = 1 if config.model.final_softcap is None else 2
    narrow = 2.0 if config.train.precision == "bf16" else 0.0
    return (4.0 * arrays + narrow) * min(rows, tokens) * config.model.vocab_size


def narrow_weight_bytes(config: RunConfig, mesh: Mesh) -> float:
    """Autocast's copies of weight matrices in bfloat16, kept during a pass."""
    matrices = [part for part in parameter_parts(config.model, config.attention) if part.weights]
    held = tensor_part(matrices, config.model, mesh)
    return 2.0 * held if config.train.precision == "bf16" else 0.0


def gathered_bytes(config: RunConfig, mesh: Mesh) -> float:
    """What FSDP has whole at a time: embedding and final norm, the parameters of two layers (one is
    gathered while the other computes) and the gradients of one."""
    parts = parameter_parts(config.model, config.attention)
    root, layers = (
        tensor_part([p for p in parts if (p.place == "root") is is_root], config.model, mesh)
        for is_root in (True, False)
    )
    return 4.0 * (root + 3 * layers / config.model.num_layers)


def cache_bytes(config: RunConfig, mesh: Mesh, keys: float, *, by_regime: bool) -> float:
    """A KV cache of one sequence with this many keys per layer, as our caches store them."""
    model = config.model
    width = 2 if config.train.precision == "bf16" else 4
    # A position and a slot for every key of a group; without regimes a position and a flag.
    notes = 8 * _groups(config, mesh) if by_regime else 9
    geometry = config.attention.build(model.head_shape)
    kept = 2 * _key_heads(model, mesh) * model.head_dim * width
    kept += geometry.note_bytes(width) / (mesh.tensor if geometry.of_heads else 1)
    return model.num_layers * keys * (kept + notes)
