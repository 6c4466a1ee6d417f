"""Trains the routers of a frozen model in two phases.

    steps       a window → the dense model → in each layer: q, k → updates of its routers
                → lambda towards the target density → metrics → now and then a checkpoint
    tune_steps  a window → the dense model, the routed model → KL → one update of all routers, and
                of the low-rank changes (LoRA) where there are any
    at the end  the routers are moved along the price until the target density is met

The run folder and the loop are those of `mosar train`; the folder gets the adapter besides.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mosar.errors import ModelError, NonFiniteError
from mosar.integrations.retrofit.adapter import copy_routers, save_adapter
from mosar.integrations.retrofit.attach import Retrofit
from mosar.integrations.retrofit.base_model import BaseIdentity, check_length, context_length
from mosar.integrations.retrofit.calibration import calibrate
from mosar.integrations.retrofit.config import RetrofitConfig, RetrofitSettings
from mosar.integrations.retrofit.entry import DESCRIPTION
from mosar.integrations.retrofit.layer import RoutedLayer
from mosar.integrations.retrofit.learner import (
    LayerInput,
    LayerLearner,
    LayerMeasure,
    scheduled_rate,
)
from mosar.integrations.retrofit.tuning import tune
from mosar.integrations.retrofit.windows import Windows
from mosar.training.distributed.team import Team
from mosar.training.loop import train_run
from mosar.training.progress import Reporter
from mosar.training.run import Cadence, Run
from mosar.training.run_folder import read_metrics, read_saved
from mosar.training.stopping import StopRequest

# lambda stays where its effect can be undone.
_LEAST_COST, _MOST_COST = 1e-7, 1e2


@dataclass(frozen=True)
class RetrofitRun:
    """How a run ended."""

    out: Path
    step: int
    resumed_from: int
    density: float
    """Of top-1 choices on the validation windows, at the length of training."""
    lost: float
    """The attention they discard there; NaN where nothing was trained."""


def train_retrofit(
    attached: Retrofit,
    windows: Windows,
    settings: RetrofitSettings,
    out: Path | str,
    *,
    base: BaseIdentity | None = None,
    start_from: Path | str | None = None,
    notes: Mapping[str, Any] | None = None,
    progress: bool = True,
) -> RetrofitRun:
    """Trains into the run folder `out`, resuming from its newest checkpoint if there is one.

    start_from: an adapter to begin with, its lambda too, instead of nearly uniform choices; they
    have settled, so their entropy is left alone. notes: more for adapter.json. A ModelError or
    TrainingError says what stopped it; SIGINT and SIGTERM save first and raise TrainingInterrupted.
    The model ends under "sparse" routing. Without any steps the routers of `start_from` are moved
    to the target density, and nothing is trained.
    """
    out = Path(out)
    check_length(attached.model, settings.length)
    base = BaseIdentity.of(attached.model) if base is None else base
    if settings.total_steps and attached.lora != settings.lora:
        raise ValueError(
            f"lora must be the rank of the model's retrofit, {attached.lora}, got {settings.lora}"
        )
    if not settings.total_steps:
        return _shift(attached, windows, settings, out, base, start_from, notes)
    learner = RouterLearner(attached, windows, settings, base, start_from, notes)
    start, _ = train_run(learner, out, Reporter(settings.total_steps, progress=progress))
    *_, last = read_metrics(out, "valid")
    return RetrofitRun(out, settings.total_steps, start, last["density"], last["lost"])


def _shift(
    attached: Retrofit,
    windows: Windows,
    settings: RetrofitSettings,
    out: Path,
    base: BaseIdentity,
    start_from: Path | str | None,
    notes: Mapping[str, Any] | None,
) -> RetrofitRun:
    if start_from is None:
        raise ValueError("steps and tune_steps must not both be 0 without routers to start from")
    if (out / DESCRIPTION).exists():
        raise ModelError(f"{out} holds an adapter already; give another --out")
    found = copy_routers(attached, start_from, base)
    density = calibrate(attached, windows.valid, settings.target_density)
    made = {"settings": settings.to_dict(), "start": found["weights_sha256"]}
    save_adapter(attached, out, made | dict(notes or {}), base=base)
    return RetrofitRun(out, 0, 0, density, math.nan)


class RouterLearner(Run):
    """The routers of all layers, each with its optimizer, and the windows they learn from."""

    config: RetrofitConfig
    how_to_save_memory = "fewer queries or a smaller length take less memory"

    def __init__(
        self,
        attached: Retrofit,
        windows: Windows,
        settings: RetrofitSettings,
        base: BaseIdentity,
        start_from: Path | str | None = None,
        notes: Mapping[str, Any] | None = None,
    ):
        self.cost_weight, start = settings.cost_weight, None
        self.tune_cost = settings.tune_cost
        if start_from is not None:
            description = copy_routers(attached, start_from, base)
            start = description["weights_sha256"]
            self.cost_weight = description["notes"].get("cost_weight", settings.cost_weight)
            settings = replace(settings, entropy_weight=0.0)
        self.attached, self.windows, self.settings, self.notes = attached, windows, settings, notes
        dtype = str(attached.model.dtype).removeprefix("torch.")
        self.config = RetrofitConfig(
            start=start, base=base, geometry=attached.config, settings=settings, dtype=dtype
        )
        self.team, self.tokens_per_step = Team(), settings.length
        every = settings.checkpoint_every
        self.cadence = Cadence(settings.total_steps, settings.seed, every, every)
        self.data_fingerprint = windows.fingerprint

    def prepare(self) -> None:
        for parameter in self.attached.parameters():
            parameter.requires_grad_(True)

    def build(self, *, initialise: bool) -> None:
        self.names = {p: name for name, p in self.attached.named_parameters().items()}
        self.learners = {layer.index: LayerLearner(layer, self.settings) for layer in self.attached}
        self.optimizers = [learner.optimizer for learner in self.learners.values()]
        if initialise and self.config.start is None:
            self._pass(self.windows.train[0], LayerLearner.soften)

    def update(self, step: int, stop: StopRequest | None = None) -> dict[str, Any]:
        settings = self.settings
        line = self._learn(step) if step <= settings.steps else self._tune(step)
        if step == settings.total_steps or (step == settings.steps and settings.tune_steps):
            calibrate(self.attached, self.windows.valid, settings.target_density)
        return line

    def _learn(self, step: int) -> dict[str, Any]:
        """The first phase: each layer from its own attention."""

        def learn(learner: LayerLearner, given: LayerInput) -> LayerMeasure:
            return learner.learn(given, step, self.cost_weight)

        measures = self._pass(self.windows.train[step - 1], learn, self._offset(step))
        line = self._line(step, "train", measures)
        self.cost_weight = self._steer(self.cost_weight, line["density"])
        return line

    def _tune(self, step: int) -> dict[str, Any]:
        """The second phase: all layers from what the model predicts."""
        settings = self.settings
        number = step - settings.steps - 1
        if number == 0:
            if settings.steps == 0:
                calibrate(self.attached, self.windows.valid, settings.target_density)
            for optimizer in self.optimizers:
                # Its moments are of another loss.
                optimizer.state.clear()
        rates = [
            scheduled_rate(number, settings.tune_steps, peak, warmup=3)
            for peak in (settings.tune_rate, settings.lora_rate)
        ]
        for learner in self.learners.values():
            learner.set_rate(*rates)
            learner.optimizer.zero_grad(set_to_none=True)
        window, offset = self.windows.train[step - 1], self._offset(step)
        positions = torch.arange(offset, offset + len(window))
        measure = tune(
            self.attached, window, positions, self.tune_cost, settings.seed * 1_000_003 + step
        )
        for learner in self.learners.values():
            learner.optimizer.step()
        density = float(measure.density.mean())
        loss = measure.kl + self.tune_cost * density
        if not math.isfinite(loss):
            raise NonFiniteError(f"step {step}: the loss is {loss}")
        line = {
            "step": step,
            "split": "train",
            "loss": loss,
            "kl": measure.kl,
            "density": density,
            "tune_cost": self.tune_cost,
            "layer_density": measure.density.tolist(),
            "tokens_per_second": None,
        }
        self.tune_cost = self._steer(self.tune_cost, density)
        return line

    def evaluate(self, step: int) -> dict[str, Any]:
        def measure(learner: LayerLearner, given: LayerInput) -> LayerMeasure:
            return learner.measure(given, self.cost_weight)

        passes = [self._pass(window, measure) for window in self.windows.valid]
        return self._line(step, "valid", [m for measures in passes for m in measures])

    def check_same(self, folder: Path, report: Callable[[str], None]) -> None:
        saved, fingerprint = read_saved(folder, RetrofitConfig)
        was, now = saved.to_dict(), self.config.to_dict()
        differing = [key for key in now if was[key] != now[key]]
        if fingerprint != self.data_fingerprint:
            differing.append("data_fingerprint")
        if differing:
            raise ModelError(
                f"{folder} holds a run with other {', '.join(differing)}; give another --out"
            )

    def how_to_continue(self, out: Path) -> str:
        return "the same command resumes"

    def state(self) -> dict[str, Any]:
        return {"cost_weight": self.cost_weight, "tune_cost": self.tune_cost}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.cost_weight = state["cost_weight"]
        self.tune_cost = state.get("tune_cost", self.tune_cost)

    def finish(self, out: Path) -> None:
        self.attached.set_routing("sparse")
        made = {
            "settings": self.settings.to_dict(),
            "data_fingerprint": self.data_fingerprint,
            "cost_weight": self.cost_weight,
        }
        save_adapter(self.attached, out, made | dict(self.notes or {}), base=self.config.base)

    def _offset(self, step: int) -> int:
        """The position at which the window of a step begins.

        Rotary attention depends on distances alone, but routers read rotated queries and keys: they
        must have seen every position of the model's context, not only those of a window, and more
        of them for longer texts.
        """
        context = context_length(self.attached.model) or 0
        most = int(context * self.settings.position_range) - self.settings.length
        generator = torch.Generator().manual_seed(self.settings.seed * 1_000_003 + step)
        return int(torch.randint(0, max(most, 0) + 1, (), generator=generator))

    def _pass(
        self, window: Tensor, visit: Callable[[LayerLearner, LayerInput], Any], offset: int = 0
    ) -> list[Any]:
        """One dense pass over a window [n]; what `visit` says of each layer, in order."""
        results: dict[int, Any] = {}

        def observer(
            layer: RoutedLayer, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]
        ) -> None:
            assert layer.residual is not None
            given = LayerInput(
                *(x[0].detach() for x in (q, k, v, layer.residual)),
                scale=options["scale"],
                softcap=options["softcap"],
            )
            results[layer.index] = visit(self.learners[layer.index], given)

        with _observing(self.attached, observer), torch.no_grad():
            device = self.attached.model.device
            decoder = self.attached.model.base_model
            positions = torch.arange(offset, offset + len(window), device=device)[None]
            decoder(input_ids=window[None].to(device), position_ids=positions, use_cache=False)
        return [results[index] for index in sorted(results)]

    def _steer(self, price: float, density: float) -> float:
        """The next price of a pair: higher where more is read than should be."""
        miss = (density - self.settings.target_density) / self.settings.target_density
        moved = math.log(price) + self.settings.steering * max(min(miss, 1.0), -1.0)
        return min(max(math.exp(moved), _LEAST_COST), _MOST_COST)

    def _line(self, step: int, split: str, measures: list[LayerMeasure]) -> dict[str, Any]:
        def mean(name: str) -> float:
            return float(torch.stack([getattr(m, name) for m in measures]).double().mean())

        loss = sum(m.loss for m in measures) / len(measures)
        if not math.isfinite(loss):
            raise NonFiniteError(f"step {step}: the loss is {loss}")
        number = len(self.learners)
        by_layer = [
            torch.stack([m.density for m in measures[index::number]]).mean(dim=0).tolist()
            for index in range(number)
        ]
        return {
            "step": step,
            "split": split,
            "loss": loss,
            "error": sum(m.error for m in measures) / len(measures),
            "lost": mean("lost"),
            "density": mean("density"),
            "cost_weight": self.cost_weight,
            "layer_density": by_layer,
            "tokens_per_second": None,
        }


@contextmanager
def _observing(attached: Retrofit, observer: Any) -> Iterator[None]:
    attached.set_routing("dense")
    attached.observe(observer)
    try:
        yield
    finally:
        attached.observe(None)
