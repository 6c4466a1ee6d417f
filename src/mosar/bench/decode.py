"""Times the attention of one decode step: `mosar bench decode`.

    sdpa   the new key and value go into a dense cache that was made large enough before, and
           torch's attention reads it whole, in the quickest form that is legal
    ours   the regime cache under sparse routing: update, then attend

A step is timed with all it does: appending, evicting, growing, finding the slices, attending.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from mosar.bench.comparison import Report, RoutedComparison
from mosar.bench.correctness import choose_rows, dense_rows, error_check
from mosar.bench.problem import Case, Problem, Shape, build_problem, count_pairs
from mosar.bench.table import MIB, Column, Verdict, verdict
from mosar.bench.timing import interleave_passes
from mosar.model.cache import RegimeLayerCache
from mosar.records import DecodeBenchmark, ErrorCheck

SHAPES = (Shape(9, 3, 64), Shape(8, 1, 256))
# Steps per sample; enough for every regime to have its share of the queries.
STEPS = 128
_CHECKED_STEPS = 24
_TRIAL_STEPS = 8
# Targets of a step by length: (speed-up over SDPA, share of the dense bytes).
_TARGETS = {2048: (1.0, None), 16384: (5.0, 0.35)}


@dataclass(frozen=True, kw_only=True)
class DecodeComparison(RoutedComparison[DecodeBenchmark]):
    shapes: tuple[Shape, ...] = SHAPES
    lengths: tuple[int, ...] = (2048, 4096, 8192, 16384)
    """Tokens of context of the last step."""
    seconds: float = 5.0
    min_length: ClassVar[int] = 2
    title: ClassVar[str] = "one decode step: append a token, attend with its query"

    def cases(self) -> list[Case]:
        return self.draw_cases(self.shapes, self.lengths)

    @torch.inference_mode()
    def measure(self, case: Case, report: Report) -> DecodeBenchmark:
        report("checking")
        problem = build_steps(case)
        steps = problem.q.shape[2]
        ours = OurSteps(problem)
        check = check_steps(problem)
        ours()
        record = DecodeBenchmark(
            **case.record_fields(),
            **case.shape._asdict(),
            steps=steps,
            keys_read=count_pairs(problem)[0] / steps,
            allocated_bytes=ours.cache.allocated_bytes,
            used_bytes=ours.cache.used_bytes,
            dense_bytes=2 * problem.k.nbytes,
            dense_form="none",
            checks={"out": check},
            measurements={},
        )
        if not record.correct:
            return record
        report("timing")
        form = quickest_form(problem)
        passes = {"sdpa": DenseSteps(problem, form), "ours": ours}
        times = interleave_passes(passes, seconds=self.seconds)
        return self.with_times(replace(record, dense_form=form), times)

    def columns(self, records: Sequence[DecodeBenchmark]) -> list[Column]:
        both = ("ours", "sdpa")
        return [
            Column("shape", lambda r: r.shape, is_head=True),
            Column("n", lambda r: r.length, is_head=True),
            Column("keys\nread", lambda r: r.keys_read, ".0f", is_head=True),
            Column("SDPA\nµs", lambda r: r.median_ms("sdpa"), ".0f", 1e3),
            Column("ours\nµs", lambda r: r.median_ms("ours"), ".0f", 1e3),
            Column("speed-up\n× SDPA", lambda r: r.speedup, ".2f"),
            Column("GB/s\nours / SDPA", lambda r: tuple(map(r.gigabytes_per_second, both)), ".1f"),
            Column(
                "cache MiB\nours / dense", lambda r: (r.allocated_bytes, r.dense_bytes), ".2f", MIB
            ),
            Column("cache\n× dense", lambda r: r.memory_ratio, ".3f"),
        ]

    def judge(self, record: DecodeBenchmark) -> list[Verdict]:
        if record.shape not in map(str, SHAPES) or record.length not in _TARGETS:
            return []
        speedup, memory = _TARGETS[record.length]
        found = verdict(f"≥ {speedup:g}×", record.speedup, least=speedup)
        if memory is not None:
            found += verdict(f"cache ≤ {memory:g}", record.memory_ratio, most=memory)
        return found

    def notes(self, records: Sequence[DecodeBenchmark]) -> str:
        forms = sorted({record.dense_form for record in records} - {"none"})
        first = records[0]
        return (
            f"Batch 1; a round is {first.steps} steps that end at n tokens. SDPA reads a dense "
            f"cache made before, in its quickest form ({', '.join(forms) or 'none'}). "
            f"Labels: {first.labels}, seed {first.seed}. GB/s count the keys and values read."
        )


def build_steps(case: Case) -> Problem:
    """A text as a layer sees it; the tokens with a query are decoded."""
    return build_problem(case, num_queries=min(STEPS, case.length // 2))


class Steps(ABC):
    """A competitor's decode steps; every call starts from the same state.

    A call gives the seconds of one step, the mean over all of them.
    """

    @abstractmethod
    def rewind(self) -> None:
        """Returns to the first step."""

    @abstractmethod
    def inputs(self) -> list[tuple]:
        """The inputs of each step, sliced before anything is timed."""

    @abstractmethod
    def step(self, *given: Tensor) -> Tensor:
        """The output of the next token, [..., 1, size]."""

    def outputs(self, count: int | None = None) -> Tensor:
        """The outputs of all steps or of the first ones, [..., count, size]."""
        self.rewind()
        return torch.cat([self.step(*given) for given in self.inputs()[:count]], dim=-2)

    def __call__(self) -> float:
        self.rewind()
        inputs = self.inputs()
        begin = time.perf_counter()
        for given in inputs:
            self.step(*given)
        return (time.perf_counter() - begin) / len(inputs)


def _cut(*tensors: Tensor, dim: int) -> list[tuple[Tensor, ...]]:
    """Token by token."""
    parts = [[part.contiguous() for part in tensor.split(1, dim)] for tensor in tensors]
    return list(zip(*parts, strict=True))


class OurSteps(Steps):
    """The regime cache, filled before."""

    def __init__(self, problem: Problem):
        self.problem = problem
        self.start = problem.k.shape[2] - problem.q.shape[2]
        self.labels_q, self.labels_k = problem.labels
        self.cache = RegimeLayerCache(problem.case.config)

    def rewind(self) -> None:
        """A new cache with the tokens before the first step, as after a prefill."""
        self.cache = RegimeLayerCache(self.problem.case.config)
        k, v = (x[:, :, : self.start] for x in (self.problem.k, self.problem.v))
        self.cache.update(k, v, self.labels_k[:, : self.start])
        self.cache.settle()

    def inputs(self) -> list[tuple]:
        k, v = (x[:, :, self.start :] for x in (self.problem.k, self.problem.v))
        vectors = _cut(self.problem.q, k, v, dim=2)
        labels = _cut(self.labels_q, self.labels_k[:, self.start :], dim=1)
        return [(*a, *b) for a, b in zip(vectors, labels, strict=True)]

    def step(self, q: Tensor, k: Tensor, v: Tensor, label_q: Tensor, label_k: Tensor) -> Tensor:
        self.cache.update(k, v, label_k)
        return self.cache.attend(q, label_q)


class DenseSteps(Steps):
    """A dense cache of the full length and torch's attention, in one of its forms.

    grouped: the query heads of a key head as so many queries of it, which all read every key.
    gqa: `enable_gqa`. expanded: the cache holds keys and values once per query head.
    """

    FORMS = ("grouped", "gqa", "expanded")

    def __init__(self, problem: Problem, form: str, steps: int | None = None):
        shape = problem.case.shape
        self.form, self.steps, self.share = form, steps, shape.heads // shape.kv_heads
        self.q = problem.q
        repeats = self.share if form == "expanded" else 1
        self.k, self.v = (x.repeat_interleave(repeats, dim=1) for x in (problem.k, problem.v))

    def rewind(self) -> None:
        """Nothing to do: a step writes the same keys again and reads no further than itself."""

    def inputs(self) -> list[tuple]:
        length, start = self.k.shape[2], self.k.shape[2] - self.q.shape[2]
        # Copy them: a step must not write a key onto itself.
        k, v = (x[:, :, start:].clone() for x in (self.k, self.v))
        given = zip(_cut(self.q, k, v, dim=2), range(start, length), strict=True)
        return [(*vectors, at) for vectors, at in given][: self.steps]

    def step(self, q: Tensor, k: Tensor, v: Tensor, at: int) -> Tensor:
        self.k[:, :, at : at + 1] = k
        self.v[:, :, at : at + 1] = v
        keys, values = self.k[:, :, : at + 1], self.v[:, :, : at + 1]
        if self.form == "grouped":
            grouped = q.view(1, keys.shape[1], self.share, q.shape[3])
            return F.scaled_dot_product_attention(grouped, keys, values).view(q.shape)
        return F.scaled_dot_product_attention(q, keys, values, enable_gqa=self.form == "gqa")


def quickest_form(problem: Problem) -> str:
    """The form of torch's attention that is fastest here, found by timing a few steps."""
    seconds = {}
    for form in DenseSteps.FORMS:
        trial = DenseSteps(problem, form, _TRIAL_STEPS)
        trial()
        seconds[form] = min(trial() for _ in range(3))
    return min(seconds, key=seconds.__getitem__)


def check_steps(problem: Problem) -> ErrorCheck:
    """Outputs of some steps, the last among them, against the float64 definition."""
    chosen = choose_rows(problem.q.shape[2], problem.case.seed, _CHECKED_STEPS)
    plain, exact = (
        dense_rows(problem, chosen, dtype)[0] for dtype in (torch.float32, torch.float64)
    )
    return error_check(OurSteps(problem).outputs()[:, :, chosen], plain, exact)
