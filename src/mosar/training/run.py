"""The interface between the training loop and what it trains.

`Learner` trains a decoder; a retrofit trains the routers of a frozen model.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mosar.training.distributed.team import Team
from mosar.training.run_folder import SavedConfig
from mosar.training.stopping import StopRequest
from mosar.training.tensorboard import WriteLine


class Cadence(NamedTuple):
    """How many steps a run has, and how often it logs, evaluates and saves."""

    steps: int
    seed: int
    eval_every: int
    checkpoint_every: int
    log_every: int = 1
    keep_last: int = 2
    keep_every: int = 0


class Run(ABC):
    """Parameters, optimizers and data of a run, and how its folder is recognised."""

    config: SavedConfig
    cadence: Cadence
    team: Team
    """The processes that train together."""
    tokens_per_step: int
    data_fingerprint: str
    names: dict[Tensor, str]
    """The name of each parameter that is trained."""
    optimizers: Sequence[torch.optim.Optimizer]
    own_files: tuple[str, ...] | None = None
    """Files that a folder without a run may hold; None: any."""
    how_to_extend = ""
    how_to_save_memory = ""

    @abstractmethod
    def prepare(self) -> None:
        """Opens the data; a TrainingError for what cannot work, before the folder is made."""

    @abstractmethod
    def build(self, *, initialise: bool) -> None:
        """Makes parameters and optimizers; without `initialise`, a checkpoint fills them later."""

    @abstractmethod
    def update(self, step: int, stop: StopRequest | None = None) -> dict[str, Any] | None:
        """Makes update number `step`; returns its line of the metrics, or None after `stop`."""

    @abstractmethod
    def evaluate(self, step: int) -> dict[str, Any]:
        """The line of the metrics for the validation windows, after update number `step`."""

    @abstractmethod
    def check_same(self, folder: Path, report: Callable[[str], None]) -> None:
        """A TrainingError if the run in `folder` is a different one."""

    @abstractmethod
    def how_to_continue(self, out: Path) -> str:
        """How to resume after an interruption."""

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps besides tensors."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:  # noqa: B027
        """Restores what `state` returned."""

    def board(self, out: Path, start: int) -> AbstractContextManager[WriteLine]:
        """Opens a writer for the lines of the metrics."""
        return nullcontext(lambda line: None)

    @abstractmethod
    def finish(self, out: Path) -> None:
        """Called after the last step, while the folder is still locked."""
