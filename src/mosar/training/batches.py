"""The windows that a step and an evaluation see: functions of the configuration and the step."""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import asdict

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mosar.data.manifest import SPLITS, Manifest
from mosar.data.stream import TokenStream, batch_indices
from mosar.data.tasks import TASKS, VERSION, make_windows
from mosar.errors import TrainingError
from mosar.training.config import RunConfig
from mosar.training.distributed.share import WHOLE, Share

Batch = tuple[Tensor, Tensor | None] | tuple[Tensor, Tensor | None, Tensor]
"""Tokens [B, N + 1], document numbers [B, N] (None: attention crosses documents), and of a task
which targets count [B, N]: as many in every window."""
Numbers = NDArray[np.int64] | range
"""Which windows."""


def open_batches(config: RunConfig, share: Share = WHOLE) -> Batches:
    """The data of a run: text from a folder, or the windows of a task."""
    kind = TextBatches if config.data.task == "text" else TaskBatches
    return kind(config, share)


def data_fingerprint(manifest: Manifest) -> str:
    """A hash of the contents of a dataset, independent of its path."""
    files = {name: asdict(entry) for name, entry in manifest.files.items()}
    return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()


class Batches(ABC):
    """The data of a run, for one process of several."""

    def __init__(self, config: RunConfig, share: Share = WHOLE):
        self.config, self.share = config, share
        self.length = config.model.max_length
        self.device = torch.device(config.train.device)

    def of_step(self, step: int) -> Iterator[Batch]:
        """This process's micro-batches of update number `step` >= 1."""
        windows, train = self._step_windows(step), self.config.train
        own, size = self.share.windows(train), self.share.pass_size(train)
        for start in range(own.start, own.stop, size):
            yield self._batch("train", windows[start : start + size])

    def of_evaluation(self) -> Iterator[tuple[Batch, bool]]:
        """The batches that this process evaluates, always the same, and whether each is its own.

        Only one process counts a batch; others may take part because they hold parameters.
        """
        windows, size = self._evaluation_windows(), self.config.train.micro_batch
        for number, own in self.share.rounds(-(-len(windows) // size)):
            yield self._batch("valid", windows[number * size : (number + 1) * size]), own

    @abstractmethod
    def fingerprint(self) -> str:
        """A hash of everything except the configuration that determines the windows."""

    @abstractmethod
    def _step_windows(self, step: int) -> Numbers: ...

    @abstractmethod
    def _evaluation_windows(self) -> Numbers: ...

    @abstractmethod
    def _batch(self, split: str, windows: Numbers) -> Batch: ...


class TextBatches(Batches):
    """Windows of a dataset."""

    def __init__(self, config: RunConfig, share: Share = WHOLE):
        super().__init__(config, share)
        folder = config.data.folder
        # Altered tokens would go unnoticed, so checksums are compared up to a certain size.
        self.streams = {split: TokenStream(folder, split, verify=None) for split in SPLITS}
        vocab_size = self.streams["train"].vocab_size
        if vocab_size > config.model.vocab_size:
            raise TrainingError(
                f"model.vocab_size is {config.model.vocab_size}, but the data in {folder} has "
                f"{vocab_size} different tokens"
            )
        for split, stream in self.streams.items():
            if stream.num_windows(self.length) < 1:
                raise TrainingError(
                    f"the {split} split in {folder} has {stream.num_tokens} tokens, fewer than a "
                    f"window of model.max_length + 1 = {self.length + 1}; prepare more text"
                    f"{', or a larger --valid-fraction' if split == 'valid' else ''}"
                )

    def fingerprint(self) -> str:
        return data_fingerprint(self.streams["train"].manifest)

    def _step_windows(self, step: int) -> Numbers:
        there = self.streams["train"].num_windows(self.length)
        return batch_indices(
            step - 1, self.config.train.windows_per_step, there, self.config.data.seed
        )

    def _evaluation_windows(self) -> Numbers:
        """Windows spread evenly over the validation split."""
        train, there = self.config.train, self.streams["valid"].num_windows(self.length)
        number = min(there, train.eval_batches * train.windows_per_step)
        return np.arange(number) * there // number

    def _batch(self, split: str, windows: Numbers) -> Batch:
        stream, segments = self.streams[split], None
        if self.config.data.isolate_documents:
            segments = stream.segments(windows, self.length).to(self.device)
        return stream.windows(windows, self.length).to(self.device), segments


class TaskBatches(Batches):
    """Windows of a task, generated from seed and index."""

    def __init__(self, config: RunConfig, share: Share = WHOLE):
        super().__init__(config, share)
        self.task = TASKS[config.data.task](self.length)
        if self.length < self.task.shortest:
            raise TrainingError(
                f"model.max_length must be at least {self.task.shortest} for the task "
                f"{self.task.name}, got {self.length}"
            )
        if self.task.vocab_size > config.model.vocab_size:
            raise TrainingError(
                f"model.vocab_size is {config.model.vocab_size}, but the task {self.task.name} "
                f"has {self.task.vocab_size} different tokens"
            )

    def fingerprint(self) -> str:
        return task_fingerprint(self.config)

    def _step_windows(self, step: int) -> Numbers:
        number = self.config.train.windows_per_step
        return range((step - 1) * number, step * number)

    def _evaluation_windows(self) -> Numbers:
        train = self.config.train
        return range(train.eval_batches * train.windows_per_step)

    def _batch(self, split: str, windows: Numbers) -> Batch:
        # Validation windows are the same for all seeds.
        seed = self.config.data.seed if split == "train" else 0
        made = make_windows(self.task, windows, self.length, split=split, seed=seed)
        return made.tokens.to(self.device), None, made.scored.to(self.device)


def task_fingerprint(config: RunConfig) -> str:
    """A hash of everything except the configuration that determines a task's windows."""
    return hashlib.sha256(f"{config.data.task}/{VERSION}".encode()).hexdigest()
