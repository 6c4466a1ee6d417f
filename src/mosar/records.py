"""The schema of every result we write: JSON objects, one a line, appended and never changed.

A line holds `schema`, `kind`, `created`, `environment`, the fields of its kind, and `derived`: what
follows from them, written for readers of the file and computed again when it is read here.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import re
import statistics
import subprocess
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, Self

from mosar.version import __version__

SCHEMA_VERSION = 1


def environment() -> dict[str, Any]:
    """The software and the machine that a result was made with."""
    import torch

    return {
        "mosar": __version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "cpu": _cpu_model(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "platform": platform.platform(),
        "commit": _commit(),
    }


@lru_cache(maxsize=1)
def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


@lru_cache(maxsize=1)
def _commit() -> str | None:
    """The commit of this source tree, "+" where it was changed since; None outside of one."""
    folder = Path(__file__).parent

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(folder), *arguments]
        return subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=10
        ).stdout

    try:
        # An installed copy may lie inside a repository of something else: ours tracks this file.
        git("ls-files", "--error-unmatch", Path(__file__).name)
        commit = git("rev-parse", "HEAD").strip()
        return commit + ("+" if git("status", "--porcelain", "--", str(folder)) else "")
    except (OSError, subprocess.SubprocessError):
        return None


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


@dataclass(frozen=True, kw_only=True)
class Record:
    """What every kind of record carries."""

    kind: ClassVar[str]
    created: str = field(default_factory=_now)
    """When, ISO 8601, UTC."""
    environment: dict[str, Any] = field(default_factory=environment)
    """As `environment()` gives it."""

    def derived(self) -> dict[str, Any]:
        """What follows from the fields."""
        return {}

    def to_dict(self) -> dict[str, Any]:
        head = {"schema": SCHEMA_VERSION, "kind": self.kind}
        return head | asdict(self) | {"derived": self.derived()}

    @classmethod
    def from_fields(cls, values: dict[str, Any]) -> Self:
        """The record of these fields; a ValueError names a field that is unknown or missing."""
        check_fields(cls, values)
        return cls(**values)


def check_fields(cls: type, values: object) -> None:
    """A ValueError where `values` is not an object with every field of the dataclass `cls`."""
    if not isinstance(values, dict):
        raise ValueError(f"{cls.__name__} must be a JSON object, got {values!r:.60}")
    known = {item.name for item in fields(cls)}
    unknown, missing = sorted(set(values) - known), sorted(known - set(values))
    if unknown or missing:
        raise ValueError(f"{cls.__name__} lacks the fields {missing} and has unknown {unknown}")


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """What was measured of one competitor, or why nothing was."""

    samples_ms: tuple[float, ...] = ()
    """One time a round, milliseconds a call."""
    peak_bytes: int | None = None
    """Peak resident memory of one call above what was there before it."""
    unavailable: str | None = None
    """Why a figure is missing."""

    @property
    def median_ms(self) -> float | None:
        return statistics.median(self.samples_ms) if self.samples_ms else None

    @property
    def min_ms(self) -> float | None:
        return min(self.samples_ms, default=None)

    @classmethod
    def from_fields(cls, values: dict[str, Any]) -> Self:
        check_fields(cls, values)
        nested: dict[str, Any] = {"samples_ms": tuple(values["samples_ms"])}
        return cls(**values | nested)


@dataclass(frozen=True, kw_only=True)
class ErrorCheck:
    """The largest error of a tensor against float64, and the budget it had."""

    error: float | None
    """None: not a number."""
    budget: float

    @property
    def passed(self) -> bool:
        return self.error is not None and self.error <= self.budget

    @classmethod
    def from_fields(cls, values: dict[str, Any]) -> Self:
        check_fields(cls, values)
        return cls(**values)


# A forward pass reads a pair twice (score, value) with a multiplication and an addition each; with
# the backward pass it is 3.5 times that, the scores being computed again.
_FLOPS_PER_PAIR = 4.0
_WITH_BACKWARD = 3.5


@dataclass(frozen=True, kw_only=True)
class AttentionBenchmark(Record):
    """One row of `mosar bench attention`: one problem, every competitor."""

    kind: ClassVar[str] = "bench.attention"
    mode: str
    """"sparse", "sparse-train", "soft-train" or "distance-train"."""
    heads: int
    kv_heads: int
    head_dim: int
    length: int
    """n, queries and keys."""
    labels: str
    """Where they come from: "independent", "clustered" or a file's name; "none": none are read."""
    seed: int
    pairs: int
    """Pairs inside the support."""
    causal_pairs: int
    gemm_gflops: float
    """What a large matrix product has reached on this machine, in the same run up to this row."""
    checks: dict[str, ErrorCheck]
    """By tensor: "out", and with training "dq", "dk", "dv", "dpi_q", "dpi_k"."""
    measurements: dict[str, Measurement]
    """By competitor, "sdpa" and "ours" among them."""
    plan: Measurement
    """Building ours' plan alone."""

    @property
    def shape(self) -> str:
        return f"{self.heads}x{self.kv_heads}x{self.head_dim}"

    @property
    def trains(self) -> bool:
        return self.mode.endswith("-train")

    @property
    def density(self) -> float:
        """rho: the share of the causal pairs that are inside the support."""
        return self.pairs / self.causal_pairs

    @property
    def correct(self) -> bool:
        return all(check.passed for check in self.checks.values())

    @property
    def speedup(self) -> float | None:
        """Times faster than dense SDPA; None where ours is wrong or one was not timed."""
        return self.speedup_of("ours") if self.correct else None

    def speedup_of(self, competitor: str) -> float | None:
        dense, theirs = self.median_ms("sdpa"), self.median_ms(competitor)
        return dense / theirs if dense and theirs else None

    def median_ms(self, competitor: str) -> float | None:
        return self.measurements.get(competitor, Measurement()).median_ms

    def peak_bytes(self, competitor: str) -> int | None:
        return self.measurements.get(competitor, Measurement()).peak_bytes

    @property
    def speedup_times_density(self) -> float | None:
        """1: all of what sparsity promises."""
        return None if self.speedup is None else self.speedup * self.density

    @property
    def plan_share(self) -> float | None:
        """Time of the plan over time of ours, which includes it."""
        plan, ours = self.plan.median_ms, self.median_ms("ours")
        return plan / ours if plan and ours else None

    @property
    def memory_ratio(self) -> float | None:
        """Peak memory of ours over that of SDPA."""
        ours, dense = self.peak_bytes("ours"), self.peak_bytes("sdpa")
        return ours / dense if ours is not None and dense else None

    @property
    def gflops(self) -> float | None:
        """Useful arithmetic of ours, counting exact pairs, in 10^9 operations a second."""
        ours = self.median_ms("ours")
        if ours is None or not self.correct:
            return None
        per_pair = _FLOPS_PER_PAIR * (_WITH_BACKWARD if self.trains else 1.0)
        return per_pair * self.heads * self.head_dim * self.pairs / (ours * 1e6)

    def derived(self) -> dict[str, Any]:
        return {
            "density": self.density,
            "correct": self.correct,
            "median_ms": {name: m.median_ms for name, m in self.measurements.items()},
            "min_ms": {name: m.min_ms for name, m in self.measurements.items()},
            "speedup": self.speedup,
            "speedup_times_density": self.speedup_times_density,
            "plan_share": self.plan_share,
            "memory_ratio": self.memory_ratio,
            "gflops": self.gflops,
            "gemm_share": None if self.gflops is None else self.gflops / self.gemm_gflops,
        }

    @classmethod
    def from_fields(cls, values: dict[str, Any]) -> Self:
        check_fields(cls, values)
        nested: dict[str, Any] = {
            "checks": {name: ErrorCheck.from_fields(v) for name, v in values["checks"].items()},
            "measurements": {
                name: Measurement.from_fields(v) for name, v in values["measurements"].items()
            },
            "plan": Measurement.from_fields(values["plan"]),
        }
        return cls(**values | nested)


