"""Times training steps of the same size, ours and others': `mosar bench train`.

    rope, mosar        our loop's own step: objective, clipping, AdamW
    gemma2-eager       transformers' Gemma2ForCausalLM with the weights of our rope
    gemma2-sdpa        the same through torch's attention, which knows no soft-cap
    nanogpt            the plain loop in benchmarks/, which knows no soft-cap either

All see the same tokens, in float32, with fused AdamW and a clipped gradient. Our losses are checked
against the same model in float64, and Gemma 2's against ours.
"""

from __future__ import annotations

import runpy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from mosar.bench.comparison import Comparison, Report, Unavailable, check_names
from mosar.bench.correctness import compare
from mosar.bench.devices import Cpu
from mosar.bench.memory import measure_peak
from mosar.bench.table import MIB, Column, Verdict, verdict
from mosar.bench.timing import interleave
from mosar.bench.transformers_models import build_gemma2
from mosar.model.decoder import Decoder
from mosar.records import ErrorCheck, TrainingBenchmark
from mosar.training.batches import Batch, Batches
from mosar.training.config import RunConfig, resolve_config
from mosar.training.learner import Learner

OURS = ("rope", "mosar")
OTHERS = ("gemma2-eager", "gemma2-sdpa", "nanogpt")
SETTINGS = ("capped", "plain")
_BASELINE = Path(__file__).parents[3] / "benchmarks" / "nanogpt_baseline.py"
# Rounding of a float32 loss of some units over a few hundred operations deep.
_TOLERANCE = 2e-5
_STEPS_OF_MEMORY = 2
# Targets of the training step, in ratios of one run, by length.
_MOSAR_OVER_ROPE = {512: 0.75, 2048: 0.8}
_MEMORY_LENGTH, _MEMORY_RATIO = 2048, 1.25

Step = Callable[[], float]
"""One update; returns the loss before it."""


@dataclass(frozen=True)
class TrainingCase:
    """One row: a model of the preset's size at a length, with or without soft-caps."""

    length: int
    setting: str
    preset: str = "small"
    vocab_size: int = 4096
    tokens_per_step: int = 2048
    """At least one window is taken."""

    def __str__(self) -> str:
        return f"n = {self.length}, {self.setting}"

    @property
    def batch(self) -> int:
        return max(1, self.tokens_per_step // self.length)

    def config(self, variant: str) -> RunConfig:
        changes = [f"model.max_length={self.length}", f"train.micro_batch={self.batch}"]
        changes.append("train.accumulation=1")
        if self.setting == "plain":
            changes += ["model.attn_softcap=none", "model.final_softcap=none"]
        sizes = {"preset": self.preset, "vocab_size": self.vocab_size}
        return resolve_config(variant=variant, data="data", changes=changes, **sizes)

    def first_step(self, variant: str) -> int:
        """From the middle of training on: what a variant does at first only is not its speed."""
        return self.config(variant).train.steps // 2

    def set_weights(self, decoder: Decoder, variant: str) -> None:
        """Gives a new decoder of this case the weights that its steps start from."""
        decoder.init_weights(self.config(variant).train.seed)

    def competitors(self) -> tuple[str, ...]:
        """Who computes the same thing in this setting."""
        # The others only compute logits without a soft-cap.
        return (*OURS, "gemma2-eager") if self.setting == "capped" else (*OURS, *OTHERS)

    def tokens(self) -> Tensor:
        """[batch, length + 1]"""
        generator = torch.Generator().manual_seed(0)
        return torch.randint(self.vocab_size, (self.batch, self.length + 1), generator=generator)


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
        self.check_lengths(self.memory)
        check_names("softcap", self.softcap, SETTINGS)
        # Refuse an unknown preset now.
        self.cases()[0].config("rope")

    def cases(self) -> list[TrainingCase]:
        return [
            TrainingCase(length, setting, self.preset)
            for length in self.lengths
            for setting in self.softcap
        ]

    def measure(self, case: TrainingCase, report: Report) -> TrainingBenchmark:
        report("building and checking")
        built, missing = self.build(case.competitors(), partial(build_step, case))
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
        record = self.with_times(record, interleave(steps, seconds=self.seconds))
        if case.length in self.memory:
            report("memory")
            short = replace(case, length=32, tokens_per_step=32)
            peak_of = partial(measure_peak, prepare_steps, case, short)
            record = self.with_memory(record, OURS, peak_of)
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
                "memory MiB\nmosar / rope", lambda r: r.peaks_bytes("mosar", "rope"), ",.0f", MIB
            ),
        ]

    def judge(self, record: TrainingBenchmark) -> list[Verdict]:
        found = verdict("rope ≥ gemma2", record.rope_over_gemma2, least=1)
        found += verdict("rope ≥ nanogpt", record.rope_over_nanogpt, least=1)
        if record.length in _MOSAR_OVER_ROPE:
            least = _MOSAR_OVER_ROPE[record.length]
            found += verdict(f"mosar ≥ {least:g} rope", record.mosar_over_rope, least=least)
        if record.length == _MEMORY_LENGTH:
            most = _MEMORY_RATIO
            found += verdict(f"memory ≤ {most:g}×", record.memory_ratio, most=most)
        return found

    def notes(self, records: Sequence[TrainingBenchmark]) -> str:
        first, gemm = records[0], max(record.gemm_gflops or 0.0 for record in records)
        return (
            f"GEMM peak {gemm:.0f} GFLOP/s in this run. Preset {first.preset}, "
            f"{first.parameters.get('rope', 0):,} parameters of rope. A step is forward, backward, "
            "clipping and AdamW. gemma2 is the faster of transformers' two. Memory: peak of "
            "parameters, optimizer and two steps in a fresh process."
        )


