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
from mosar.training.config import RunConfig
from mosar.training.errors import TrainingError

Batch = tuple[Tensor, Tensor | None]
"""Tokens [B, N + 1] and document numbers [B, N] (None: attention crosses documents)."""
ScoredBatch = tuple[Tensor, None, Tensor]
"""Tokens [B, N + 1], no documents, and which targets count [B, N]: as many in every window."""


def open_batches(config: RunConfig) -> Batches | TaskBatches:
    """The data of a run: text from a folder, or the windows of a task."""
    return Batches(config) if config.data.task == "text" else TaskBatches(config)


def data_fingerprint(manifest: Manifest) -> str:
    """A hash of the contents of a dataset: the same wherever it lies."""
    files = {name: asdict(entry) for name, entry in manifest.files.items()}
    return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()


class Batches:
    """The data of a run that reads text."""

    def __init__(self, config: RunConfig):
        self.config = config
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
        """The micro-batches of update number `step` >= 1."""
        train = self.config.train
        indices = batch_indices(
            step - 1,
            train.windows_per_step,
            self.train.num_windows(self.length),
            self.config.data.seed,
        )
        return self._batches(self.train, indices)

    def of_evaluation(self) -> Iterator[Batch]:
        """The same windows every time, spread over the validation split."""
        train = self.config.train
        there = self.valid.num_windows(self.length)
        number = min(there, train.eval_batches * train.windows_per_step)
        return self._batches(self.valid, np.arange(number) * there // number)

    def _batches(self, stream: TokenStream, indices: NDArray[np.int64]) -> Iterator[Batch]:
        size = self.config.train.micro_batch
        for start in range(0, len(indices), size):
            chosen = indices[start : start + size]
            segments = None
            if self.config.data.isolate_documents:
                segments = stream.segments(chosen, self.length).to(self.device)
            yield stream.windows(chosen, self.length).to(self.device), segments


class TaskBatches:
    """The data of a run that learns a task: made when it is asked for, from seed and number."""

    def __init__(self, config: RunConfig):
        self.config = config
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
        """The micro-batches of update number `step` >= 1."""
        number = self.config.train.windows_per_step
        return self._batches(range((step - 1) * number, step * number), "train")

    def of_evaluation(self) -> Iterator[ScoredBatch]:
        """The same windows every time."""
        train = self.config.train
        return self._batches(range(train.eval_batches * train.windows_per_step), "valid")

    def _batches(self, indices: range, split: str) -> Iterator[ScoredBatch]:
        size = self.config.train.micro_batch
        # All runs are asked the same, whatever they learnt from.
        seed = self.config.data.seed if split == "train" else 0
        for start in range(0, len(indices), size):
            windows = make_windows(
                self.task, indices[start : start + size], self.length, split=split, seed=seed
            )
            yield windows.tokens.to(self.device), None, windows.scored.to(self.device)


def task_fingerprint(config: RunConfig) -> str:
    """A hash of what decides the windows of a task, besides the configuration."""
    return hashlib.sha256(f"{config.data.task}/{VERSION}".encode()).hexdigest()