@dataclass(frozen=True, kw_only=True)
class DecodeBenchmark(Record):
    """One row of `mosar bench decode`: one step's attention at one length of context."""

    kind: ClassVar[str] = "bench.decode"
    heads: int
    kv_heads: int
    head_dim: int
    length: int
    """Tokens of context of the last step."""
    steps: int
    """Steps of a pass; a sample is their mean."""
    labels: str
    """Where they come from: "independent", "clustered" or a file's name."""
    seed: int
    keys_read: float
    """Keys inside the support of a step's query, on average."""
    allocated_bytes: int
    """What the regime cache holds of memory after the last step."""
    used_bytes: int
    """What of it the stored tokens take."""
    dense_bytes: int
    """Keys and values of all tokens."""
    dense_form: str
    """How SDPA was called: "grouped", "gqa" or "expanded"; "none": it was not."""
    checks: dict[str, ErrorCheck]
    """"out"."""
    measurements: dict[str, Measurement]
    """By competitor, "sdpa" and "ours"; milliseconds a step."""

    @property
    def shape(self) -> str:
        return f"{self.heads}x{self.kv_heads}x{self.head_dim}"

    @property
    def correct(self) -> bool:
        return all(check.passed for check in self.checks.values())

    def median_ms(self, competitor: str) -> float | None:
        return self.measurements.get(competitor, Measurement()).median_ms

    @property
    def speedup(self) -> float | None:
        """Times faster than SDPA; None where ours is wrong or one was not timed."""
        dense, ours = self.median_ms("sdpa"), self.median_ms("ours")
        return dense / ours if self.correct and dense and ours else None

    @property
    def memory_ratio(self) -> float:
        """Allocated bytes over the dense ones."""
        return self.allocated_bytes / self.dense_bytes

    def gigabytes_per_second(self, competitor: str) -> float | None:
        """Keys and values that a step must read, over its time."""
        time = self.median_ms(competitor)
        share = self.keys_read / self.length if competitor == "ours" else 1.0
        return share * self.dense_bytes / (time * 1e6) if time else None

    def derived(self) -> dict[str, Any]:
        return {
            "correct": self.correct,
            "median_ms": {name: m.median_ms for name, m in self.measurements.items()},
            "min_ms": {name: m.min_ms for name, m in self.measurements.items()},
            "speedup": self.speedup,
            "memory_ratio": self.memory_ratio,
            "gigabytes_per_second": {
                name: self.gigabytes_per_second(name) for name in self.measurements
            },
        }

    @classmethod
    def from_fields(cls, values: dict[str, Any]) -> Self:
        check_fields(cls, values)
        nested: dict[str, Any] = {
            "checks": {name: ErrorCheck.from_fields(v) for name, v in values["checks"].items()},
            "measurements": {
                name: Measurement.from_fields(v) for name, v in values["measurements"].items()
            },
        }
        return cls(**values | nested)


