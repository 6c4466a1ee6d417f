"""Rows of `mosar bench`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from mosar.records.measurement import ErrorCheck, Measurement
from mosar.records.record import Record

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
