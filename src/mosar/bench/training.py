"""Training steps side by side: `mosar bench train`.

Our losses are checked twice before anything is timed: against the same model in float64 by our
dense definition, and, for rope, against transformers' Gemma 2 with the same weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from mosar.bench.comparison import (
    Comparison,
    Report,
    build_competitors,
    check_lengths,
    check_names,
    with_memory,
    with_times,
)
from mosar.bench.correctness import compare
from mosar.bench.devices import Cpu
from mosar.bench.memory import measure_peak
from mosar.bench.table import MIB, Column, Verdict
from mosar.bench.timing import interleave
from mosar.bench.training_steps import OTHERS, OURS, SETTINGS, TrainingCase, build_step
from mosar.model.decoder import Decoder
from mosar.records import ErrorCheck, TrainingBenchmark
from mosar.training.config import RunConfig

# Rounding of a float32 loss of some units over a few hundred operations deep.
_TOLERANCE = 2e-5
_STEPS_OF_MEMORY = 2
# What the training step is meant to reach, in ratios of one run: by length.
_MOSAR_OVER_ROPE = {512: 0.75, 2048: 0.8}
_MEMORY_LENGTH, _MEMORY_RATIO = 2048, 1.25


@dataclass(frozen=True, kw_only=True)
class TrainingComparison(Comparison[TrainingCase, TrainingBenchmark]):
    lengths: tuple[int, ...] = (512, 2048)
    softcap: tuple[str, ...] = SETTINGS
    preset: str = "small"
    memory: tuple[int, ...] = (2048,)
    """Lengths whose memory is measured."""
    seconds: float = 60.0
    title: ClassVar[str] = "training step, tokens/s"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_lengths(self.memory)
        check_names("softcap", self.softcap, SETTINGS)
        # An unknown preset should be refused now.
        self.cases()[0].config("rope")

    def cases(self) -> list[TrainingCase]:
        return [
            TrainingCase(length, setting, self.preset)
            for length in self.lengths
            for setting in self.softcap
        ]

    def measure(self, case: TrainingCase, report: Report) -> TrainingBenchmark:
        report("building and checking")
        built, missing = build_competitors(case.competitors(), lambda name: build_step(case, name))
        steps = {name: step for name, (step, _) in built.items()}
        losses = {name: step() for name, step in steps.items()}
        record = TrainingBenchmark(
            preset=case.preset,
            setting=case.setting,
            length=case.length,
            batch=case.batch,
            parameters={name: size for name, (_, size) in built.items()},
            gemm_gflops=Cpu().gemm_gflops(),
            checks=_checks(case, losses),
            measurements=missing,
        )
        if not record.correct:
            return record
        report(f"timing {', '.join(steps)}")
        record = with_times(record, interleave(steps, seconds=self.seconds))
        if case.length in self.memory:
            report("memory")
            short = replace(case, length=32, tokens_per_step=32)
            record = with_memory(
                record, OURS, lambda name: measure_peak(prepare_steps, case, short, name)
            )
        return record

    def columns(self, records: Sequence[TrainingBenchmark]) -> list[Column]:
        def rate(name: str) -> Callable[[TrainingBenchmark], float | None]:
            return lambda r: r.tokens_per_second(name)

        return [
            Column("n", lambda r: r.length, is_head=True),
            Column("soft-caps", lambda r: r.setting, is_head=True),
            *(Column(name.replace("-", "\n"), rate(name), ",.0f") for name in (*OURS, *OTHERS)),
            Column("rope\n/ gemma2", lambda r: r.rope_over_gemma2, ".2f"),
            Column("rope\n/ nanogpt", lambda r: r.rope_over_nanogpt, ".2f"),
            Column("mosar\n/ rope", lambda r: r.mosar_over_rope, ".2f"),
            Column(
                "memory MiB\nmosar / rope",
                lambda r: (r.peak_bytes("mosar"), r.peak_bytes("rope")),
                ",.0f",
                MIB,
            ),
        ]

    def judge(self, record: TrainingBenchmark) -> list[Verdict]:
        at_least = {
            "rope ≥ gemma2": (record.rope_over_gemma2, 1.0),
            "rope ≥ nanogpt": (record.rope_over_nanogpt, 1.0),
        }
        if record.length in _MOSAR_OVER_ROPE:
            least = _MOSAR_OVER_ROPE[record.length]
            at_least[f"mosar ≥ {least:g} rope"] = (record.mosar_over_rope, least)
        found = [
            Verdict(text, ratio >= least)
            for text, (ratio, least) in at_least.items()
            if ratio is not None
        ]
        memory = record.memory_ratio if record.length == _MEMORY_LENGTH else None
        if memory is not None:
            found.append(Verdict(f"memory ≤ {_MEMORY_RATIO:g}×", memory <= _MEMORY_RATIO))
        return found

    def notes(self, records: Sequence[TrainingBenchmark]) -> str:
        first, gemm = records[0], max(record.gemm_gflops for record in records)
        return (
            f"GEMM peak {gemm:.0f} GFLOP/s in this run. Preset {first.preset}, "
            f"{first.parameters.get('rope', 0):,} parameters of rope. A step is forward, backward, "
            "clipping and AdamW. gemma2 is the faster of transformers' two. Memory: peak of "
            "parameters, optimizer and two steps in a fresh process."
        )


def _checks(case: TrainingCase, losses: dict[str, float]) -> dict[str, ErrorCheck]:
    """Our first losses against float64, and transformers' against ours: the same task."""
    exact = {name: exact_loss(case.config(name), case) for name in OURS}
    exact |= {name: losses["rope"] for name in losses if name.startswith("gemma2")}
    return {
        name: compare(abs(losses[name] - loss), _TOLERANCE * abs(loss))
        for name, loss in exact.items()
    }


@torch.no_grad()
def exact_loss(config: RunConfig, case: TrainingCase) -> float:
    """The loss before the first step, in float64."""
    decoder = Decoder(config.model, config.attention)
    decoder.init_weights(config.train.seed)
    decoder.double()
    tokens, total = case.tokens(), 0.0
    for row in tokens:
        hidden = decoder(row[None, :-1]).hidden
        total += float(torch.nn.functional.cross_entropy(decoder.logits(hidden)[0], row[1:]))
    return total / len(tokens)


def prepare_steps(case: TrainingCase, name: str) -> Callable[[], None]:
    """What memory is measured of: parameters, optimizer and steps together."""

    def build_and_step() -> None:
        step, _ = build_step(case, name)
        for _ in range(_STEPS_OF_MEMORY):
            step()

    return build_and_step
