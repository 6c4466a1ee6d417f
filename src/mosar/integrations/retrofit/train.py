"""Trains the routers of a frozen model: one dense pass per window, every layer learns from its own.

    for each step: a window → the dense model → in each layer: q, k → updates of its routers
                   → lambda towards the target density → metrics → now and then a checkpoint

The run folder is that of `mosar train` (config.json, metrics.jsonl, checkpoints), and the adapter.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mosar.core.config import MoSARConfig
from mosar.errors import ModelError, TrainingError, TrainingInterrupted
from mosar.files import parse_json, replace_synced
from mosar.integrations.retrofit.adapter import copy_routers, save_adapter
from mosar.integrations.retrofit.attach import Retrofit
from mosar.integrations.retrofit.base_model import BaseIdentity, check_length, context_length
from mosar.integrations.retrofit.config import RetrofitSettings
from mosar.integrations.retrofit.layer import RoutedLayer
from mosar.integrations.retrofit.learner import LayerInput, LayerLearner, LayerMeasure
from mosar.integrations.retrofit.windows import Windows
from mosar.records import environment
from mosar.training import checkpoints
from mosar.training.checkpoints import DamagedCheckpoint
from mosar.training.progress import Reporter
from mosar.training.run_folder import (
    CHECKPOINTS,
    CONFIG,
    METRICS,
    MetricsFile,
    has_made_a_step,
    locked,
    truncate_metrics,
)
from mosar.training.stopping import StopRequest, stop_requests

SCHEMA_VERSION = 1
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
    """The attention they discard there."""


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
    """Trains into the run folder `out`, going on from its newest checkpoint if there is one.

    start_from: an adapter to begin with, its lambda too, instead of nearly uniform choices; they
    have settled, so their entropy is left alone. notes: more for adapter.json. A ModelError or
    TrainingError says what stopped it; SIGINT and SIGTERM save first and raise TrainingInterrupted.
    The model ends under "sparse" routing.
    """
    out = Path(out)
    check_length(attached.model, settings.length)
    base = BaseIdentity.of(attached.model) if base is None else base
    reporter = Reporter(settings.steps, progress=progress)
    with locked(out), stop_requests() as stop:
        run = _Run(attached, windows, settings, out, base, start_from)
        start = run.open(reporter)
        link = truncate_metrics(out / METRICS, start if start else -1, reporter.say)
        metrics = MetricsFile(out / METRICS, link)
        try:
            with reporter.running(start):
                for line in run.steps(start, stop, metrics):
                    metrics.append(line)
                    # What it calls the loss of a language model is here that of the routers.
                    reporter.show(line | {"lm_loss": line["loss"]})
        finally:
            metrics.close()
            attached.observe(None)
        attached.set_routing("sparse")
        made = {"settings": run.settings.to_dict(), "data_fingerprint": windows.fingerprint}
        made |= {"cost_weight": run.cost_weight}
        save_adapter(attached, out, made | dict(notes or {}), base=base)
    valid = run.last_valid
    return RetrofitRun(out, settings.steps, start, valid["density"], valid["lost"])


class _Run:
    """What a step changes, and what it is made with."""

    def __init__(
        self,
        attached: Retrofit,
        windows: Windows,
        settings: RetrofitSettings,
        out: Path,
        base: BaseIdentity,
        start_from: Path | str | None = None,
    ):
        self.start: dict[str, Any] | None = None
        if start_from is not None:
            self.start = copy_routers(attached, start_from, base)
            settings = replace(settings, entropy_weight=0.0)
        self.attached, self.windows, self.settings = attached, windows, settings
        self.out, self.base = out, base
        known = {} if self.start is None else self.start["notes"]
        self.cost_weight = known.get("cost_weight", settings.cost_weight)
        for parameter in attached.parameters():
            parameter.requires_grad_(True)
        self.learners = [LayerLearner(layer, settings) for layer in attached]
        self.last_valid: dict[str, Any] = {}

    def open(self, reporter: Reporter) -> int:
        """Makes `out` the folder of this run; the step to go on from, 0 at the beginning."""
        content = self._content()
        path, folder = self.out / CONFIG, self.out / CHECKPOINTS
        if not path.exists():
            if checkpoints.list_steps(folder):
                raise ModelError(f"{self.out} has checkpoints but no {CONFIG}; give another --out")
            return self._begin(path, content)
        try:
            saved = parse_json(path.read_bytes())
            differing = [key for key in content if saved.get(key) != content[key]]
        except (OSError, ValueError, AttributeError):
            raise ModelError(
                f"{path} is not a retrofit's configuration; give another --out"
            ) from None
        if differing and saved.get("kind") == content["kind"] and not has_made_a_step(self.out):
            return self._begin(path, content)
        if differing:
            raise ModelError(
                f"{self.out} holds a run with other {', '.join(differing)}; give another --out"
            )
        checkpoints.remove_unfinished(folder)
        try:
            checkpoint = checkpoints.newest_checkpoint(folder, reporter.say)
        except DamagedCheckpoint as error:
            raise ModelError(f"{error}; give another --out to start again") from None
        if checkpoint is None:
            return 0
        self._restore(checkpoint)
        reporter.say(f"going on from step {checkpoint.step}")
        return checkpoint.step

    def _begin(self, path: Path, content: dict[str, Any]) -> int:
        saved = content | {"environment": environment()}
        replace_synced(path, json.dumps(saved, indent=1).encode() + b"\n")
        return 0

    def steps(
        self, start: int, stop: StopRequest, metrics: MetricsFile
    ) -> Iterator[dict[str, Any]]:
        settings, saved = self.settings, start
        if start == 0:
            if self.start is None:
                self._soften()
            yield self._evaluate(0)
        for step in range(start + 1, settings.steps + 1):
            begun = time.perf_counter()
            measures = self._learn(step)
            seconds = time.perf_counter() - begun
            line = self._line(step, "train", measures)
            yield line | {"tokens_per_second": settings.length / max(seconds, 1e-9)}
            self._steer(line["density"])
            last = step == settings.steps
            if step % settings.checkpoint_every == 0 or last or stop:
                if last or step % settings.checkpoint_every == 0:
                    yield self._evaluate(step)
                self._save(step, metrics)
                saved = step
            if stop and not last:
                assert stop.signal_number is not None and saved == step
                raise TrainingInterrupted(
                    f"stopped, saved at step {step} of {settings.steps}; the same command goes on",
                    stop.signal_number,
                )
        if start == settings.steps:
            # Its line is there already.
            self._evaluate(start)

    def _learn(self, step: int) -> list[LayerMeasure]:
        def learn(learner: LayerLearner, given: LayerInput) -> LayerMeasure:
            return learner.learn(given, step, self.cost_weight)

        return self._pass(self.windows.train[step - 1], learn, self._offset(step))

    def _evaluate(self, step: int) -> dict[str, Any]:
        def measure(learner: LayerLearner, given: LayerInput) -> LayerMeasure:
            return learner.measure(given, self.cost_weight)

        passes = [self._pass(window, measure) for window in self.windows.valid]
        self.last_valid = self._line(step, "valid", [m for measures in passes for m in measures])
        return self.last_valid

    def _soften(self) -> None:
        self._pass(self.windows.train[0], LayerLearner.soften)

    def _offset(self, step: int) -> int:
        """The position at which the window of a step begins.

        Rotary attention depends on distances alone, but routers read rotated queries and keys: they
        must have seen every position of the model's context, not only those of a window.
        """
        most = (context_length(self.attached.model) or 0) - self.settings.length
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

    def _steer(self, density: float) -> None:
        miss = (density - self.settings.target_density) / self.settings.target_density
        moved = math.log(self.cost_weight) + self.settings.steering * max(min(miss, 1.0), -1.0)
        self.cost_weight = min(max(math.exp(moved), _LEAST_COST), _MOST_COST)

    def _line(self, step: int, split: str, measures: list[LayerMeasure]) -> dict[str, Any]:
        def mean(name: str) -> float:
            return float(torch.stack([getattr(m, name) for m in measures]).double().mean())

        loss = sum(m.loss for m in measures) / len(measures)
        if not math.isfinite(loss):
            raise ModelError(f"step {step}: the loss is {loss}; the last checkpoint is kept")
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

    def _content(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA_VERSION,
            "kind": "retrofit",
            "start": None if self.start is None else self.start["weights_sha256"],
            "base": self.base.to_dict(),
            "geometry": self.attached.config.to_dict(),
            "settings": self.settings.to_dict(),
            "data_fingerprint": self.windows.fingerprint,
        }

    def _save(self, step: int, metrics: MetricsFile) -> None:
        metrics.sync()
        names: dict[Tensor, str] = {p: n for n, p in self.attached.named_parameters().items()}
        optimizer = {}
        for learner in self.learners:
            optimizer |= checkpoints.optimizer_tensors(learner.optimizer, names)
        folder = self.out / CHECKPOINTS
        state = {"cost_weight": self.cost_weight, "environment": environment()}
        state["metrics"] = metrics.link
        model = {name: parameter for parameter, name in names.items()}
        checkpoints.write_checkpoint(folder, step, model, optimizer, state)
        checkpoints.prune_checkpoints(folder, 2, 0)

    def _restore(self, checkpoint: checkpoints.Checkpoint) -> None:
        named = self.attached.named_parameters()
        saved = checkpoint.model()
        with torch.no_grad():
            for name, parameter in named.items():
                parameter.copy_(saved[name])
        tensors = checkpoint.optimizer()
        for learner in self.learners:
            own = {
                p: n for n, p in named.items() if n.partition(".")[0] == str(learner.layer.index)
            }
            mine = {
                key: t for key, t in tensors.items() if key.partition(".")[2] in set(own.values())
            }
            checkpoints.restore_optimizer(learner.optimizer, own, mine)  # pyright: ignore
        self.cost_weight = checkpoint.state["cost_weight"]


@contextmanager
def _observing(attached: Retrofit, observer: Any) -> Iterator[None]:
    attached.set_routing("dense")
    attached.observe(observer)
    try:
        yield
    finally:
        attached.observe(None)


def read_settings(out: Path | str) -> tuple[RetrofitSettings, MoSARConfig]:
    """The settings and the geometry of the run in `out`."""
    path = Path(out) / CONFIG
    try:
        saved = parse_json(path.read_bytes())
        if saved["kind"] != "retrofit":
            raise ValueError("it is of another kind of run")
        return RetrofitSettings.from_dict(saved["settings"]), MoSARConfig.from_dict(
            saved["geometry"]
        )
    except OSError as error:
        raise TrainingError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise TrainingError(f"{path} is not a retrofit's configuration: {error}") from None
