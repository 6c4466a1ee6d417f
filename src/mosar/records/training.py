"""Runs, and the cells of an experiment that they belong to."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, field
from typing import Any, ClassVar

from mosar.records.record import Record

# Records are never altered, so they keep the name that a variant had when they were written. (Those
# of another recipe, called mosar-plus before 2026-11-18, cannot be told from today's by name.)
_EARLIER_NAMES = {"mosar-forget": "mosar-plus"}


def _word(text: str) -> str:
    """A value as part of a file name; a hash if it does not fit there."""
    if re.fullmatch(r"[\w.+-]{1,40}", text):
        return text
    return hashlib.sha256(text.encode()).hexdigest()[:8]


@dataclass(frozen=True, kw_only=True)
class Cell:
    """Which cell of an experiment a record belongs to."""

    variant: str
    preset: str
    seed: int
    grid: dict[str, Any] = field(default_factory=dict)
    """Dotted key -> value, if the experiment has an axis."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "variant", _EARLIER_NAMES.get(self.variant, self.variant))

    @property
    def name(self) -> str:
        """Also the name of its folder and file."""
        axis = "".join(f"-{key}={_word(str(value))}" for key, value in self.grid.items())
        return f"{self.variant}-seed{self.seed}{axis}"


@dataclass(frozen=True, kw_only=True)
class TrainingRecord(Record):
    """A finished training run: its configuration and its losses."""

    kind: ClassVar[str] = "training"
    cell: Cell
    config: dict[str, Any]
    """The resolved configuration, one object per section, as in the run folder."""
    data: dict[str, Any]
    """Where the text came from: sources, tokenizer, counts, fingerprint."""
    parameters: int
    """Number of parameters, including the embedding."""
    step: int
    tokens: int
    """Tokens seen in training."""
    seconds: float | None
    """Seconds spent in steps; None if not known for all of them."""
    train_curve: list[list[float]]
    """[step, lm_loss], thinned: means over equal spans of steps."""
    valid_curve: list[list[float]]
    """[step, lm_loss], every evaluation."""
    reach_curve: list[list[float]]
    """[step, expected reach] of the evaluations; empty without routers."""
