"""The text of an evaluation: the same tokens at every length.

Blocks of text, as long as the longest length, lie evenly over the validation split. A shorter
length cuts each block into its windows, so all lengths predict the same tokens, and what differs is
how much each prediction may look back on. (Lengths that do not divide one another: their least
common multiple.)

Shapes: B windows, T inputs each.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from torch import Tensor

from mosar.data.config import DataConfig
from mosar.data.stream import TokenStream
from mosar.errors import ModelError
from mosar.evaluation.loaded_run import LoadedRun
from mosar.records import EvaluationRecord, Record
from mosar.training.config import RunConfig

# The paper's 64 iterations at the training length, 32 at twice, 16 at four times.
ITERATIONS = 64
# Input tokens per pass; at least one window.
PASS_TOKENS = 4096


def default_tokens(config: RunConfig) -> int:
    """As many tokens as 64 training steps read."""
    return ITERATIONS * config.tokens_per_step


def check_blocks(
    stream: TokenStream, lengths: Sequence[int], tokens: int, name: str = "tokens"
) -> int:
    """The length of a block; a ModelError where the split holds none, a ValueError where
    `tokens`, which is called `name`, are fewer than one."""
    block = math.lcm(*lengths)
    if stream.num_windows(block) < 1:
        raise ModelError(
            f"the validation split in {stream.folder} has {stream.num_tokens} tokens, too few for "
            f"{_names(lengths, block)} (and one token more); give other --lengths"
        )
    if tokens < block:
        raise ValueError(
            f"{name} must be at least {block}, for {_names(lengths, block)}; got {tokens}"
        )
    return block


class ValidationText:
    """The blocks that one evaluation reads, at all of its lengths."""

    def __init__(
        self,
        loaded: LoadedRun,
        lengths: Sequence[int],
        *,
        data: Path | None = None,
        tokens: int | None = None,
    ):
        self.settings: DataConfig = loaded.config.data
        # Altered tokens must not be evaluated in silence: checksums are compared up to a size.
        self.stream = TokenStream(loaded.find_data(data), "valid", verify=None)
        self.device = loaded.device
        wanted = default_tokens(loaded.config) if tokens is None else tokens
        self.block = check_blocks(self.stream, lengths, wanted)
        there = self.stream.num_windows(self.block)
        number = min(there, wanted // self.block)
        self.blocks = np.arange(number) * there // number

    @property
    def tokens(self) -> int:
        """How many tokens are predicted at every length."""
        return len(self.blocks) * self.block

    def is_measured_by(self, record: Record) -> bool:
        """Whether a record covers the same amount of text."""
        return isinstance(record, EvaluationRecord) and record.tokens == self.tokens

    def batches(self, length: int) -> Iterator[tuple[Tensor, Tensor | None]]:
        """Tokens [B, length + 1] and document numbers [B, length], or None."""
        per_block = self.block // length
        windows = (self.blocks[:, None] * per_block + np.arange(per_block)).flatten()
        for chosen in np.array_split(windows, self.passes(length)):
            segments = None
            if self.settings.isolate_documents:
                segments = self.stream.segments(chosen, length).to(self.device)
            yield self.stream.windows(chosen, length).to(self.device), segments

    def passes(self, length: int) -> int:
        """How many batches there are."""
        return math.ceil(self.tokens // length / max(PASS_TOKENS // length, 1))


def _names(lengths: Sequence[int], block: int) -> str:
    if block == max(lengths):
        return f"a window of {block}"
    return f"a block of {block}, which windows of {', '.join(map(str, lengths))} divide"
