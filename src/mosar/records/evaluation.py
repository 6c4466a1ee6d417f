"""Results of `mosar evaluate`."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar

from mosar.records.record import Record
from mosar.records.training import Cell


@dataclass(frozen=True, kw_only=True)
class EvaluationRecord(Record):
    """One checkpoint evaluated at one length under one routing."""

    kind: ClassVar[str] = "evaluation"
    cell: Cell
    step: int
    train_length: int
    """N, the length it was trained at."""
    length: int
    routing: str
    """"native" (no routers), "soft", "top1", "sparse", or a mode such as "yarn"."""
    windows: int
    tokens: int
    """Predicted tokens; the same text at every length."""
    loss: float
    """Mean cross-entropy."""
    loss_stderr: float
    """Standard error of the mean, from the means of the windows."""
    buckets: list[list[float]]
    """[first position, end, mean cross-entropy, tokens] by position in the window."""
    seconds: float
    """Time of the forward passes, in turn with the other routings of the evaluation."""
    density: float
    """rho: pairs of the support over causal pairs, exact, mean over layers, groups and windows; 1
    where the geometry evaluates every pair."""
    layer_density: list[float]
    """The same by layer; empty where it is 1 by definition."""
    reach_soft: float | None
    """Normalized reach of the routers' probabilities at this length; None without routers."""
    reach_top1: float | None
    """The same of the one-hot choices."""
    discarded_mass: list[dict[str, float]]
    """By layer: "mean", "p95" and "worst" share of a row's attention that top1 has outside of the
    support; empty where it was not measured."""
    shares_soft: dict[str, list[list[float]]]
    """"query" and "key": [L][R] mean probabilities; empty without routers."""
    shares_top1: dict[str, list[list[float]]]
    """The same of the one-hot choices."""
    regimes: list[str]
    """Names, in the order of the shares; empty without routers."""
    example_labels: dict[str, list[str]]
    """"query" and "key": for each layer the regimes of the first tokens of the first window, one
    letter a token; empty without routers."""
    inputs: dict[str, Any] = field(default_factory=dict)
    """What it was computed from: "checkpoint" (sha256 of the parameters), "data" (fingerprint) and
    "block" (tokens of text that every length cuts into its windows)."""

    @property
    def perplexity(self) -> float:
        # A larger number would overflow and says nothing more.
        return math.exp(min(self.loss, 700.0))

    def derived(self) -> dict[str, Any]:
        return {"perplexity": self.perplexity, "factor": self.length / self.train_length}


@dataclass(frozen=True, kw_only=True)
class RetrievalRecord(Record):
    """How often a checkpoint finds what a synthetic task asks for, by distance."""

    kind: ClassVar[str] = "retrieval"
    cell: Cell
    step: int
    task: str
    """"passkey" or "recall"."""
    train_length: int
    length: int
    routing: str
    answers: int
    accuracy: float
    """Over all answers."""
    by_distance: list[list[float]]
    """[least distance, end, accuracy, answers] between the question and what it asks for."""
    reaches: dict[str, float]
    """Regime -> reach, for the marks of a figure."""
    chance: float
    """The accuracy of guessing."""
    density: float | None = None
    """Share of the causal pairs of these texts that are in the support; None in older records."""
    inputs: dict[str, Any] = field(default_factory=dict)
    """What it was computed from: "checkpoint" (sha256 of the parameters), "data" (fingerprint)."""