@dataclass(frozen=True, kw_only=True)
class ModelDecodeBenchmark(Record):
    """One row of `mosar bench decode --model`: whole models writing at one length of context."""

    kind: ClassVar[str] = "bench.decode-model"
    model: str
    """Whose sizes they have."""
    sizes: dict[str, int]
    """Fields of a ModelConfig."""
    length: int
    """Tokens of context of the last one."""
    steps: int
    """Tokens of a pass; a sample is their mean."""
    labels: str
    """Where they come from: "independent", "clustered" or a file's name."""
    seed: int
    parameters: dict[str, int]
    """By competitor."""
    cache_bytes: dict[str, int]
    """What its cache holds of memory after the last token, by competitor."""
    checks: dict[str, ErrorCheck]
    """"logits"."""
    measurements: dict[str, Measurement]
    """By competitor, "transformers", "dense" and "ours"; milliseconds a token."""

    @property
    def correct(self) -> bool:
        return all(check.passed for check in self.checks.values())

    def median_ms(self, competitor: str) -> float | None:
        return self.measurements.get(competitor, Measurement()).median_ms

    def tokens_per_second(self, competitor: str) -> float | None:
        time = self.median_ms(competitor)
        return 1e3 / time if time else None

    def speedup(self, competitor: str) -> float | None:
        """Times faster than it; None where ours is wrong or one was not timed."""
        theirs, ours = self.median_ms(competitor), self.median_ms("ours")
        return theirs / ours if self.correct and theirs and ours else None

    def memory_ratio(self, competitor: str) -> float | None:
        """Bytes of our cache over those of its cache."""
        theirs = self.cache_bytes.get(competitor)
        return self.cache_bytes["ours"] / theirs if theirs else None

    def derived(self) -> dict[str, Any]:
        others = [name for name in self.measurements if name != "ours"]
        return {
            "correct": self.correct,
            "median_ms": {name: m.median_ms for name, m in self.measurements.items()},
            "tokens_per_second": {name: self.tokens_per_second(name) for name in self.measurements},
            "speedup": {name: self.speedup(name) for name in others},
            "memory_ratio": {name: self.memory_ratio(name) for name in others},
        }

    @classmethod
    def from_fields(cls, values: dict[str, Any]) -> Self:
        check_fields(cls, values)
        nested: dict[str, Any] = {
            "checks": {name: ErrorCheck.from_fields(v) for name, v in values["checks"].items()},
            "measurements": {
                name: Measurement.from_fields(v) for name, v in values["measurements"].items()
            },
        }
        return cls(**values | nested)


