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

from mosar.data.manifest import SPLITS
from mosar.data.stream import TokenStream, batch_indices
from mosar.training.config import RunConfig
from mosar.training.errors import TrainingError

Batch = tuple[Tensor, Tensor | None]
"""Tokens [B, N + 1] and document numbers [B, N] (None: attention crosses documents)."""


class Batches:
    """The data of a run."""

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
        """A hash of the contents: the same wherever the data lies."""
        files = {name: asdict(entry) for name, entry in self.train.manifest.files.items()}
        return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()

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
