"""The windows that a step and an evaluation see: functions of the configuration and the step."""

from __future__ import annotations

import hashlib
import json
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

Batch = tuple[Tensor, Tensor | None]
"""Tokens [B, N + 1] and document numbers [B, N] (None: attention crosses documents)."""
ScoredBatch = tuple[Tensor, None, Tensor]
"""Tokens [B, N + 1], no documents, and which targets count [B, N]: as many in every window."""


def open_batches(config: RunConfig, share: Share = WHOLE) -> Batches | TaskBatches:
    """The data of a run: text from a folder, or the windows of a task."""
    return Batches(config, share) if config.data.task == "text" else TaskBatches(config, share)


def data_fingerprint(manifest: Manifest) -> str:
    """A hash of the contents of a dataset: the same wherever it lies."""
    files = {name: asdict(entry) for name, entry in manifest.files.items()}
    return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()


class Batches:
    """The data of a run that reads text, as the process of a share sees it."""

    def __init__(self, config: RunConfig, share: Share = WHOLE):
        self.config, self.share = config, share
        self.length = config.model.max_length
        self.device = torch.device(config.train.device)
        folder = config.data.folder
        # Altered tokens would train on in silence: checksums are compared up to a size.
        self.train, self.valid = (TokenStream(folder, split, verify=None) for split in SPLITS)
        if self.train.vocab_size > config.model.vocab_size:
            raise TrainingError(
                f"model.vocab_size is {config.model.vocab_size}, but the data in {folder} has "
                f"{self.train.vocab_size} different tokens"
            )
        for split, stream in (("train", self.train), ("valid", self.valid)):
            if stream.num_windows(self.length) < 1:
                raise TrainingError(
                    f"the {split} split in {folder} has {stream.num_tokens} tokens, fewer than a "
                    f"window of model.max_length + 1 = {self.length + 1}"
                )

    def fingerprint(self) -> str:
        return data_fingerprint(self.train.manifest)

    def of_step(self, step: int) -> Iterator[Batch]:
        """The micro-batches of update number `step` >= 1 that are this share's."""
        train = self.config.train
        indices = batch_indices(
            step - 1,
            train.windows_per_step,
            self.train.num_windows(self.length),
            self.config.data.seed,
        )
        own, size = self.share.windows(train), self.share.pass_size(train)
        for start in range(own.start, own.stop, size):
            yield self._batch(self.train, indices[start : start + size])

    def of_evaluation(self) -> Iterator[Batch]:
        """The same windows every time, spread over the validation split."""
        windows, size = self._evaluation_windows(), self.config.train.micro_batch
        for start in range(0, len(windows), size):
            yield self._batch(self.valid, windows[start : start + size])

    def shared_evaluation(self) -> Iterator[tuple[Batch, bool]]:
        """Of the same batches those that this share looks at, and whether they count for it."""
        windows, size = self._evaluation_windows(), self.config.train.micro_batch
        for number, own in self.share.rounds(-(-len(windows) // size)):
            yield self._batch(self.valid, windows[number * size : (number + 1) * size]), own

    def _evaluation_windows(self) -> NDArray[np.int64]:
        train = self.config.train
        there = self.valid.num_windows(self.length)
        number = min(there, train.eval_batches * train.windows_per_step)
        return np.arange(number) * there // number

    def _batch(self, stream: TokenStream, chosen: NDArray[np.int64]) -> Batch:
        segments = None
        if self.config.data.isolate_documents:
            segments = stream.segments(chosen, self.length).to(self.device)
        return stream.windows(chosen, self.length).to(self.device), segments


class TaskBatches:
    """The data of a run that learns a task: made when it is asked for, from seed and number."""

    def __init__(self, config: RunConfig, share: Share = WHOLE):
        self.config, self.share = config, share
        self.length = config.model.max_length
        self.device = torch.device(config.train.device)
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

    def of_step(self, step: int) -> Iterator[ScoredBatch]:
        """The micro-batches of update number `step` >= 1 that are this share's."""
        train = self.config.train
        first = (step - 1) * train.windows_per_step
        own, size = self.share.windows(train), self.share.pass_size(train)
        for start in range(first + own.start, first + own.stop, size):
            yield self._batch(range(start, start + size), "train")

    def of_evaluation(self) -> Iterator[ScoredBatch]:
        """The same windows every time."""
        size = self.config.train.micro_batch
        for number in range(self._num_evaluation_batches()):
            yield self._batch(range(number * size, (number + 1) * size), "valid")

    def shared_evaluation(self) -> Iterator[tuple[ScoredBatch, bool]]:
        """Of the same batches those that this share looks at, and whether they count for it."""
        size = self.config.train.micro_batch
        for number, own in self.share.rounds(self._num_evaluation_batches()):
            yield self._batch(range(number * size, (number + 1) * size), "valid"), own

    def _num_evaluation_batches(self) -> int:
        return self.config.train.eval_batches * self.config.train.accumulation

    def _batch(self, indices: range, split: str) -> ScoredBatch:
        # All runs are asked the same, whatever they learnt from.
        seed = self.config.data.seed if split == "train" else 0
        windows = make_windows(self.task, indices, self.length, split=split, seed=seed)
        return windows.tokens.to(self.device), None, windows.scored.to(self.device)


def task_fingerprint(config: RunConfig) -> str:
    """A hash of what decides the windows of a task, besides the configuration."""
    return hashlib.sha256(f"{config.data.task}/{VERSION}".encode()).hexdigest()
