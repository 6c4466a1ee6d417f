"""Bytes that one rank sends in one update, by ring algorithms.

    all-reduce of x bytes over n ranks        2 (n - 1) / n x
    all-gather or reduce-scatter to x bytes     (n - 1) / n x

data     one all-reduce of the gradients; where FSDP makes it (with shard or tensor), one a pass
shard    each pass gathers the parameters for forward and backward and scatters the gradients
tensor   each layer sums its attention's and its feed-forward's output, forward and backward (and
         again where activations are recomputed), and the routers' hidden sums and gradients; with
         whole routing groups on each rank, routers send nothing
"""

from __future__ import annotations

from mosar.planning.mesh import Mesh
from mosar.planning.parameters import is_routed
from mosar.training.config import RunConfig


def all_reduce(size: float, ranks: int) -> float:
    return 2 * (ranks - 1) / ranks * size


def gather(size: float, ranks: int) -> float:
    return (ranks - 1) / ranks * size


def data_bytes(mesh: Mesh, held: float, passes: int) -> float:
    """`held`: parameters of a tensor-parallel rank before sharding."""
    times = passes if mesh.shard > 1 or mesh.tensor > 1 else 1
    return times * all_reduce(4 * held / mesh.shard, mesh.data)


def shard_bytes(mesh: Mesh, held: float, passes: int) -> float:
    return passes * 3 * gather(4 * held, mesh.shard)


def tensor_bytes(config: RunConfig, mesh: Mesh, tokens: int) -> float:
    """`tokens`: of all passes of the update on one rank."""
    model, train = config.model, config.train
    width = 2 if train.precision == "bf16" else 4
    forwards = 2 if train.checkpoint_activations else 1
    layer = 2 * (forwards + 1) * model.hidden_size * width
    groups = config.attention.routing_groups
    if is_routed(config.attention) and groups % mesh.tensor:
        mosar = config.attention.mosar_config(model.max_length)
        hidden, regimes = mosar.router_hidden, mosar.num_regimes
        layer += 2 * groups * 4 * (forwards * hidden + regimes)
    return all_reduce(float(tokens * model.num_layers * layer), mesh.tensor)