@dataclass(frozen=True, kw_only=True)
class TrainingBenchmark(Record):
    """One row of `mosar bench train`: one model size and length, everybody's training step."""

    kind: ClassVar[str] = "bench.train"
    preset: str
    setting: str
    """"capped": with Gemma 2's soft-caps, "plain": without."""
    length: int
    batch: int
    parameters: dict[str, int]
    """By competitor."""
    gemm_gflops: float
    """What a large matrix product reached on this machine, just before."""
    checks: dict[str, ErrorCheck]
    """The loss before the first step: of ours against float64, of others' against ours."""
    measurements: dict[str, Measurement]
    """By competitor; one sample is one step."""

    @property
    def correct(self) -> bool:
        return all(check.passed for check in self.checks.values())

    def tokens_per_second(self, competitor: str) -> float | None:
        time = self.measurements.get(competitor, Measurement()).median_ms
        return 1e3 * self.batch * self.length / time if time else None

    def ratio(self, ours: str, other: str) -> float | None:
        """Tokens a second over another's; None where a result is wrong or one was not timed."""
        mine, theirs = self.tokens_per_second(ours), self.tokens_per_second(other)
        return mine / theirs if self.correct and mine and theirs else None

    @property
    def fastest_gemma2(self) -> str | None:
        """Which of transformers' ways to attend was the quickest."""
        rates = {
            name: rate
            for name in self.measurements
            if name.startswith("gemma2") and (rate := self.tokens_per_second(name))
        }
        return max(rates, key=rates.__getitem__, default=None)

    @property
    def memory_ratio(self) -> float | None:
        """Peak memory of mosar over that of rope."""
        mosar, rope = (
            self.measurements.get(name, Measurement()).peak_bytes for name in ("mosar", "rope")
        )
        return mosar / rope if mosar and rope else None

    def derived(self) -> dict[str, Any]:
        gemma2 = self.fastest_gemma2
        return {
            "correct": self.correct,
            "tokens_per_second": {name: self.tokens_per_second(name) for name in self.measurements},
            "mosar_over_rope": self.ratio("mosar", "rope"),
            "rope_over_gemma2": None if gemma2 is None else self.ratio("rope", gemma2),
            "rope_over_nanogpt": self.ratio("rope", "nanogpt"),
            "memory_ratio": self.memory_ratio,
        }

    @classmethod
    def from_fields(cls, values: dict[str, Any]) -> Self:
        check_fields(cls, values)
        nested: dict[str, Any] = {
            "checks": {name: ErrorCheck.from_fields(v) for name, v in values["checks"].items()},
            "measurements": {
                name: Measurement.from_fields(v) for name, v in values["measurements"].items()
            },
        }
        return cls(**values | nested)


