"""The team of several processes, for the training loop.

data x shard    processes that see different windows: gradients and figures are averaged
tensor          processes that see the same windows and divide each layer
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from mosar.errors import LostProcessError, TrainingError
from mosar.model.decoder import Decoder
from mosar.training.checkpoints import Checkpoint, Names, Optimizers
from mosar.training.config import RunConfig
from mosar.training.distributed import checkpoint as sharded
from mosar.training.distributed.build import DATA, SHARD, TENSOR, build_decoder, split_dim
from mosar.training.distributed.environment import environment_error, launched
from mosar.training.distributed.mesh import Mesh
from mosar.training.distributed.operators import add
from mosar.training.distributed.team import Team
from mosar.training.distributed.tensor import local
from mosar.training.objective import Objective, Terms
from mosar.training.precision import autocast
from mosar.training.stopping import StopRequest

Value = TypeVar("Value")


class ProcessTeam(Team):
    """One process of a launcher; all processes call the same methods in the same order."""

    def __init__(self, config: RunConfig, mesh: Mesh):
        self.config, self.mesh = config, mesh
        self.rank, self.num_processes = launched()
        self.is_first = self.rank == 0
        self.share = mesh.share(self.rank)
        self._devices: DeviceMesh | None = None
        self._ddp: DistributedDataParallel | None = None

    @property
    def devices(self) -> DeviceMesh:
        assert self._devices is not None, "the team is not running"
        return self._devices

    def describe(self) -> dict[str, int]:
        return self.mesh._asdict()

    @contextmanager
    def running(self, out: Path) -> Iterator[None]:
        mine = not dist.is_initialized()
        with self._losses():
            if mine:
                self._join()
            self._devices = init_device_mesh(
                self._device_type, self.mesh, mesh_dim_names=(DATA, SHARD, TENSOR)
            )
            yield
            if mine:
                # Not after an error: the remaining processes would wait for those that ended.
                dist.barrier()
                dist.destroy_process_group()

    @property
    def _device_type(self) -> str:
        return torch.device(self.config.train.device).type

    def _join(self) -> None:
        backend = "gloo"
        if self._device_type == "cuda":
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
            # Messages about the run go through the CPU.
            backend = "cpu:gloo,cuda:nccl"
        missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
        if missing:
            raise environment_error(f"{' and '.join(missing)} not set")
        if not os.environ["MASTER_PORT"].isdecimal():
            raise environment_error(f"MASTER_PORT={os.environ['MASTER_PORT']}")
        timeout = timedelta(seconds=self.config.distributed.timeout)
        dist.init_process_group(backend, timeout=timeout)

    @contextmanager
    def _losses(self) -> Iterator[None]:
        """Turns errors of the communication into one line."""
        try:
            yield
        except TrainingError:
            raise
        except (RuntimeError, ValueError) as error:
            if not _is_from_communication(error):
                raise
            reason = str(error).strip().splitlines()[0][:200]
            raise LostProcessError(
                f"process {self.rank} of {self.num_processes}: another process of the job has "
                f"ended or does not answer ({reason})"
            ) from error

    @contextmanager
    def together(self) -> Iterator[None]:
        failure: Exception | None = None
        try:
            yield
        except Exception as error:
            failure = error
        who = torch.tensor(0 if failure is None else self.rank + 1)
        dist.all_reduce(who, op=dist.ReduceOp.MAX)
        if failure is not None:
            if isinstance(failure, TrainingError) and int(who) != self.rank + 1:
                failure.reported_by_peer = True
            raise failure
        if int(who):
            raise _reported(TrainingError(f"process {int(who) - 1} failed; see its message"))

    def from_first(self, action: Callable[[], Value]) -> Value:
        answer: dict[str, Any] = {}
        failure: Exception | None = None
        if self.is_first:
            try:
                answer = {"value": action()}
            except Exception as error:
                failure = error
                answer = {"error": str(error)}
        box = [answer]
        dist.broadcast_object_list(box, 0)
        (answer,) = box
        if failure is not None:
            raise failure
        if "error" in answer:
            raise _reported(TrainingError(answer["error"]))
        return answer["value"]

    def gather(self, value: Value) -> list[Value]:
        """The values of all processes."""
        values: list[Any] = [None] * self.num_processes
        dist.all_gather_object(values, value)
        return values

    def build_decoder(self, config: RunConfig, *, initialise: bool) -> Decoder:
        # DDP's first pass runs before a checkpoint is read, and needs initial values.
        initialise = initialise or self._uses_ddp
        return build_decoder(config, self.mesh, self.devices, initialise=initialise)

    @property
    def _uses_ddp(self) -> bool:
        return self.mesh.data > 1 and not self.mesh.uses_fsdp

    def adapt_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Separates DTensors from plain tensors, which one fused update cannot mix."""
        groups = []
        for group in optimizer.param_groups:
            for is_split in (True, False):
                chosen = [p for p in group["params"] if isinstance(p, DTensor) is is_split]
                if chosen:
                    groups.append({**group, "params": chosen})
        optimizer.param_groups[:] = groups

    def forward_fn(self, objective: Objective, decoder: Decoder) -> Callable[..., Terms]:
        routed = self.config.attention.geometry_class.routed
        whole_routing = routed and self.config.regimes.routing_groups == 1
        if self.mesh.tensor > 1 and not whole_routing:
            group, size = self.devices.get_group(TENSOR), self.mesh.tensor
            objective.merge_basis = lambda basis: add(group, basis) / size
        if not self._uses_ddp:
            return super().forward_fn(objective, decoder)
        self._ddp = DistributedDataParallel(
            _Pass(objective, decoder),
            process_group=self.devices.get_group(DATA),
            gradient_as_bucket_view=True,
        )
        self._settle_buckets()
        return self._ddp

    def _settle_buckets(self) -> None:
        """Runs a discarded pass, after which DDP keeps the order of its messages.

        It does so once, after the first gradient, and with three processes or more the order of a
        sum depends on the place in a message: a run that goes on would differ in the last bits.
        """
        assert self._ddp is not None
        length, device = self.config.model.max_length, self.config.train.device
        tokens = torch.zeros(1, length + 1, dtype=torch.long, device=device)
        with autocast(self.config.train):
            terms = self._ddp(tokens, None, step=1)
        terms.loss.backward()
        self._ddp.zero_grad(set_to_none=True)

    def accumulating(self, more: bool) -> AbstractContextManager[object]:
        # FSDP reduces after every pass, since it must not hold the gradient of the whole model.
        return self._ddp.no_sync() if more and self._ddp is not None else nullcontext()

    def end_evaluation(self, decoder: Decoder) -> None:
        if self.mesh.uses_fsdp:
            decoder.reshard()  # pyright: ignore[reportCallIssue]

    def sum(self, values: Tensor) -> Tensor:
        for name in (DATA, SHARD):
            self._add(values, name)
        return values

    def gradient_norm(self, parameters: Iterable[Tensor]) -> Tensor:
        whole, split = [], []
        for parameter in parameters:
            if parameter.grad is not None:
                part = split if split_dim(parameter, TENSOR) is not None else whole
                part.append(local(parameter.grad))
        # Count each element once, also if several processes hold it.
        square = _square(split)
        self._add(square, TENSOR)
        # Not in place: without any gradient, the norm is a number on the CPU.
        square = square + _square(whole)
        if self.mesh.uses_fsdp:
            self._add(square, SHARD)
        return square.sqrt().float()

    def bad_gradients(self, parameters: Iterable[Tensor]) -> list[bool]:
        gradients = [p.grad for p in parameters]
        flags = torch.tensor(
            [g is not None and not bool(local(g).isfinite().all()) for g in gradients]
        ).int()
        dist.all_reduce(flags, op=dist.ReduceOp.MAX)
        return flags.bool().tolist()

    def clip(self, parameters: Iterable[Tensor], most: float, norm: Tensor) -> None:
        factor = (most / (norm + 1e-6)).clamp(max=1.0)
        for parameter in parameters:
            if parameter.grad is not None:
                local(parameter.grad).mul_(factor.to(parameter.grad.device))

    def _add(self, values: Tensor, axis: str) -> None:
        if self.devices[axis].size() > 1:
            dist.all_reduce(values, group=self.devices.get_group(axis))

    def stopped(self, stop: StopRequest) -> bool:
        number = torch.tensor(stop.signal_number or 0)
        dist.all_reduce(number, op=dist.ReduceOp.MAX)
        if int(number):
            stop.signal_number = int(number)
        return bool(stop)

    def write_checkpoint(
        self, names: Names, optimizers: Optimizers, folder: Path, step: int, state: dict[str, Any]
    ) -> Path:
        return sharded.write_checkpoint(self, names, optimizers, folder, step, state)

    def read_checkpoint(self, names: Names, optimizers: Optimizers, checkpoint: Checkpoint) -> None:
        sharded.read_checkpoint(names, optimizers, checkpoint)


class _Pass(nn.Module):
    """An objective and its decoder as one module, so that DDP sees where a pass begins."""

    def __init__(self, objective: Objective, decoder: Decoder):
        super().__init__()
        self.objective, self.decoder = objective, decoder

    def forward(self, *batch: Tensor | None, step: int) -> Terms:
        return self.objective(self.decoder, *batch, step=step)  # pyright: ignore[reportArgumentType]


def _square(gradients: list[Tensor]) -> Tensor:
    return torch.nn.utils.get_total_norm(gradients).double().square()


def _reported(error: TrainingError) -> TrainingError:
    error.reported_by_peer = True
    return error


_SIGNS = ("gloo", "nccl", "connection", "timed out", "timeout", "store", "broken pipe")


def _is_from_communication(error: Exception) -> bool:
    text = str(error).lower()
    return isinstance(error, dist.DistError) or any(sign in text for sign in _SIGNS)
