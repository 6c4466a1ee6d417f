"""Trains a decoder: one update of its parameters, one evaluation.

A line of the metrics describes one step. Nothing is averaged over steps, so lines do not depend on
where a run was interrupted.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mosar.core.inputs import NotANumber
from mosar.errors import NonFiniteError, TrainingError
from mosar.model.decoder import Decoder
from mosar.model.parameters import parameter_parts, total
from mosar.training.batches import Batches, open_batches
from mosar.training.config import RunConfig
from mosar.training.distributed.team import Team
from mosar.training.objective import Objective, Terms
from mosar.training.precision import autocast, check_precision
from mosar.training.run import Cadence, Run
from mosar.training.run_folder import CHECKPOINTS, METRICS, check_same_run, read_metrics
from mosar.training.schedule import learning_rate
from mosar.training.stopping import StopRequest
from mosar.training.tensorboard import WriteLine, check_tensorboard, tensorboard_writer


class Learner(Run):
    """A decoder, its optimizer and its data."""

    config: RunConfig
    decoder: Decoder
    batches: Batches
    terms: Callable[..., Terms]
    """Computes the objective of a batch with the decoder."""
    last_losses: tuple[float, float]
    """Losses of the last logged step and of the last evaluation; set once the run is finished."""
    own_files = (CHECKPOINTS, METRICS)
    how_to_extend = "--set train.steps=…"
    how_to_save_memory = (
        "a smaller train.micro_batch (with a larger train.accumulation) or a smaller model takes "
        "less memory"
    )

    def __init__(self, config: RunConfig, team: Team | None = None):
        self.config, self.team = config, team or Team()
        self.cadence = Cadence(*(getattr(config.train, name) for name in Cadence._fields))
        self.tokens_per_step = config.tokens_per_step
        self.objective = Objective(config)

    @classmethod
    def of(cls, config: RunConfig, batches: Batches, team: Team | None = None) -> Learner:
        """A learner without a run folder, ready for its first step."""
        learner = cls(config, team)
        learner.batches = batches
        learner.build()
        return learner

    def prepare(self) -> None:
        with self.team.together():
            _check_memory(self.config, self.team)
            check_precision(self.config.train)
            check_tensorboard(self.config)
            self.batches = open_batches(self.config, self.team.share)
        self.data_fingerprint = self.batches.fingerprint()
        self._check_agreement()

    def _check_agreement(self) -> None:
        """A TrainingError if processes were started with different configurations or data."""
        values = {**self.config.flat(), "data.folder": None, "data": self.data_fingerprint}
        own = hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
        first = self.team.from_first(lambda: own)
        with self.team.together():
            if own != first:
                raise TrainingError(
                    "this process has another configuration or other data than the first one; "
                    "start all with the same options and the same data"
                )

    def build(self, *, initialise: bool = True) -> None:
        self.decoder = self.team.build_decoder(self.config, initialise=initialise)
        self.names = {parameter: name for name, parameter in self.decoder.named_parameters()}
        self.optimizer = build_optimizer(self.names, self.config)
        self.optimizers = [self.optimizer]
        self.team.adapt_optimizer(self.optimizer)
        self.terms = self.team.forward_fn(self.objective, self.decoder)

    def update(self, step: int, stop: StopRequest | None = None) -> dict[str, Any] | None:
        train, team = self.config.train, self.team
        rate = learning_rate(step, train)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.zero_grad(set_to_none=True)
        mean, passes = Mean(), team.share.passes(train)
        for number, (tokens, *rest) in enumerate(self.batches.of_step(step), start=1):
            if stop:
                return None
            with team.accumulating(number < passes):
                terms = self._pass(step, tokens, *rest)
                (terms.loss / passes).backward()
            mean.add(terms)
        line = self._line(step, "train", mean)
        norm = self._clip_gradients(step)
        self.optimizer.step()
        return line | {"learning_rate": rate, "grad_norm": norm}

    @torch.no_grad()
    def evaluate(self, step: int) -> dict[str, Any]:
        mean = Mean()
        for (tokens, *rest), own in self.batches.of_evaluation():
            terms = self._pass(step, tokens, *rest)
            mean.add(terms, len(tokens) if own else 0)
        self.team.end_evaluation(self.decoder)
        return self._line(step, "valid", mean)

    def check_same(self, folder: Path, report: Callable[[str], None]) -> None:
        check_same_run(folder, self.config, self.data_fingerprint, report)

    def how_to_continue(self, out: Path) -> str:
        if self.team.num_processes > 1:
            return "the same job resumes"
        return f"resume with: mosar train --out {out}"

    def board(self, out: Path, start: int) -> AbstractContextManager[WriteLine]:
        return tensorboard_writer(self.config, out, start)

    def finish(self, out: Path) -> None:
        losses = self.team.from_first(
            lambda: {line["split"]: line["lm_loss"] for line in read_metrics(out)}
        )
        self.last_losses = losses["train"], losses["valid"]

    def _pass(self, step: int, *batch: Tensor | None) -> Terms:
        """The terms of one batch; a NonFiniteError if the model has diverged."""
        try:
            with autocast(self.config.train):
                return self.terms(*batch, step=step)
        except NotANumber:
            raise NonFiniteError(f"step {step}: the routing and the loss are NaN") from None

    def _line(self, step: int, split: str, mean: Mean) -> dict[str, Any]:
        means = mean.over(self.team)
        loss, shares = float(means.loss), means.shares
        if not math.isfinite(loss):
            what = "loss" if split == "train" else "validation loss"
            raise NonFiniteError(f"step {step}: the {what} is {loss}")
        reach = means.expected_reach
        return {
            "step": step,
            "split": split,
            "tokens": step * self.tokens_per_step,
            "loss": loss,
            "lm_loss": float(means.lm_loss),
            "learning_rate": None,
            "grad_norm": None,
            "tokens_per_second": None,
            "expected_reach": None if reach is None else float(reach),
            "cost_weight": self.objective.cost_weight(step),
            "regime_shares": None
            if shares is None
            else dict(zip(("query", "key"), shares.tolist(), strict=True)),
        }

    def _clip_gradients(self, step: int) -> float:
        """The gradient norm before clipping; a NonFiniteError names the bad parameters."""
        team, names = self.team, self.names
        norm = team.gradient_norm(names)
        value = float(norm)
        if not math.isfinite(value):
            spoilt = team.bad_gradients(names)
            bad = [name for name, is_bad in zip(names.values(), spoilt, strict=True) if is_bad]
            some = ", ".join(bad[:3]) + (f" and {len(bad) - 3} more" if len(bad) > 3 else "")
            where = f" (in {some})" if bad else ""
            raise NonFiniteError(f"step {step}: the gradient is {value}{where}")
        most = self.config.train.grad_clip
        if most is not None and value > most:
            team.clip(names, most, norm)
        return value


def build_optimizer(names: dict[Tensor, str], config: RunConfig) -> torch.optim.AdamW:
    """AdamW; gains and biases do not decay."""
    train = config.train
    # Router biases have two dimensions, one for the groups, so the name counts too.
    matrices = [
        p for p, name in names.items() if p.dim() > 1 and "bias" not in name.rpartition(".")[2]
    ]
    chosen = set(matrices)
    others = [parameter for parameter in names if parameter not in chosen]
    groups = [
        {"params": matrices, "weight_decay": train.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    fused = torch.device(train.device).type in ("cpu", "cuda")
    return torch.optim.AdamW(groups, lr=train.learning_rate, betas=train.betas, fused=fused)


class Mean:
    """Means of terms over passes, weighted by the number of windows."""

    def __init__(self) -> None:
        self.weight = 0
        self.sums: Terms | None = None

    def add(self, terms: Terms, weight: int = 1) -> None:
        self.weight += weight
        terms = replace(terms, loss=terms.loss.detach())
        weighted = _by_field(lambda value: value * weight, terms)
        self.sums = weighted if self.sums is None else _by_field(torch.add, self.sums, weighted)

    def over(self, team: Team) -> Terms:
        """The means over all processes."""
        assert self.sums is not None
        sums, weight = self.sums, float(self.weight)
        if team.num_processes > 1:
            # All in one message; there are few, so float64 is cheap.
            parts: list[Tensor] = []
            _by_field(lambda value: parts.append(value.double().flatten()), sums)
            together = torch.cat([*parts, parts[0].new_tensor([weight])])
            *summed, whole = team.sum(together).split([part.numel() for part in parts] + [1])
            rest = iter(summed)
            sums, weight = _by_field(lambda v: next(rest).view(v.shape), sums), float(whole)
        return _by_field(lambda value: value / weight, sums)


def _by_field(change: Callable[..., Any], *terms: Terms) -> Terms:
    """Applies `change` to each field; fields that a variant lacks stay None."""
    made: dict[str, Any] = {}
    for field in fields(Terms):
        values = [getattr(each, field.name) for each in terms]
        made[field.name] = None if values[0] is None else change(*values)
    return Terms(**made)


def _check_memory(config: RunConfig, team: Team) -> None:
    """A TrainingError for a model that cannot fit into memory, before it is built."""
    parameters = total(parameter_parts(config.model, config.attention))
    # Parameters, gradient and two moments; for other devices only the parameters are built here.
    copies = 4 if torch.device(config.train.device).type == "cpu" else 1
    needed = 4 * copies * parameters / team.num_processes
    there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > there:
        names = ("vocab_size", "hidden_size", "num_layers", "num_heads", "head_dim", "ffn_size")
        sizes = ", ".join(f"model.{name}={getattr(config.model, name)}" for name in names)
        names = ("router_hidden", "routing_groups")
        sizes += "".join(f", attention.{name}={getattr(config.attention, name)}" for name in names)
        raise TrainingError(
            f"a model with {sizes} has {parameters:.4g} parameters; to train it takes "
            f"{needed / 1e9:.4g} GB of memory, and this machine has {there / 1e9:.4g} GB"
        )
