"""The training step of every variant against that of rope: `mosar bench train --variants all`.

One row for each variant: its step and rope's in turn, on the same tokens, by the CPU time of the
process, so that a busy machine matters little. The first loss is held to float64 before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from mosar.bench.comparison import Comparison, Report, check_names
from mosar.bench.table import Column, Verdict, verdict
from mosar.bench.timing import cpu_seconds, interleave
from mosar.bench.training import SETTINGS, Step, TrainingCase, build_step, check_loss
from mosar.geometries import VARIANTS
from mosar.records import TrainingBenchmark

BASE = "rope"
# What a variant is meant to reach of rope's tokens a second: on native kernels, and without.
_NATIVE, _TORCH = 0.8, 0.3


@dataclass(frozen=True)
class VariantCase:
    """One row."""

    size: TrainingCase
    variant: str

    def __str__(self) -> str:
        return f"{self.variant}, {self.size}"


@dataclass(frozen=True, kw_only=True)
class VariantComparison(Comparison[VariantCase, TrainingBenchmark]):
    variants: tuple[str, ...]
    """Names, or "all"."""
    lengths: tuple[int, ...] = (512,)
    softcap: tuple[str, ...] = SETTINGS[:1]
    preset: str = "small"
    seconds: float = 20.0
    title: ClassVar[str] = "training step of variants, tokens per second of CPU time"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.variants == ("all",):
            object.__setattr__(self, "variants", tuple(name for name in VARIANTS if name != BASE))
        check_names("variant", self.variants, VARIANTS)
        check_names("softcap", self.softcap, SETTINGS)
        self.cases()[0].size.config(BASE)

    def cases(self) -> list[VariantCase]:
        return [
            VariantCase(TrainingCase(length, setting, self.preset), variant)
            for length in self.lengths
            for setting in self.softcap
            for variant in self.variants
        ]

    @cached_property
    def _bases(self) -> dict[TrainingCase, tuple[Step, int]]:
        """Steps of rope that were built for an earlier row."""
        return {}

    def measure(self, case: VariantCase, report: Report) -> TrainingBenchmark:
        report("building and checking")
        size, variant = case.size, case.variant
        if size not in self._bases:
            self._bases[size] = build_step(size, BASE)
        built = {BASE: self._bases[size], variant: build_step(size, variant)}
        steps = {name: step for name, (step, _) in built.items()}
        record = TrainingBenchmark(
            preset=size.preset,
            setting=size.setting,
            length=size.length,
            batch=size.batch,
            parameters={name: count for name, (_, count) in built.items()},
            checks=check_loss(size, variant, steps[variant]()),
            measurements={},
        )
        if not record.correct:
            return record
        report(f"timing {variant} and {BASE}")
        times = interleave(steps, seconds=self.seconds, time_calls=cpu_seconds)
        return self.with_times(record, times)

    def columns(self, records: Sequence[TrainingBenchmark]) -> list[Column]:
        return [
            Column("variant", _variant, is_head=True),
            Column("n", lambda r: r.length, is_head=True),
            Column("soft-caps", lambda r: r.setting, is_head=True),
            Column("kernels", lambda r: "native" if _is_native(r) else "torch", is_head=True),
            Column(BASE, lambda r: r.tokens_per_second(BASE), ",.0f"),
            Column("variant's", lambda r: r.tokens_per_second(_variant(r)), ",.0f"),
            Column(f"/ {BASE}", lambda r: r.ratio(_variant(r), BASE), ".2f"),
        ]

    def judge(self, record: TrainingBenchmark) -> list[Verdict]:
        least = _NATIVE if _is_native(record) else _TORCH
        return verdict(f"≥ {least:g}", record.ratio(_variant(record), BASE), least=least)

    def notes(self, records: Sequence[TrainingBenchmark]) -> str:
        return (
            f"Preset {records[0].preset}. A step is forward, backward, clipping and AdamW, in turn "
            f"with {BASE}'s; times are CPU time of the process, medians."
        )


def _variant(record: TrainingBenchmark) -> str:
    return next(name for name in reversed(record.parameters))


def _is_native(record: TrainingBenchmark) -> bool:
    return VARIANTS[_variant(record)].geometry_class.native
