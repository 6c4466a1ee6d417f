"""The mesh of processes, data x shard x tensor, and whether it fits the processes and the model."""

from __future__ import annotations

from typing import NamedTuple

from mosar.training.config import RunConfig
from mosar.training.errors import TrainingError
from mosar.training.share import Share

SPLIT_GEOMETRIES = ("rope", "p-rope", "alibi", "fixed", "rope-mask", "mosar")
"""Geometries that know how to attend with a part of the heads."""


class Mesh(NamedTuple):
    """How many processes there are along each axis; process numbers run along `tensor` first."""

    data: int
    shard: int
    tensor: int

    @property
    def num_processes(self) -> int:
        return self.data * self.shard * self.tensor

    @property
    def num_shares(self) -> int:
        """Parts into which a batch is divided."""
        return self.data * self.shard

    def share(self, rank: int) -> Share:
        """Processes that differ along `tensor` alone see the same windows."""
        return Share(rank // self.tensor, self.num_shares)


def check_mesh(config: RunConfig, processes: int) -> Mesh:
    """The mesh of `config`; a TrainingError says in one line what does not fit."""
    mesh = _resolve(config, processes)
    shares = mesh.num_shares
    if config.train.windows_per_step % shares:
        raise TrainingError(
            f"a step has train.micro_batch x train.accumulation = {config.train.windows_per_step} "
            f"windows, which distributed.data x distributed.shard = {shares} does not divide"
        )
    if mesh.tensor > 1:
        _check_split(config, mesh.tensor)
    if processes > 1 and ":" in config.train.device:
        kind = config.train.device.partition(":")[0]
        raise TrainingError(
            f"train.device is {config.train.device}, but each process takes a device of its own: "
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


def _check_split(config: RunConfig, tensor: int) -> None:
    model, attention = config.model, config.attention
    for name in ("num_heads", "ffn_size"):
        if getattr(model, name) % tensor:
            raise TrainingError(
                f"model.{name}={getattr(model, name)} cannot be divided over "
                f"distributed.tensor={tensor}"
            )
    if model.num_kv_heads % tensor and tensor % model.num_kv_heads:
        raise TrainingError(
            f"model.num_kv_heads={model.num_kv_heads} must be a multiple of "
            f"distributed.tensor={tensor}, or divide it (then keys and values are copied)"
        )
    if attention.geometry not in SPLIT_GEOMETRIES:
        raise TrainingError(
            f"the geometry {attention.geometry} cannot be divided over distributed.tensor={tensor};"
            f" those that can are {', '.join(SPLIT_GEOMETRIES)}"
        )
    groups = attention.routing_groups
    if attention.geometry == "mosar" and groups > 1 and groups % tensor:
        raise TrainingError(
            f"attention.routing_groups={groups} must be 1 or a multiple of "
            f"distributed.tensor={tensor}, so that a group stays with one process"
        )