def _word(text: str) -> str:
    """A value as part of a file's name; what does not fit there is named by its hash."""
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
    """Dotted key -> value, where the experiment is repeated along an axis."""

    @property
    def name(self) -> str:
        """Also the name of its folder and file."""
        axis = "".join(f"-{key}={_word(str(value))}" for key, value in self.grid.items())
        return f"{self.variant}-seed{self.seed}{axis}"

    @classmethod
    def from_fields(cls, values: dict[str, Any]) -> Self:
        check_fields(cls, values)
        return cls(**values)


@dataclass(frozen=True, kw_only=True)
class TrainingRecord(Record):
    """A finished training run: what it was and how its losses went."""

    kind: ClassVar[str] = "training"
    cell: Cell
    config: dict[str, Any]
    """The resolved configuration, an object a section, as in the run folder."""
    data: dict[str, Any]
    """Where the text came from: sources, tokenizer, counts, fingerprint."""
    parameters: int
    """Numbers that were learnt, the embedding among them."""
    step: int
    tokens: int
    """Seen in training."""
    seconds: float | None
    """Spent in steps; None where it is not known for all of them."""
    train_curve: list[list[float]]
    """[step, lm_loss], thinned: means over equal spans of steps."""
    valid_curve: list[list[float]]
    """[step, lm_loss], every evaluation."""
    reach_curve: list[list[float]]
    """[step, expected reach] of the evaluations; empty without routers."""

    @classmethod
    def from_fields(cls, values: dict[str, Any]) -> Self:
        check_fields(cls, values)
        nested: dict[str, Any] = {"cell": Cell.from_fields(values["cell"])}
        return cls(**values | nested)


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
    """"native" (no routers), "soft", "top1" or "sparse"."""
    windows: int
    tokens: int
    """Predicted tokens; the same text at every length."""
    loss: float
    """Mean cross-entropy."""
    loss_stderr: float
    """Of the mean, from the windows' own means."""
    buckets: list[list[float]]
    """[first position, end, mean cross-entropy, tokens] by position in the window."""
    seconds: float
    """Of the forward passes, taken in turn with the other routings of the same evaluation."""
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
        # Beyond this there is nothing to be learnt from the number.
        return math.exp(min(self.loss, 700.0))

    def derived(self) -> dict[str, Any]:
        return {"perplexity": self.perplexity, "factor": self.length / self.train_length}

    @classmethod
    def from_fields(cls, values: dict[str, Any]) -> Self:
        check_fields(cls, values)
        nested: dict[str, Any] = {"cell": Cell.from_fields(values["cell"])}
        return cls(**values | nested)


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
    inputs: dict[str, Any] = field(default_factory=dict)
    """What it was computed from: "checkpoint" (sha256 of the parameters), "data" (fingerprint)."""

    @classmethod
    def from_fields(cls, values: dict[str, Any]) -> Self:
        check_fields(cls, values)
        nested: dict[str, Any] = {"cell": Cell.from_fields(values["cell"])}
        return cls(**values | nested)


