"""Bytes that one rank sends in one update, by ring algorithms.

    all-reduce of x bytes over n ranks        2 (n - 1) / n x
    all-gather or reduce-scatter to x bytes     (n - 1) / n x

data     one all-reduce of the gradients; with FSDP (shard or tensor), one per pass
shard    each pass gathers a layer's parameters for forward and again for backward, gathers the
         others (embedding, final norm) once, and scatters all gradients
tensor   each layer sums the outputs of attention and feed-forward; its backward pass sums the
         gradients of their inputs. Routers sum their hidden numbers, and backward the gradients of
         their probabilities. If keys are copied (fewer key heads than ranks), the gradients of keys
         and values are summed too; each rank then has the whole key router, which sums no hidden
         numbers. If activations are recomputed, the forward sums happen once more. If each rank has
         whole routing groups, routers send nothing
"""

from __future__ import annotations

from mosar.model.parameters import parameter_parts
from mosar.planning.parameters import tensor_part
from mosar.training.config import RunConfig
from mosar.training.distributed.mesh import Mesh


def all_reduce(size: float, ranks: int) -> float:
    return 2 * (ranks - 1) / ranks * size


def gather(size: float, ranks: int) -> float:
    return (ranks - 1) / ranks * size


def data_bytes(config: RunConfig, mesh: Mesh, passes: int) -> float:
    held = tensor_part(parameter_parts(config.model, config.attention), config.model, mesh)
    return (passes if mesh.uses_fsdp else 1) * all_reduce(4 * held / mesh.shard, mesh.data)


def shard_bytes(config: RunConfig, mesh: Mesh, passes: int) -> float:
    parts = parameter_parts(config.model, config.attention)
    root = [part for part in parts if part.place == "root"]
    held, once = (tensor_part(some, config.model, mesh) for some in (parts, root))
    return passes * gather(4 * (3 * held - once), mesh.shard)


def tensor_bytes(config: RunConfig, mesh: Mesh, tokens: int) -> float:
    """`tokens`: of all passes of the update on one rank."""
    model, train = config.model, config.train
    # Under autocast, outputs, keys and values are narrow; the gradients of the stream are not.
    width = 2 if train.precision == "bf16" else 4
    forwards = 2 if train.checkpoint_activations else 1
    layer = 2 * model.hidden_size * (forwards * width + 4)
    copies_keys = mesh.copies_keys(model.num_kv_heads)
    if copies_keys:
        layer += width * 2 * model.num_kv_heads * model.head_dim
    if config.attention.geometry_class.routed and config.regimes.routing_groups == 1:
        mosar = config.regimes
        summed = 1 if copies_keys else 2
        layer += 4 * (forwards * summed * mosar.router_hidden + 2 * mosar.num_regimes)
    return all_reduce(float(tokens * model.num_layers * layer), mesh.tensor)
