"""The mesh of processes, data x shard x tensor, and whether it fits the processes and the model.

data     copies of the model, each with its part of the batch
shard    processes that divide parameters, gradients and optimizer, and the batch too
tensor   processes that divide the heads and the feed-forward of every layer
"""

from __future__ import annotations

from typing import NamedTuple

from mosar.errors import TrainingError
from mosar.geometries import AttentionConfig
from mosar.model.config import ModelConfig
from mosar.training.config import RunConfig
from mosar.training.distributed.share import Share


class Mesh(NamedTuple):
    """The number of processes along each axis; ranks increase along `tensor` first."""

    data: int = 1
    shard: int = 1
    tensor: int = 1

    @property
    def num_processes(self) -> int:
        return self.data * self.shard * self.tensor

    @property
    def num_shares(self) -> int:
        """The number of parts of a batch."""
        return self.data * self.shard

    @property
    def uses_fsdp(self) -> bool:
        """False for plain copies of an undivided model, which DDP trains."""
        return self.shard > 1 or (self.data > 1 and self.tensor > 1)

    def share(self, rank: int) -> Share:
        """The part of the batch of a rank; ranks along `tensor` have the same windows."""
        return Share(rank // self.tensor, self.num_shares)

    def copies_keys(self, num_kv_heads: int) -> bool:
        """Whether there are too few key heads to divide, so each process along `tensor` has all."""
        return num_kv_heads < self.tensor


def check_mesh(config: RunConfig, processes: int) -> Mesh:
    """The mesh of `config`; a TrainingError says in one line what does not fit."""
    mesh = _resolve(config, processes)
    shares = mesh.num_shares
    if config.train.windows_per_step % shares:
        raise TrainingError(
            f"a step has train.micro_batch x train.accumulation = {config.train.windows_per_step} "
            f"windows, which distributed.data x distributed.shard = {shares} does not divide"
        )
    named = f"distributed.tensor={mesh.tensor}"
    obstacle = split_obstacle(config.model, config.attention, mesh.tensor, named)
    if obstacle is not None:
        raise TrainingError(obstacle)
    if processes > 1 and ":" in config.train.device:
        kind = config.train.device.partition(":")[0]
        raise TrainingError(
            f"train.device is {config.train.device}, but each process uses its own device: "
            f"set train.device={kind}"
        )
    return mesh


def _resolve(config: RunConfig, processes: int) -> Mesh:
    settings = config.distributed
    inner = settings.shard * settings.tensor
    asked = f"distributed.shard={settings.shard}, distributed.tensor={settings.tensor}"
    if settings.data is not None:
        asked = f"distributed.data={settings.data}, {asked}"
    needed = inner if settings.data is None else settings.data * inner
    data = settings.data or max(processes // inner, 1)
    if data * inner != processes:
        if processes == 1:
            raise TrainingError(
                f"{asked} are for {needed} processes, and there is one: start them with torchrun "
                f"--nproc-per-node {needed} -m mosar train …, or set these keys back to 1"
            )
        rule = f"a multiple of {needed}" if settings.data is None else f"{needed}"
        raise TrainingError(f"{asked} need {rule} processes, and there are {processes}")
    return Mesh(data, settings.shard, settings.tensor)


def split_obstacle(
    model: ModelConfig, attention: AttentionConfig, tensor: int, named: str
) -> str | None:
    """Why `tensor` processes cannot divide a layer; None if they can. `named`: the option."""
    if tensor == 1:
        return None
    for name in ("num_heads", "ffn_size"):
        if getattr(model, name) % tensor:
            return f"{named} must divide model.{name}={getattr(model, name)}"
    if model.num_kv_heads % tensor and tensor % model.num_kv_heads:
        return (
            f"{named} must divide model.num_kv_heads={model.num_kv_heads}, or be a multiple of it "
            "(then keys and values are copied)"
        )
    obstacle = attention.build(model.head_shape).split_obstacle(tensor)
    return None if obstacle is None else named + obstacle
