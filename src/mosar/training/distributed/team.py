"""The processes that train together: this one alone, or those of a launcher.

The loop asks its team wherever several processes act as one. `Team` is one process, to which most
questions are trivial; `process_team` holds the team of several, and is imported only for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from mosar.model.decoder import Decoder
from mosar.training import checkpoints
from mosar.training.checkpoints import Checkpoint, Names, Optimizers
from mosar.training.config import RunConfig
from mosar.training.distributed.share import WHOLE
from mosar.training.objective import Objective, Terms
from mosar.training.stopping import StopRequest

Value = TypeVar("Value")


class Team:
    """One process."""

    share = WHOLE
    is_first = True
    """Whether this process writes the run folder and prints."""
    num_processes = 1

    def running(self, out: Path) -> AbstractContextManager[object]:
        """A context for training into `out`."""
        return nullcontext()

    def together(self) -> AbstractContextManager[object]:
        """A context for what every process must do: if one fails, all fail."""
        return nullcontext()

    def from_first(self, action: Callable[[], Value]) -> Value:
        """The plain value that `action` returns in the first process, or its error."""
        return action()

    def describe(self) -> dict[str, int] | None:
        """The mesh, for records; None for one process."""
        return None

    def build_decoder(self, config: RunConfig, *, initialise: bool) -> Decoder:
        decoder = Decoder(config.model, config.attention)
        if initialise:
            decoder.init_weights(config.train.seed)
        return decoder.to(config.train.device)

    def adapt_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Adapts an optimizer to this team's parameters."""

    def forward_fn(self, objective: Objective, decoder: Decoder) -> Callable[..., Terms]:
        """The function of a pass: takes a batch and `step=`."""
        return partial(objective, decoder)

    def accumulating(self, more: bool) -> AbstractContextManager[object]:
        """A context for a pass and its gradient; `more`: other passes of the update follow."""
        return nullcontext()

    def end_evaluation(self, decoder: Decoder) -> None:
        """Called after the passes of an evaluation."""

    def sum(self, values: Tensor) -> Tensor:
        """The sum over all processes; may work in place."""
        return values

    def gradient_norm(self, parameters: Iterable[Tensor]) -> Tensor:
        """The norm of the whole gradient."""
        return torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])

    def bad_gradients(self, parameters: Iterable[Tensor]) -> list[bool]:
        """For each parameter, whether its gradient is not finite."""
        return [p.grad is not None and not bool(p.grad.isfinite().all()) for p in parameters]

    def clip(self, parameters: Iterable[Tensor], most: float, norm: Tensor) -> None:
        """Scales the gradients to the norm `most`."""
        torch.nn.utils.clip_grads_with_norm_(list(parameters), most, norm)

    def stopped(self, stop: StopRequest) -> bool:
        """Whether any process was asked to stop; then `stop` is set in all of them."""
        return bool(stop)

    def write_checkpoint(
        self, names: Names, optimizers: Optimizers, folder: Path, step: int, state: dict[str, Any]
    ) -> Path:
        model = {name: parameter for parameter, name in names.items()}
        tensors = checkpoints.optimizer_tensors(optimizers, names)
        return checkpoints.write_checkpoint(folder, step, model, tensors, state)

    def read_checkpoint(self, names: Names, optimizers: Optimizers, checkpoint: Checkpoint) -> None:
        """Restores parameters and optimizers."""
        checkpoints.load_parameters(names, checkpoint)
        checkpoints.restore_optimizers(optimizers, names, checkpoint.optimizer())


@contextmanager
def held_by_first(team: Team, hold: AbstractContextManager[object]) -> Iterator[None]:
    """Enters `hold` in the first process; a failure there is raised in all."""
    team.from_first(lambda: hold.__enter__())
    try:
        yield
    finally:
        if team.is_first:
            hold.__exit__(None, None, None)