@dataclass(frozen=True, kw_only=True)
class RetrofitEvaluation(Record):
    """A pretrained model with routers, evaluated at one length under one routing."""

    kind: ClassVar[str] = "retrofit"
    base: str
    """The base model's file, folder or name on the hub."""
    adapter: str
    """sha256 of the routers' file; "" where they play no part: dense, and fixed windows."""
    text: str
    """sha256 of the tokens of the windows at the longest length."""
    routing: str
    """"dense" (the base model's own attention), "soft", "top1", "sparse", or "window": every token
    reaches equally far, and the sinks are read."""
    length: int
    windows: int
    loss: float
    """Mean cross-entropy of the next token."""
    loss_stderr: float
    """Of the mean, from the windows' own means."""
    window_losses: list[float]
    """The means of the windows of text, in their order."""
    layer_density: list[list[float]]
    """[L][Gr] pairs of the support over causal pairs; only under "sparse" and "window"."""
    layer_lost: list[list[float]]
    """[L][Gr] share of the layer's dense attention that lies outside of the support, of sampled
    queries; only under "sparse" and "window"."""
    regimes: dict[str, float]
    """Regime -> reach; of a fixed window its one reach, of dense attention none."""

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.loss, 700.0))

    @property
    def density(self) -> float:
        """Mean over layers and groups; 1 where every pair is evaluated."""
        values = [value for layer in self.layer_density for value in layer]
        return statistics.fmean(values) if values else 1.0

    @property
    def lost(self) -> float:
        """Mean over layers and groups; 0 where every pair is evaluated."""
        values = [value for layer in self.layer_lost for value in layer]
        return statistics.fmean(values) if values else 0.0

    def derived(self) -> dict[str, Any]:
        return {"perplexity": self.perplexity, "density": self.density, "lost": self.lost}


@dataclass(frozen=True, kw_only=True)
class RetrofitSpeed(Record):
    """The whole retrofitted model at one length of prompt: prefill, decoding, cache."""

    kind: ClassVar[str] = "retrofit.speed"
    base: str
    adapter: str
    length: int
    """Tokens of the prompt."""
    prefill: dict[str, Measurement]
    """By routing, "dense" and "sparse"; milliseconds a prompt, without logits."""
    decode: dict[str, Measurement]
    """Milliseconds a token, with logits."""
    cache_bytes: dict[str, int]
    """What the cache holds of memory after the prompt, by routing."""

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

    @classmethod
    def from_fields(cls, values: dict[str, Any]) -> Self:
        check_fields(cls, values)
        nested: dict[str, Any] = {
            name: {routing: Measurement.from_fields(v) for routing, v in values[name].items()}
            for name in ("prefill", "decode")
        }
        return cls(**values | nested)


def _quickest_ratio(samples: dict[str, Measurement]) -> float | None:
    """Of the quickest samples: what else runs on the machine only ever adds."""
    dense, sparse = samples["dense"].min_ms, samples["sparse"].min_ms
    return dense / sparse if dense and sparse else None


_KINDS: dict[str, type[Record]] = {
    cls.kind: cls
    for cls in (
        AttentionBenchmark,
        DecodeBenchmark,
        ModelDecodeBenchmark,
        TrainingBenchmark,
        TrainingRecord,
        EvaluationRecord,
        RetrievalRecord,
        RetrofitEvaluation,
        RetrofitSpeed,
    )
}


def append_record(path: Path | str, record: Record) -> None:
    """Adds one line to a file, in one write that has reached the disk when this returns."""
    line = json.dumps(record.to_dict(), allow_nan=False).encode() + b"\n"
    with open(path, "ab+", buffering=0) as file:
        end = file.seek(0, os.SEEK_END)
        if end:
            file.seek(end - 1)
            if file.read(1) != b"\n":
                # Somebody died in the middle of a line: that line is lost, this one must not be.
                line = b"\n" + line
        if file.write(line) != len(line):
            raise OSError(f"{path} took only a part of a record; is the disk full?")
        os.fsync(file.fileno())


def read_records(path: Path | str) -> list[Record]:
    """The records of a file in its order; a damaged line is a ValueError that names it."""
    records = []
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                records.append(_decode(line))
            except (ValueError, TypeError, AttributeError) as error:
                raise ValueError(f"{path}, line {number}: {error}") from None
    return records


def _decode(line: bytes) -> Record:
    values = json.loads(line)
    if not isinstance(values, dict):
        raise ValueError(f"a record must be a JSON object, got {type(values).__name__}")
    schema, kind = values.pop("schema", None), values.pop("kind", None)
    if schema != SCHEMA_VERSION:
        raise ValueError(f"schema must be {SCHEMA_VERSION}, got {schema!r}")
    if kind not in _KINDS:
        raise ValueError(f"kind must be one of {sorted(_KINDS)}, got {kind!r}")
    values.pop("derived", None)
    return _KINDS[kind].from_fields(values)
