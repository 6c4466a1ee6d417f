"""Training steps side by side: `mosar bench train`.

Per row: check our losses, time everybody's step interleaved, measure the memory of ours.

Ours are checked twice before anything is timed: against the same model in float64 by our dense
definition, and, for rope, against transformers' Gemma 2 with the same weights.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace

import torch

from mosar.bench.memory import MemoryUnavailable, peak_of, peak_so_far, reset_peak
from mosar.bench.timing import gemm_gflops, interleave
from mosar.bench.training_steps import (
    OURS,
    SETTINGS,
    Step,
    TrainingCase,
    Unavailable,
    build_step,
)
from mosar.model.decoder import Decoder
from mosar.records import ErrorCheck, Measurement, TrainingBenchmark
from mosar.training.config import RunConfig

# Rounding of a float32 loss of some units over a few hundred operations deep.
_TOLERANCE = 2e-5
_STEPS_OF_MEMORY = 2

Report = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class TrainingBenchmarkSettings:
    """Which rows are measured and how; checks itself."""

    lengths: tuple[int, ...] = (512, 2048)
    settings: tuple[str, ...] = SETTINGS
    preset: str = "small"
    memory_lengths: tuple[int, ...] = (2048,)
    seconds: float = 60.0
    """About how long the competitors of a row are timed, all together."""

    def __post_init__(self) -> None:
        for length in (*self.lengths, *self.memory_lengths):
            if length < 1:
                raise ValueError(f"lengths must be at least 1, got {length}")
        for setting in self.settings:
            if setting not in SETTINGS:
                raise ValueError(f"softcap must be one of {', '.join(SETTINGS)}, got {setting!r}")
        if not self.lengths or not self.settings:
            raise ValueError("at least one length and one soft-cap setting are needed")
        if not self.seconds > 0:
            raise ValueError(f"seconds must be more than 0, got {self.seconds}")
        # An unknown preset should be refused now.
        self.cases()[0].config("rope")

    def cases(self) -> list[TrainingCase]:
        return [
            TrainingCase(length, setting, self.preset)
            for length in self.lengths
            for setting in self.settings
        ]


def run_training_benchmark(
    settings: TrainingBenchmarkSettings, report: Report = lambda step: None
) -> Iterator[TrainingBenchmark]:
    """Measures row by row; `report` is told what is being done."""
    for case in settings.cases():
        row = f"n = {case.length}, {case.setting}"
        report(f"{row}: building and checking")
        steps: dict[str, Step] = {}
        sizes: dict[str, int] = {}
        measured: dict[str, Measurement] = {}
        for name in case.competitors():
            try:
                steps[name], sizes[name] = build_step(case, name)
            except Unavailable as error:
                measured[name] = Measurement(unavailable=str(error))
        losses = {name: step() for name, step in steps.items()}
        record = TrainingBenchmark(
            preset=case.preset,
            setting=case.setting,
            length=case.length,
            batch=case.batch,
            parameters=sizes,
            gemm_gflops=gemm_gflops(),
            checks=_checks(case, losses),
            measurements=measured,
        )
        if record.correct:
            report(f"{row}: timing {', '.join(steps)}")
            times = interleave(steps, seconds=settings.seconds)
            measured |= {name: Measurement(samples_ms=samples) for name, samples in times.items()}
            if case.length in settings.memory_lengths:
                report(f"{row}: memory")
                measured = _with_memory(measured, case)
        yield replace(record, measurements=measured)


def _checks(case: TrainingCase, losses: dict[str, float]) -> dict[str, ErrorCheck]:
    """Our first losses against float64, and transformers' against ours: the same task."""
    checks = {}
    for name in OURS:
        exact = exact_loss(case.config(name), case)
        checks[name] = ErrorCheck(error=abs(losses[name] - exact), budget=_TOLERANCE * abs(exact))
    for name in ("gemma2-eager", "gemma2-sdpa"):
        if name in losses:
            error, budget = abs(losses[name] - losses["rope"]), _TOLERANCE * losses["rope"]
            checks[name] = ErrorCheck(error=error, budget=budget)
    return checks


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


def _with_memory(measured: dict[str, Measurement], case: TrainingCase) -> dict[str, Measurement]:
    result = dict(measured)
    for name in OURS:
        try:
            result[name] = replace(result[name], peak_bytes=measure_step_peak(case, name))
        except MemoryUnavailable as error:
            result[name] = replace(result[name], unavailable=str(error))
    return result


def measure_step_peak(case: TrainingCase, name: str) -> int:
    """Bytes of parameters, optimizer and steps together, in a process of its own."""
    task = {"case": asdict(case), "name": name, "threads": torch.get_num_threads()}
    return peak_of("mosar.bench.training", task)


def _main() -> None:
    task = json.load(sys.stdin)
    torch.set_num_threads(task["threads"])
    case = TrainingCase(**task["case"])
    # Loads everything there is to load, at a length that takes next to nothing.
    build_step(replace(case, length=32, tokens_per_step=32), task["name"])[0]()
    before = reset_peak()
    step, _ = build_step(case, task["name"])
    for _ in range(_STEPS_OF_MEMORY):
        step()
    print(peak_so_far() - before)


if __name__ == "__main__":
    _main()
