"""A pretrained model with routers: its evaluations, its speed."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from typing import Any, ClassVar

from mosar.records.measurement import Measurement
from mosar.records.record import Record

# The score from which a task counts as one that the model can do.
_SOLVED = 0.5


@dataclass(frozen=True, kw_only=True)
class RetrofitEvaluation(Record):
    """A pretrained model with routers, evaluated at one length under one routing."""

    kind: ClassVar[str] = "retrofit"
    base: str
    """The base model's file, folder or name on the hub."""
    adapter: str
    """sha256 of the routers' file; "" without routers (dense, and fixed windows)."""
    text: str
    """sha256 of the tokens of all windows at the longest length."""
    routing: str
    """"dense" (the base model's own attention), "soft", "top1", "sparse", or "window": every token
    reaches equally far, and the sinks are read."""
    length: int
    windows: int
    loss: float
    """Mean cross-entropy of the next token."""
    loss_stderr: float
    """The standard error of the mean, from the means of the windows."""
    window_losses: list[float]
    """The means of the windows of text, in their order."""
    layer_density: list[list[float]]
    """[L][Gr] pairs of the support divided by causal pairs; only under "sparse" and "window"."""
    layer_lost: list[list[float]]
    """[L][Gr] share of the layer's dense attention outside the support, for sampled queries; only
    under "sparse" and "window"."""
    regimes: dict[str, float]
    """Regime -> reach; one reach for a fixed window, none for dense attention."""

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.loss, 700.0))

    @property
    def density(self) -> float:
        """Mean over layers and groups; 1 if every pair is evaluated."""
        values = [value for layer in self.layer_density for value in layer]
        return statistics.fmean(values) if values else 1.0

    @property
    def lost(self) -> float:
        """Mean over layers and groups; 0 if every pair is evaluated."""
        values = [value for layer in self.layer_lost for value in layer]
        return statistics.fmean(values) if values else 0.0

    def derived(self) -> dict[str, Any]:
        return {"perplexity": self.perplexity, "density": self.density, "lost": self.lost}


@dataclass(frozen=True, kw_only=True)
class RetrofitSpeed(Record):
    """The speed of the whole retrofitted model at one prompt length: prefill, decoding, cache."""

    kind: ClassVar[str] = "retrofit.speed"
    base: str
    adapter: str
    length: int
    """Number of tokens in the prompt."""
    batch: int | None = None
    """Number of prompts side by side; None, in older records: one."""
    dtype: str | None = None
    """Of the model's weights; None, in older records: float32."""
    prefill: dict[str, Measurement]
    """By routing, "dense" and "sparse"; milliseconds for all prompts, without logits."""
    decode: dict[str, Measurement]
    """Milliseconds per token of every text, with logits."""
    cache_bytes: dict[str, int]
    """Memory of the cache after the prompts, by routing."""

    @property
    def setting(self) -> tuple[int, str, int]:
        """What was timed: prompts side by side, the weights' dtype, the length."""
        return self.batch or 1, self.dtype or "float32", self.length

    @property
    def prefill_speedup(self) -> float | None:
        return _quickest_ratio(self.prefill)

    @property
    def decode_speedup(self) -> float | None:
        return _quickest_ratio(self.decode)

    def derived(self) -> dict[str, Any]:
        return {
            "prefill_speedup": self.prefill_speedup,
            "decode_speedup": self.decode_speedup,
            "cache_share": self.cache_bytes["sparse"] / self.cache_bytes["dense"],
        }


@dataclass(frozen=True, kw_only=True)
class RetrofitNeedles(Record):
    """One retrieval task at one length under one routing."""

    kind: ClassVar[str] = "retrofit.needles"
    base: str
    adapter: str
    """sha256 of the routers' file; "" without routers."""
    task: str
    length: int
    routing: str
    """"dense", "sparse" or "window"."""
    reach: float | None
    """The reach of a fixed window."""
    contexts: int
    scores: list[float]
    """By question: the share of the expected words in the answer."""
    answers: list[str]
    density: float
    """The share of the texts' causal pairs that was read."""

    @property
    def score(self) -> float:
        return statistics.fmean(self.scores)

    @property
    def is_solved(self) -> bool:
        """Whether at least half of the expected words were found."""
        return self.score >= _SOLVED

    def derived(self) -> dict[str, Any]:
        return {"score": self.score}


def _quickest_ratio(samples: dict[str, Measurement]) -> float | None:
    """Uses the fastest samples, because other work on the machine can only add time."""
    dense, sparse = samples["dense"].min_ms, samples["sparse"].min_ms
    return dense / sparse if dense and sparse else None
