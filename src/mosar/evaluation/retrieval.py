"""Accuracy of retrieval against distance, at one length under each routing.

An answer is right where every token of it is the most likely one after the right tokens before it:
what greedy decoding would say. Distances are grouped by octaves (2^(i-1), 2^i], cut at the reaches.

Shapes: B windows, A answers per window, K tokens per answer, C hidden size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from mosar.data.tasks import TASKS, Task, TaskWindows, make_windows
from mosar.evaluation.loaded_run import LoadedRun
from mosar.evaluation.routing import PairTally
from mosar.evaluation.validation_text import PASS_TOKENS, default_tokens
from mosar.records import Record, RetrievalRecord


def check_questions(
    task: Task, train_length: int, lengths: Sequence[int], tokens: int, name: str = "tokens"
) -> None:
    """A ValueError where a length is too short for the task, or `tokens`, which is called `name`,
    are fewer than a window."""
    shortest, longest = min(lengths), max(lengths)
    if shortest < task.shortest:
        raise ValueError(
            f"lengths must be at least {task.shortest} for {task.name} learnt at {train_length}, "
            f"got {shortest}"
        )
    if tokens < longest:
        raise ValueError(f"{name} must be at least {longest}, one window; got {tokens}")


class Questions:
    """The windows of one evaluation, with the same number of tokens at every length."""

    def __init__(self, loaded: LoadedRun, lengths: Sequence[int], tokens: int | None = None):
        self.task: Task = TASKS[loaded.config.data.task](loaded.train_length)
        self.tokens = default_tokens(loaded.config) if tokens is None else tokens
        check_questions(self.task, loaded.train_length, lengths, self.tokens)

    def is_measured_by(self, record: Record) -> bool:
        """Whether a record has the same number of questions, and a density (older ones do not)."""
        if not isinstance(record, RetrievalRecord) or record.density is None:
            return False
        return record.answers == self.windows(record.length) * self.task.answers

    def windows(self, length: int) -> int:
        return self.tokens // length

    def passes(self, length: int) -> int:
        return math.ceil(self.windows(length) / self._size(length))

    def batches(self, length: int):
        size = self._size(length)
        for start in range(0, self.windows(length), size):
            indices = range(start, min(start + size, self.windows(length)))
            # A split of its own, neither trained nor validated on; the same for every run.
            yield make_windows(self.task, indices, length, split="test")

    def _size(self, length: int) -> int:
        return max(PASS_TOKENS // length, 1)


@torch.no_grad()
def evaluate_retrieval(
    loaded: LoadedRun,
    questions: Questions,
    length: int,
    routings: Sequence[str],
    advance: Callable[[], None],
    **fields: Any,
) -> list[RetrievalRecord]:
    """One record per routing, with `fields`; `advance` is called after each batch."""
    operators = {routing: loaded.operator(routing) for routing in routings}
    right: dict[str, list[Tensor]] = {operator: [] for operator in operators.values()}
    pairs = {operator: PairTally() for operator in operators.values()}
    distances = []
    for windows in questions.batches(length):
        # Routings that are one operator are computed once.
        for operator, routing in {operators[r]: r for r in routings}.items():
            right[operator].append(answer(loaded, windows, routing, pairs[operator]).flatten())
        distances.append(windows.distances.flatten())
        advance()
    reaches = loaded.geometry.reaches()
    fields |= {"task": questions.task.name, "chance": questions.task.chance, "reaches": reaches}
    bounds, at = distance_bounds(length, reaches.values()), torch.cat(distances)
    return [
        RetrievalRecord(
            **fields,
            length=length,
            routing=routing,
            answers=len(found),
            accuracy=float(found.double().mean()),
            by_distance=by_distance(found, at, bounds),
            density=pairs[operators[routing]].density,
        )
        for routing, found in ((r, torch.cat(right[operators[r]])) for r in routings)
    ]


def answer(loaded: LoadedRun, windows: TaskWindows, routing: str, pairs: PairTally) -> Tensor:
    """Which answers are right, [B, A] bool; the pairs that were read are added to `pairs`."""
    tokens = windows.tokens[:, :-1].to(loaded.device)
    with loaded.executing(routing, tokens.shape[1]) as operator:
        output = loaded.decoder(tokens, routing=operator)
        pairs.add(
            loaded.decoder.geometries, (len(tokens), tokens.shape[1]), routing, output.routings
        )
    rows = torch.arange(len(windows.tokens))[:, None, None]
    asked_BAKC = output.hidden[rows, windows.answers]
    said_BAK = loaded.decoder.logits(asked_BAKC).argmax(dim=-1).cpu()
    return (said_BAK == windows.tokens[rows, windows.answers + 1]).all(dim=-1)


def distance_bounds(length: int, reaches: Any = ()) -> list[int]:
    """Where groups of distances begin, then the end; a reach is the last distance of its group."""
    octaves = {1, *(2**octave + 1 for octave in range(length.bit_length() + 1))}
    cuts = {math.floor(reach) + 1 for reach in reaches}
    return sorted(bound for bound in octaves | cuts if bound <= 2 * length)


def by_distance(right: Tensor, distances: Tensor, bounds: Sequence[int]) -> list[list[float]]:
    """[least distance, end, accuracy, answers] of the groups that have answers."""
    rows = []
    for least, end in pairwise(bounds):
        chosen = right[(distances >= least) & (distances < end)]
        if len(chosen):
            rows.append([least, end, float(chosen.double().mean()), len(chosen)])
    return rows
