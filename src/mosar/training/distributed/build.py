"""A decoder over a mesh: divided by heads, then by FSDP2; no process ever holds all of it."""

from __future__ import annotations

import warnings
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

from mosar.model.decoder import Decoder
from mosar.training.config import RunConfig
from mosar.training.distributed.mesh import Mesh
from mosar.training.distributed.tensor import TensorRanks, local, split_decoder

DATA, SHARD, TENSOR = "data", "shard", "tensor"


def build_decoder(
    config: RunConfig, mesh: Mesh, devices: DeviceMesh, *, initialise: bool
) -> Decoder:
    """This process's part of a decoder, with the same initial values as an undivided decoder."""
    with torch.device("meta"):
        decoder = Decoder(config.model, config.attention)
    if mesh.tensor > 1:
        along = devices[TENSOR]
        split_decoder(decoder, TensorRanks(along, along.get_local_rank(), mesh.tensor))
    if mesh.uses_fsdp:
        # This warning is for models that change a layer's output in place; ours does not.
        warnings.filterwarnings("ignore", message=".*returned a view tensor")
        # With copies (HSDP), parameters are divided along the second mesh dimension only.
        along = devices[DATA, SHARD] if mesh.data > 1 else devices[SHARD]
        for module in (*decoder.layers, decoder):
            fully_shard(module, mesh=along, shard_placement_fn=partial(_placement, mesh.shard))
    decoder.to_empty(device=torch.device(config.train.device))
    if initialise:
        _initialise(decoder, config.train.seed, devices)
    return decoder


def _placement(ranks: int, parameter: nn.Parameter) -> Shard | None:
    """The dimension along which FSDP divides a parameter; None: its default, the first.

    The first one of routers counts their groups, often one: all but one process would get padding.
    """
    shape = local(parameter.detach()).shape
    if shape[0] >= ranks:
        return None
    even = [dim for dim in range(len(shape)) if shape[dim] % ranks == 0]
    return Shard(max(even, key=shape.__getitem__)) if even else None


def split_dim(parameter: Tensor, axis: str) -> int | None:
    """The dimension along which an axis divides a parameter; None: not divided."""
    if not isinstance(parameter, DTensor):
        return None
    names = parameter.device_mesh.mesh_dim_names or ()
    if axis not in names:
        return None
    placement = parameter.placements[names.index(axis)]
    return None if placement.is_replicate() else placement.dim  # pyright: ignore[reportAttributeAccessIssue]


@torch.no_grad()
def _initialise(decoder: Decoder, seed: int, devices: DeviceMesh) -> None:
    """Initialises one whole parameter at a time and keeps this process's part."""
    for name, parameter in decoder.named_parameters():
        own = local(parameter.detach())
        # On the CPU, as for one process: another device draws different numbers.
        part = torch.empty(parameter.shape, dtype=own.dtype)
        decoder.init_parameter(name, part, seed)
        for axis in (TENSOR, SHARD):
            dim = split_dim(parameter, axis)
            if dim is not None:
                parts = part.chunk(devices[axis].size(), dim)
                rank = devices[axis].get_local_rank()
                # If there are more processes than rows, the last ones have none.
                part = parts[rank] if rank < len(parts) else part.narrow(dim, 0, 0)
        own.copy_(part)
