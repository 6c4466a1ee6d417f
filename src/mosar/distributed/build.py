"""A decoder over a mesh: divided by heads, then by FSDP2; no process ever holds all of it."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

from mosar.distributed.mesh import Mesh
from mosar.distributed.tensor import TensorRanks, local, split_decoder
from mosar.model.decoder import Decoder
from mosar.training.config import RunConfig

DATA, SHARD, TENSOR = "data", "shard", "tensor"


def build_decoder(
    config: RunConfig, mesh: Mesh, devices: DeviceMesh, *, initialise: bool
) -> Decoder:
    """This process's part; with `initialise` the numbers are those of the undivided decoder."""
    with torch.device("meta"):
        decoder = Decoder(config.model, config.attention)
    if mesh.tensor > 1:
        along = devices[TENSOR]
        split_decoder(decoder, TensorRanks(along, along.get_local_rank(), mesh.tensor))
    if uses_fsdp(mesh):
        # A warning for models that write into what a layer gave them, which ours does not.
        warnings.filterwarnings("ignore", message=".*returned a view tensor")
        # With copies (HSDP) parameters are divided along the second dimension alone.
        along = devices[DATA, SHARD] if mesh.data > 1 else devices[SHARD]
        for layer in decoder.layers:
            fully_shard(layer, mesh=along)
        fully_shard(decoder, mesh=along)
    decoder.to_empty(device=torch.device(config.train.device))
    if initialise:
        _initialise(decoder, config.train.seed, devices)
    return decoder


def uses_fsdp(mesh: Mesh) -> bool:
    """Plain copies of an undivided model are left to DDP."""
    return mesh.shard > 1 or (mesh.data > 1 and mesh.tensor > 1)


def tensor_dim(parameter: Tensor) -> int | None:
    """The dimension along which tensor parallelism divides a parameter; None: it does not."""
    if not isinstance(parameter, DTensor):
        return None
    names = parameter.device_mesh.mesh_dim_names or ()
    if TENSOR not in names:
        return None
    placement = parameter.placements[names.index(TENSOR)]
    return placement.dim if isinstance(placement, Shard) else None


@torch.no_grad()
def _initialise(decoder: Decoder, seed: int, devices: DeviceMesh) -> None:
    """One whole parameter at a time, of which the own part is kept."""
    for name, parameter in decoder.named_parameters():
        own = local(parameter.detach())
        part = torch.empty(parameter.shape, dtype=own.dtype, device=own.device)
        decoder.init_parameter(name, part, seed)
        dim = tensor_dim(parameter)
        if dim is not None:
            part = part.chunk(devices[TENSOR].size(), dim)[devices[TENSOR].get_local_rank()]
        if isinstance(parameter, DTensor) and SHARD in (parameter.device_mesh.mesh_dim_names or ()):
            parts = part.chunk(devices[SHARD].size())
            rank = devices[SHARD].get_local_rank()
            part = parts[rank] if rank < len(parts) else part[:0]
        own.copy_(part)
