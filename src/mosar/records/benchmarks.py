"""Rows of `mosar bench`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from mosar.records.measurement import ErrorCheck, Measurement
from mosar.records.record import Record

# Operations per pair. A forward pass has two products per pair (score, value), each with a
# multiplication and an addition. With the backward pass it is 3.5 times that, because the backward
# pass recomputes the scores.
_FORWARD, _WITH_BACKWARD = 4.0, 3.5 * 4.0


def _divide(a: float | None, b: float | None) -> float | None:
    """None if a figure is missing."""
    return a / b if a is not None and b else None


@dataclass(frozen=True, kw_only=True)
class Benchmark(Record):
    """One row of a benchmark: one case, every competitor."""

    length: int
    """Number of tokens; in decoding, the context of the last step."""
    checks: dict[str, ErrorCheck]
    """By tensor or competitor, checked before anything is timed."""
    measurements: dict[str, Measurement]
    """By competitor; a sample is milliseconds per call, per step or per token."""
    derived_names: ClassVar[tuple[str, ...]] = ("correct", "speedup", "memory_ratio")
    derived_by_competitor: ClassVar[tuple[str, ...]] = ("median_ms", "min_ms")

    @property
    def correct(self) -> bool:
        return all(check.passed for check in self.checks.values())

    def median_ms(self, competitor: str) -> float | None:
        return self.measurements.get(competitor, Measurement()).median_ms

    def min_ms(self, competitor: str) -> float | None:
        return self.measurements[competitor].min_ms

    def peaks_bytes(self, *competitors: str) -> tuple[int | None, ...]:
        """Peak memory by competitor."""
        return tuple(self.measurements.get(name, Measurement()).peak_bytes for name in competitors)

    def ratio(self, ours: str, other: str) -> float | None:
        """Speed-up over another competitor; None if a result is wrong or one was not timed."""
        return _divide(self.median_ms(other), self.median_ms(ours)) if self.correct else None

    def derived(self) -> dict[str, Any]:
        by_competitor = {
            figure: {name: getattr(self, figure)(name) for name in self.measurements}
            for figure in self.derived_by_competitor
        }
        return {name: getattr(self, name) for name in self.derived_names} | by_competitor


@dataclass(frozen=True, kw_only=True)
class ShapedBenchmark(Benchmark):
    """One row of a benchmark of attention alone."""

    labels: str
    """The source of the labels: "independent", "clustered" or a file's name; "none": no labels."""
    seed: int
    heads: int
    kv_heads: int
    head_dim: int

    @property
    def shape(self) -> str:
        return f"{self.heads}x{self.kv_heads}x{self.head_dim}"

    @property
    def speedup(self) -> float | None:
        """Speed-up over dense SDPA; None if our result is wrong or one was not timed."""
        return self.ratio("ours", "sdpa")


@dataclass(frozen=True, kw_only=True)
class AttentionBenchmark(ShapedBenchmark):
    """One row of `mosar bench attention`."""

    kind: ClassVar[str] = "bench.attention"
    mode: str
    """"sparse", "sparse-train", "soft-train" or "distance-train"."""
    pairs: int
    """Number of pairs inside the support."""
    causal_pairs: int
    gemm_gflops: float
    """The best speed of a large matrix product on this machine, in the same run up to this row."""
    plan: Measurement
    """The time of our plan alone."""
    derived_names = (
        *("density", "correct", "speedup", "speedup_times_density"),
        *("plan_share", "memory_ratio", "gflops", "gemm_share"),
    )

    @property
    def density(self) -> float:
        """rho: the share of the causal pairs that is inside the support."""
        return self.pairs / self.causal_pairs

    @property
    def speedup_times_density(self) -> float | None:
        """Speed-up times density; 1 is the full gain that the sparsity allows."""
        return None if self.speedup is None else self.speedup * self.density

    @property
    def plan_share(self) -> float | None:
        """The time of the plan divided by our whole time, which includes it."""
        return _divide(self.plan.median_ms, self.median_ms("ours"))

    @property
    def memory_ratio(self) -> float | None:
        """Our peak memory divided by that of SDPA."""
        return _divide(*self.peaks_bytes("ours", "sdpa"))

    @property
    def gflops(self) -> float | None:
        """Our useful arithmetic, counting exact pairs, in 10^9 operations per second."""
        per_pair = _WITH_BACKWARD if self.mode.endswith("-train") else _FORWARD
        count = per_pair * self.heads * self.head_dim * self.pairs
        return _divide(count / 1e6, self.median_ms("ours")) if self.correct else None

    @property
    def gemm_share(self) -> float | None:
        return _divide(self.gflops, self.gemm_gflops)