def _checks(case: TrainingCase, losses: dict[str, float]) -> dict[str, ErrorCheck]:
    """Our first losses against float64, and transformers' against ours: the same task."""
    exact = {name: exact_loss(case, name) for name in OURS}
    exact |= {name: losses["rope"] for name in losses if name.startswith("gemma2")}
    return {name: _check(losses[name], loss) for name, loss in exact.items()}


def _check(found: float, exact: float) -> ErrorCheck:
    return compare(abs(found - exact), _TOLERANCE * abs(exact))


def check_loss(case: TrainingCase, variant: str, loss: float) -> dict[str, ErrorCheck]:
    """The first loss of a variant against float64, if its windows begin where they are read."""
    if case.config(variant).attention.position_range > 1:
        return {}
    return {variant: _check(loss, exact_loss(case, variant))}


@torch.no_grad()
def exact_loss(case: TrainingCase, variant: str) -> float:
    """The loss before the first step, in float64."""
    config = case.config(variant)
    decoder = Decoder(config.model, config.attention)
    case.set_weights(decoder, variant)
    decoder.double()
    tokens, total = case.tokens(), 0.0
    for row in tokens:
        hidden = decoder(row[None, :-1]).hidden
        total += float(F.cross_entropy(decoder.logits(hidden)[0], row[1:]))
    return total / len(tokens)


def prepare_steps(case: TrainingCase, name: str) -> Callable[[], None]:
    """The call whose memory is measured: parameters, optimizer and steps."""

    def build_and_step() -> None:
        step, _ = build_step(case, name)
        for _ in range(_STEPS_OF_MEMORY):
            step()

    return build_and_step


def build_step(case: TrainingCase, name: str) -> tuple[Step, int]:
    """A competitor's step and the number of its parameters; Unavailable says why not."""
    if name == "nanogpt":
        return _nanogpt_step(case)
    if name in OTHERS:
        return _gemma2_step(case, name.removeprefix("gemma2-"))
    return _our_step(case, name)


def _our_step(case: TrainingCase, variant: str) -> tuple[Step, int]:
    same: list[Batch] = [(case.tokens(), None)]
    # In place of a run's data: the same tokens at every step.
    batches = cast(Batches, SimpleNamespace(of_step=lambda step: iter(same)))
    config = case.config(variant)
    learner = Learner.of(config, batches)
    case.set_weights(learner.decoder, variant)
    numbers = count(case.first_step(variant))

    def step() -> float:
        line = learner.update(next(numbers))
        assert line is not None
        return line["lm_loss"]

    return step, sum(parameter.numel() for parameter in learner.names)


def _gemma2_step(case: TrainingCase, attention: str) -> tuple[Step, int]:
    model = build_gemma2(case.config("rope"), attention)
    tokens, train = case.tokens(), case.config("rope").train
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=1e-5, betas=train.betas, fused=True)

    def step() -> float:
        logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, train.grad_clip or 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return step, sum(parameter.numel() for parameter in parameters)


def _nanogpt_step(case: TrainingCase) -> tuple[Step, int]:
    if not _BASELINE.is_file():
        raise Unavailable("benchmarks/nanogpt_baseline.py is in the source tree only")
    baseline = runpy.run_path(str(_BASELINE), run_name="nanogpt_baseline")
    model = case.config("rope").model
    if model.hidden_size % model.num_heads:
        raise Unavailable(f"its heads must divide its width, {model.hidden_size}")
    # With MHA and two matrices in its MLP, this width gives a layer as many parameters as ours.
    query, key = (n * model.head_dim for n in (model.num_heads, model.num_kv_heads))
    ours = 2 * model.hidden_size * (query + key) + 3 * model.hidden_size * model.ffn_size
    mlp_width = (ours - 4 * model.hidden_size**2) // (2 * model.hidden_size)
    config = baseline["GPTConfig"](
        vocab_size=case.vocab_size,
        length=case.length,
        num_layers=model.num_layers,
        num_heads=model.num_heads,
        width=model.hidden_size,
        mlp_width=mlp_width,
    )
    return baseline["build_step"](config, case.tokens())
