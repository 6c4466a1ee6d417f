"""Synthetic retrieval tasks; a window follows from its task, split, seed, length and index.

    passkey   … filler … KEY a b c d … filler … ASK a b c d      repeat the key
    recall    … n a … m b … filler … m b … filler … n a …        repeat the symbol of each name

Only answers are scored: the key after ASK, and the symbol after a name that occurred before. A
distance is measured from the token that must answer back to the token it must find. Every octave
(2^(i-1), 2^i] of distances is equally likely, so that there are enough short ones to learn from.

Shapes: B windows of L inputs, A answers per window, K tokens per answer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

VERSION = 2
"""Version of the windows; change it whenever the generated windows change."""
_FILLERS = 32


class TaskWindows(NamedTuple):
    """Windows of a task with their answers."""

    tokens: Tensor
    """[B, L + 1] int64: inputs are [:, :-1], targets [:, 1:]."""
    answers: Tensor
    """[B, A, K] int64: the inputs that must answer; each predicts the token after it."""
    distances: Tensor
    """[B, A] int64: from the first of them back to the token it must find."""

    @property
    def scored(self) -> Tensor:
        """[B, L] bool: the inputs that must answer."""
        scored_BL = torch.zeros(len(self.tokens), self.tokens.shape[1] - 1, dtype=torch.bool)
        return scored_BL.scatter_(1, self.answers.flatten(1), True)


class Task(Protocol):
    """A task for models that train on windows of `train_length` inputs."""

    name: str
    vocab_size: int
    answers: int
    """A: answers in a window of any length."""
    shortest: int
    """The shortest possible window."""
    chance: float
    """The accuracy of guessing among the symbols shown."""

    def __init__(self, train_length: int) -> None: ...

    def window(self, draws: Draws, length: int) -> tuple[NDArray, NDArray, NDArray]:
        """Tokens [length + 1], answers [A, K] and distances [A] of one window."""
        ...


class Passkey:
    """A key of four symbols is hidden in filler and must be repeated at the end."""

    name = "passkey"
    answers = 1
    symbols, size = 32, 4
    key_mark, ask_mark = 0, 1

    def __init__(self, train_length: int) -> None:
        self.vocab_size = 2 + self.symbols + _FILLERS
        self.shortest = 4 * self.size
        self.chance = float(self.size) ** -self.size

    def window(self, draws: Draws, length: int) -> tuple[NDArray, NDArray, NDArray]:
        # No symbol occurs twice, so that each determines the next one.
        key = 2 + draws.order(self.symbols)[: self.size]
        tokens = 2 + self.symbols + draws.many(_FILLERS, length + 1)
        ask = length - self.size
        distance = draws.distance(self.size, ask - 1)
        start = ask - distance - 1
        tokens[start : start + self.size + 1] = [self.key_mark, *key]
        tokens[ask:] = [self.ask_mark, *key]
        return tokens, ask + np.arange(self.size)[None], np.array([distance])


class Recall:
    """Associative recall with many queries: names with symbols, each asked for once later.

    A training window has one name per eight inputs, so names and symbols take half of its
    positions. Windows of other lengths have the same number of names.
    """

    name = "recall"

    def __init__(self, train_length: int) -> None:
        self.answers = max(train_length // 8, 1)
        self.names = self.symbols = 4 * self.answers
        self.vocab_size = self.names + self.symbols + _FILLERS
        self.shortest = 8 * self.answers
        self.chance = 1 / self.answers

    def window(self, draws: Draws, length: int) -> tuple[NDArray, NDArray, NDArray]:
        tokens = self.names + self.symbols + draws.many(_FILLERS, length + 1)
        names = draws.order(self.names)[: self.answers]
        symbols = self.names + draws.order(self.symbols)[: self.answers]
        free = np.ones(length // 2, dtype=bool)
        slots = np.array([_take_two(draws, free) for _ in range(self.answers)])
        for slot in slots.T:
            tokens[2 * slot], tokens[2 * slot + 1] = names, symbols
        shown, asked = slots.T
        return tokens, 2 * asked[:, None], 2 * (asked - shown) - 1


def _take_two(draws: Draws, free: NDArray[np.bool_]) -> tuple[int, int]:
    """Takes two free slots with a random distance."""
    while True:
        distance = draws.distance(1, len(free) - 1)
        starts = np.flatnonzero(free[:-distance] & free[distance:])
        if len(starts):
            start = int(starts[draws.below(len(starts))])
            free[[start, start + distance]] = False
            return start, start + distance


TASKS: dict[str, type[Task]] = {task.name: task for task in (Passkey, Recall)}


def make_windows(
    task: Task, indices: Iterable[int], length: int, *, split: str, seed: int = 0
) -> TaskWindows:
    """The windows with these indices; the same for the same task, length, split and seed."""
    if length < task.shortest:
        raise ValueError(f"length must be at least {task.shortest} for {task.name}, got {length}")
    made = [
        task.window(Draws(f"{VERSION}/{task.name}/{split}/{seed}/{length}/{index}"), length)
        for index in indices
    ]
    return TaskWindows(
        *(torch.from_numpy(np.stack(part)).long() for part in zip(*made, strict=True))
    )


class Draws:
    """Random numbers that follow from a name; integers only, the same on every machine."""

    def __init__(self, name: str) -> None:
        digest = hashlib.blake2b(name.encode(), digest_size=16).digest()
        # Only raw bits of numpy: its distributions may change with its version.
        self._bits = np.random.Philox(key=int.from_bytes(digest, "little"))

    def below(self, limit: int) -> int:
        """An integer in [0, limit)."""
        return int(self._bits.random_raw()) % limit

    def many(self, limit: int, count: int) -> NDArray[np.int64]:
        """`count` integers in [0, limit)."""
        return (self._bits.random_raw(count) % np.uint64(limit)).astype(np.int64)

    def order(self, size: int) -> NDArray[np.int64]:
        """A permutation of [0, size)."""
        return np.argsort(self._bits.random_raw(size), kind="stable")

    def distance(self, least: int, most: int) -> int:
        """In [least, most]: draws an octave (2^(i-1), 2^i] first, then a distance in it."""
        first, last = ((bound - 1).bit_length() for bound in (least, most))
        octave = first + self.below(last - first + 1)
        low, high = max((1 << octave >> 1) + 1, least), min(1 << octave, most)
        return low + self.below(high - low + 1)