@dataclass(frozen=True, kw_only=True)
class DecodeBenchmark(ShapedBenchmark):
    """One row of `mosar bench decode`: one step's attention at one context length."""

    kind: ClassVar[str] = "bench.decode"
    steps: int
    """Number of steps in a pass; a sample is their mean."""
    keys_read: float
    """Number of keys inside the support of a step's query, on average."""
    allocated_bytes: int
    """Memory that the regime cache has allocated after the last step."""
    used_bytes: int
    """The part of it that the stored tokens use."""
    dense_bytes: int
    """Bytes of the keys and values of all tokens."""
    dense_form: str
    """How SDPA was called: "grouped", "gqa" or "expanded"; "none": not at all."""
    derived_by_competitor = ("median_ms", "min_ms", "gigabytes_per_second")

    @property
    def memory_ratio(self) -> float:
        """Allocated bytes divided by dense bytes."""
        return self.allocated_bytes / self.dense_bytes

    def gigabytes_per_second(self, competitor: str) -> float | None:
        """Bytes of keys and values that a step must read, divided by its time."""
        share = self.keys_read / self.length if competitor == "ours" else 1.0
        return _divide(share * self.dense_bytes / 1e6, self.median_ms(competitor))


@dataclass(frozen=True, kw_only=True)
class ModelDecodeBenchmark(Benchmark):
    """One row of `mosar bench decode --model`: whole models that write at one context length."""

    kind: ClassVar[str] = "bench.decode-model"
    model: str
    """The model whose sizes they have."""
    sizes: dict[str, int]
    """Fields of a ModelConfig."""
    steps: int
    """Number of tokens in a pass; a sample is their mean."""
    labels: str
    seed: int
    parameters: dict[str, int]
    """By competitor."""
    cache_bytes: dict[str, int]
    """Memory of the cache after the last token, by competitor."""
    derived_names = ("correct",)
    derived_by_competitor = ("median_ms", "tokens_per_second")

    def tokens_per_second(self, competitor: str) -> float | None:
        return _divide(1e3, self.median_ms(competitor))

    def speedup(self, competitor: str) -> float | None:
        """Speed-up over a competitor; None if our result is wrong or one was not timed."""
        return self.ratio("ours", competitor)

    def memory_ratio(self, competitor: str) -> float | None:
        """Bytes of our cache divided by those of the competitor's cache."""
        return _divide(self.cache_bytes["ours"], self.cache_bytes.get(competitor))

    def derived(self) -> dict[str, Any]:
        others = [name for name in self.measurements if name != "ours"]
        return super().derived() | {
            "speedup": {name: self.speedup(name) for name in others},
            "memory_ratio": {name: self.memory_ratio(name) for name in others},
        }


@dataclass(frozen=True, kw_only=True)
class TrainingBenchmark(Benchmark):
    """One row of `mosar bench train`: the training step of every competitor at one length."""

    kind: ClassVar[str] = "bench.train"
    preset: str
    setting: str
    """"capped": with Gemma 2's soft-caps, "plain": without."""
    batch: int
    parameters: dict[str, int]
    """By competitor."""
    gemm_gflops: float | None = None
    """The speed of a large matrix product on this machine, measured just before."""
    density: float | None = None
    """The exact density of what a trained model reads; None: the models are not trained."""
    derived_names = (
        *("correct", "mosar_over_rope", "rope_over_gemma2", "rope_over_nanogpt", "memory_ratio"),
    )
    derived_by_competitor = ("tokens_per_second",)

    def tokens_per_second(self, competitor: str) -> float | None:
        return _divide(1e3 * self.batch * self.length, self.median_ms(competitor))

    @property
    def mosar_over_rope(self) -> float | None:
        return self.ratio("mosar", "rope")

    @property
    def rope_over_nanogpt(self) -> float | None:
        return self.ratio("rope", "nanogpt")

    @property
    def rope_over_gemma2(self) -> float | None:
        """Tokens per second of rope, divided by those of transformers' faster attention."""
        names = [name for name in self.measurements if name.startswith("gemma2")]
        ratios = [r for name in names if (r := self.ratio("rope", name)) is not None]
        return min(ratios, default=None)

    @property
    def memory_ratio(self) -> float | None:
        """Peak memory of mosar divided by that of rope."""
        return _divide(*self.peaks_bytes("mosar", "rope"))
