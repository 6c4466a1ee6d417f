"""One update of the parameters, and one evaluation of them.

A line of the metrics describes the step itself: nothing is averaged over steps, so that lines do
not depend on where a run was interrupted.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mosar.core.inputs import NotANumber
from mosar.errors import NonFiniteError
from mosar.model.decoder import Decoder
from mosar.training.batches import Batches, TaskBatches
from mosar.training.config import RunConfig
from mosar.training.distributed.team import Team
from mosar.training.objective import Objective, Terms
from mosar.training.precision import autocast
from mosar.training.schedule import learning_rate
from mosar.training.stopping import StopRequest


@dataclass
class Learner:
    """What a step changes, and what it is made with."""

    config: RunConfig
    decoder: Decoder
    optimizer: torch.optim.Optimizer
    objective: Objective
    batches: Batches | TaskBatches
    names: dict[Tensor, str]
    """The name of each parameter."""
    team: Team
    """The processes that take the step together."""
    terms: Callable[..., Terms]
    """The objective of a batch, through the decoder."""

    @classmethod
    def build(
        cls,
        config: RunConfig,
        batches: Batches | TaskBatches,
        *,
        initialise: bool = True,
        team: Team | None = None,
    ) -> Learner:
        team = team or Team()
        decoder = team.build_decoder(config, initialise=initialise)
        names: dict[Tensor, str] = {
            parameter: name for name, parameter in decoder.named_parameters()
        }
        optimizer, objective = build_optimizer(names, config), Objective(config)
        team.adapt_optimizer(optimizer)
        terms = team.forward_fn(objective, decoder)
        return cls(config, decoder, optimizer, objective, batches, names, team, terms)


def build_optimizer(names: dict[Tensor, str], config: RunConfig) -> torch.optim.AdamW:
    """AdamW; gains and biases do not decay."""
    train = config.train
    # The biases of routers have two dimensions, one for the groups: the name decides too.
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


def update(learner: Learner, step: int, stop: StopRequest | None = None) -> dict[str, Any] | None:
    """Update number `step`; its line of the metrics, or None where `stop` came before its end."""
    config, optimizer = learner.config, learner.optimizer
    rate = learning_rate(step, config.train)
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.zero_grad(set_to_none=True)
    mean, passes = Mean(), learner.team.share.passes(config.train)
    for number, (tokens, *rest) in enumerate(learner.batches.of_step(step), start=1):
        if stop:
            return None
        with learner.team.accumulating(number < passes):
            terms = _pass(learner, step, tokens, *rest)
            (terms.loss / passes).backward()
        mean.add(terms)
    line = _line(learner, step, "train", mean)
    norm = _clip_gradients(learner, step)
    optimizer.step()
    return line | {"learning_rate": rate, "grad_norm": norm}


@torch.no_grad()
def evaluate(learner: Learner, step: int) -> dict[str, Any]:
    """The line of the metrics for the validation windows, after update number `step`."""
    mean = Mean()
    for (tokens, *rest), own in learner.batches.shared_evaluation():
        terms = _pass(learner, step, tokens, *rest)
        mean.add(terms, len(tokens) if own else 0)
    learner.team.end_evaluation(learner.decoder)
    return _line(learner, step, "valid", mean)


def _pass(learner: Learner, step: int, *batch: Tensor | None) -> Terms:
    """The terms of one batch; a NonFiniteError where the model has diverged."""
    try:
        with autocast(learner.config.train):
            return learner.terms(*batch, step=step)
    except NotANumber:
        raise _spoilt(learner, f"step {step}: a routing is not a number, nor is the loss") from None


class Mean:
    """Means of terms over passes, weighted by their windows."""

    def __init__(self) -> None:
        self.weight = 0
        self.sums: list[Tensor | None] = [None] * 4

    def add(self, terms: Terms, weight: int = 1) -> None:
        self.weight += weight
        values = (terms.loss.detach(), terms.lm_loss, terms.expected_reach, terms.shares)
        for index, value in enumerate(values):
            if value is not None:
                before = self.sums[index]
                self.sums[index] = value * weight if before is None else before + value * weight

    def values(self, team: Team) -> tuple[float, float, float | None, list[Any] | None]:
        """Over all that the team saw."""
        sums, weight = self.sums, self.weight
        if team.num_processes > 1:
            # One sum for all of them; in float64, as there are few.
            there = [s for s in sums if s is not None]
            flat = torch.cat([s.double().flatten() for s in there])
            *parts, total = team.sum(torch.cat([flat, flat.new_tensor([weight])])).split(
                [s.numel() for s in there] + [1]
            )
            summed = iter(part.view(s.shape) for part, s in zip(parts, there, strict=True))
            sums = [None if s is None else next(summed) for s in sums]
            weight = float(total)
        loss, lm_loss, reach, shares = (None if s is None else s / weight for s in sums)
        assert loss is not None and lm_loss is not None
        return (
            float(loss),
            float(lm_loss),
            None if reach is None else float(reach),
            None if shares is None else shares.tolist(),
        )


def _line(learner: Learner, step: int, split: str, mean: Mean) -> dict[str, Any]:
    loss, lm_loss, reach, shares = mean.values(learner.team)
    if not math.isfinite(loss):
        what = "loss" if split == "train" else "validation loss"
        raise _spoilt(learner, f"step {step}: the {what} is {loss}")
    return {
        "step": step,
        "split": split,
        "tokens": step * learner.config.tokens_per_step,
        "loss": loss,
        "lm_loss": lm_loss,
        "learning_rate": None,
        "grad_norm": None,
        "tokens_per_second": None,
        "expected_reach": reach,
        "cost_weight": learner.objective.cost_weight(step),
        "regime_shares": None if shares is None else {"query": shares[0], "key": shares[1]},
    }


def _clip_gradients(learner: Learner, step: int) -> float:
    """The norm of the gradient before clipping; a NonFiniteError names who spoilt it."""
    team = learner.team
    norm = team.gradient_norm(learner.names)
    value = float(norm)
    if not math.isfinite(value):
        spoilt = team.bad_gradients(learner.names)
        bad = [name for name, is_bad in zip(learner.names.values(), spoilt, strict=True) if is_bad]
        some = ", ".join(bad[:3]) + (f" and {len(bad) - 3} more" if len(bad) > 3 else "")
        where = f" (in {some})" if bad else ""
        raise _spoilt(learner, f"step {step}: the gradient is {value}{where}")
    most = learner.config.train.grad_clip
    if most is not None and value > most:
        team.clip(learner.names, most, norm)
    return value


def _spoilt(learner: Learner, message: str) -> NonFiniteError:
    error = NonFiniteError(message)
    # All processes of a team find the same figure, and one says so.
    error.reported_by_peer = not learner.team.is_first
    return error
