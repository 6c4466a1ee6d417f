"""The training step of other variants against that of rope: `mosar bench train --variants all`.

One row for each variant: its step and rope's in turn, on the same tokens, by the CPU time of the
process, so that a busy machine matters little. The first loss is held to float64 before.

`--run RUN` times a trained model instead: its own weights and text, in windows of any length. What
hard routing saves depends on the support, which only a trained model has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from mosar.bench.comparison import Comparison, Report, check_names
from mosar.bench.memory import measure_peak
from mosar.bench.table import MIB, Column, Verdict, verdict
from mosar.bench.timing import cpu_seconds, interleave
from mosar.bench.training import (
    SETTINGS,
    Step,
    TrainingCase,
    build_step,
    check_loss,
    prepare_steps,
)
from mosar.data.stream import TokenStream
from mosar.errors import ModelError
from mosar.evaluation.loaded_run import LoadedRun
from mosar.evaluation.routing import PairTally
from mosar.geometries import VARIANTS
from mosar.model.decoder import Decoder
from mosar.records import TrainingBenchmark
from mosar.training.config import RunConfig, changed_config

BASE = "rope"
# What a variant is meant to reach of rope's tokens a second: on native kernels, and without.
_NATIVE, _TORCH = 0.8, 0.3


@dataclass(frozen=True)
class TrainedCase(TrainingCase):
    """The model of a run folder beside rope of the same size; N is that of its training."""

    run: Path = Path()
    data: Path | None = None
    """Where the data of the run lies now."""

    @property
    def loaded(self) -> LoadedRun:
        return LoadedRun.open(self.run)

    def config(self, variant: str) -> RunConfig:
        # The weights hardly move, so that all rounds have the support of the trained model.
        still = ("train.learning_rate=1e-12", "train.min_learning_rate=1e-12")
        size = (f"train.micro_batch={self.batch}", "train.accumulation=1")
        # As all rows of the table, and as precise as the check of the loss.
        here = ("train.device=cpu", "train.precision=fp32")
        config = changed_config(self.loaded.config, (*size, *still, *here))
        return replace(config, attention=VARIANTS[BASE]) if variant == BASE else config

    def first_step(self, variant: str) -> int:
        """That of the checkpoint: schedules are where they were."""
        return self.loaded.step

    def set_weights(self, decoder: Decoder, variant: str) -> None:
        if variant == BASE:
            super().set_weights(decoder, variant)
            return
        loaded = self.loaded
        decoder.load_state_dict(loaded.decoder.state_dict())
        decoder.begin_step(loaded.step, loaded.schedule)

    def tokens(self) -> Tensor:
        """The first windows of its training text."""
        loaded = self.loaded
        stream = TokenStream(loaded.find_data(self.data), "train", verify=False)
        if stream.num_windows(self.length) < self.batch:
            raise ModelError(
                f"the text of {self.run} has {stream.num_tokens:,} tokens, too few for "
                f"--lengths {self.length}"
            )
        return stream.windows(range(self.batch), self.length)

    @torch.no_grad()
    def density(self) -> float:
        """The exact density of what its training reads on these tokens."""
        decoder, tally = self.loaded.decoder.cpu(), PairTally()
        geometry = decoder.geometries[0]
        routing = geometry.executed("soft")
        if geometry.routed and routing == "soft":
            # A mixture evaluates every pair.
            return 1.0
        routed = decoder(self.tokens()[:, :-1], routing=routing).routings
        tally.add(decoder.geometries, (self.batch, self.length), routing, routed)
        return tally.density


@dataclass(frozen=True)
class VariantCase:
    """One row."""

    size: TrainingCase
    variant: str

    def __str__(self) -> str:
        return f"{self.variant}, {self.size}"


@dataclass(frozen=True, kw_only=True)
class VariantComparison(Comparison[VariantCase, TrainingBenchmark]):
    variants: tuple[str, ...] = ()
    """Names, or "all"."""
    run_folder: Path | None = None
    """A trained model, instead of variants with new weights."""
    data: Path | None = None
    """Where the data of that run lies now."""
    lengths: tuple[int, ...] = (512,)
    softcap: tuple[str, ...] = SETTINGS[:1]
    preset: str = "small"
    memory: tuple[int, ...] = ()
    """Lengths whose memory is measured."""
    seconds: float = 20.0
    title: ClassVar[str] = "training step of variants, tokens per second of CPU time"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_lengths(self.memory)
        if self.run_folder is not None:
            object.__setattr__(self, "variants", (self._trained_variant(),))
        elif self.variants == ("all",):
            object.__setattr__(self, "variants", tuple(name for name in VARIANTS if name != BASE))
        check_names("variant", self.variants, VARIANTS)
        check_names("softcap", self.softcap, SETTINGS)
        self.cases()[0].size.config(BASE)

    def _trained_variant(self) -> str:
        """The variant of the run; a ModelError for one that cannot be timed."""
        run = self.run_folder
        assert run is not None
        loaded = LoadedRun.open(run)
        if loaded.config.data.task != "text":
            raise ModelError(f"{run} learnt a task; give a run that was trained on text")
        if loaded.config.data.isolate_documents:
            raise ModelError(
                f"{run} was trained on isolated documents (data.isolate_documents), which this "
                "benchmark does not have; give another run"
            )
        loaded.find_data(self.data)
        variant = loaded.config.variant or loaded.config.attention.geometry
        if variant == BASE:
            raise ModelError(f"{run} is a run of {BASE}, which others are compared with")
        return variant

    def cases(self) -> list[VariantCase]:
        return [
            VariantCase(size, variant)
            for length in self.lengths
            for size in self._sizes(length)
            for variant in self.variants
        ]

    def _sizes(self, length: int) -> list[TrainingCase]:
        if self.run_folder is None:
            return [TrainingCase(length, setting, self.preset) for setting in self.softcap]
        config = LoadedRun.open(self.run_folder).config
        setting = "plain" if config.model.attn_softcap is None else "capped"
        preset = config.preset or "–"
        return [TrainedCase(length, setting, preset, run=self.run_folder, data=self.data)]

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
            density=size.density() if isinstance(size, TrainedCase) else None,
            checks=check_loss(size, variant, steps[variant]()),
            measurements={},
        )
        if not record.correct:
            return record
        report(f"timing {variant} and {BASE}")
        times = interleave(steps, seconds=self.seconds, time_calls=cpu_seconds)
        record = self.with_times(record, times)
        if size.length in self.memory:
            report("memory")
            short = replace(size, length=32, tokens_per_step=32)
            record = self.with_memory(record, steps, partial(_peak, size, short))
        return record

    def columns(self, records: Sequence[TrainingBenchmark]) -> list[Column]:
        return [
            Column("variant", _variant, is_head=True),
            Column("n", lambda r: r.length, is_head=True),
            Column("soft-caps", lambda r: r.setting, is_head=True),
            Column("kernels", lambda r: "native" if _is_native(r) else "torch", is_head=True),
            Column(BASE, lambda r: r.tokens_per_second(BASE), ",.0f"),
            Column("variant's", lambda r: r.tokens_per_second(_variant(r)), ",.0f"),
            Column(f"/ {BASE}", lambda r: r.ratio(_variant(r), BASE), ".2f"),
            Column("density", lambda r: r.density, ".4f", is_optional=True),
            Column(f"memory MiB\nvariant / {BASE}", _peaks, ",.1f", MIB, is_optional=True),
        ]

    def judge(self, record: TrainingBenchmark) -> list[Verdict]:
        least = _NATIVE if _is_native(record) else _TORCH
        return verdict(f"≥ {least:g}", record.ratio(_variant(record), BASE), least=least)

    def notes(self, records: Sequence[TrainingBenchmark]) -> str:
        said = (
            f"Preset {records[0].preset}. A step is forward, backward, clipping and AdamW, in turn "
            f"with {BASE}'s; times are CPU time of the process, medians."
        )
        if self.run_folder is not None:
            said += f" The model is that of {self.run_folder}, with its own weights and text, in "
            said += "float32. Density: of what a training step reads."
        return said


def _peaks(record: TrainingBenchmark) -> tuple[int | None, ...]:
    return record.peaks_bytes(_variant(record), BASE)


def _peak(size: TrainingCase, short: TrainingCase, variant: str) -> int:
    return measure_peak(prepare_steps, size, short, variant)


def _variant(record: TrainingBenchmark) -> str:
    return next(name for name in reversed(record.parameters))


def _is_native(record: TrainingBenchmark) -> bool:
    return VARIANTS[_variant(record)].geometry_class.native
