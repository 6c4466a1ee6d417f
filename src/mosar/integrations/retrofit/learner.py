"""Trains the routers of one layer from its queries and keys, without touching the model.

    loss = mean(error) + lambda · (mean(pairs) / (n/2) - beta(t) · entropy)

Every update is a function of the parameters before it, the window and (seed, step, layer), so that
an interrupted run goes on bit for bit.

Shapes: G routing groups, Q queries, S keys, R regimes, H query heads, K key/value heads.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from mosar.core.routers import PostPositionRouter, top1_routing
from mosar.integrations.retrofit.config import RetrofitSettings
from mosar.integrations.retrofit.layer import RoutedLayer
from mosar.integrations.retrofit.objective import (
    Scoring,
    by_group,
    causal_pairs,
    expected_pairs,
    head_attention,
    kept_output,
    read_attention,
    read_probability,
    spread_queries,
)

_WARMUP_UPDATES = 10


class LayerInput(NamedTuple):
    """What a layer computes with on one window, without padding."""

    q: Tensor
    """[H, S, D]."""
    k: Tensor
    """[K, S, D]."""
    v: Tensor
    residual: Tensor
    """[S, hidden]: the stream that its output is added to."""
    scale: float | None = None
    softcap: float | None = None


class LayerMeasure(NamedTuple):
    """What one window says about a layer."""

    loss: float
    error: float
    """Of the expected choices: relative squared error of what is added to the residual stream."""
    lost: Tensor
    """Attention that top-1 choices do not read, per group [G]."""
    density: Tensor
    """Pairs that they read over causal pairs, of the same queries, per group [G]."""


class LayerLearner:
    """The optimizer of one layer's routers, and of its low-rank changes."""

    def __init__(self, layer: RoutedLayer, settings: RetrofitSettings):
        self.layer, self.settings = layer, settings
        parts = [[p for router in layer.routers for p in router.parameters()]]
        if layer.rank:
            parts.append(list(layer.lora.parameters()))
        self.optimizer = torch.optim.AdamW(
            [{"params": parameters} for parameters in parts],
            lr=settings.learning_rate,
            # Gradients shrink by orders of magnitude where choices are nearly certain; an optimizer
            # that remembers the large ones could not undo such a choice once lambda has risen.
            betas=(0.9, 0.95),
            weight_decay=settings.weight_decay,
        )

    @torch.no_grad()
    def soften(self, given: LayerInput) -> None:
        """Leaves the saturated start, where no gradient comes through: nearly uniform choices.

        The first matrix is scaled to the spread of each input, so that all of them are heard:
        components of a rotated key differ by orders of magnitude.
        """
        generator = torch.Generator().manual_seed(self.settings.seed * 1_000_003 + self.layer.index)
        for router, x in zip(self.layer.routers, (given.q, given.k), strict=True):
            _soften(router, x, self.settings.global_bias, generator)

    def learn(self, given: LayerInput, step: int, cost_weight: float) -> LayerMeasure:
        """The updates of step number `step` >= 1 on one window."""
        settings = self.settings
        generator = _generator(settings.seed, step, self.layer.index)
        length = given.k.shape[1]
        most = min(settings.queries, length)
        total = settings.steps * settings.updates
        measures = []
        for update in range(settings.updates):
            queries = torch.randperm(length, generator=generator)[:most].to(given.k.device)
            number = (step - 1) * settings.updates + update
            self.set_rate(scheduled_rate(number, total, settings.learning_rate))
            fade = max(0.0, 1 - number / max(settings.entropy_share * total, 1e-9))
            with torch.enable_grad():
                loss, measure = self._loss(
                    given, queries, cost_weight, settings.entropy_weight * fade
                )
                self.optimizer.zero_grad(set_to_none=True)
                loss.backward()
            self.optimizer.step()
            measures.append(measure)
        return _mean(measures)

    def set_rate(self, rate: float, lora_rate: float = 0.0) -> None:
        rates = (rate, lora_rate)
        for group, value in zip(self.optimizer.param_groups, rates, strict=False):
            group["lr"] = value

    @torch.no_grad()
    def measure(self, given: LayerInput, cost_weight: float) -> LayerMeasure:
        """The same figures of evenly spread queries, without an update."""
        queries = spread_queries(self.settings.queries, given.k)
        return self._loss(given, queries, cost_weight, 0.0)[1]

    def _loss(
        self, given: LayerInput, queries: Tensor, cost_weight: float, entropy_weight: float
    ) -> tuple[Tensor, LayerMeasure]:
        layer, config, length = self.layer, self.layer.config, given.k.shape[1]
        assert layer.project is not None
        support = {"queries": queries, "config": config, "window": layer.window}
        with torch.no_grad():
            scoring = Scoring(given.scale, given.softcap, layer.window)
            attention = head_attention(given.q, given.k, queries, scoring)
            whole = torch.ones(1, len(queries), length, device=given.k.device)
            exact = layer.project(kept_output(attention, whole, given.v)).float()
            # The median: the first tokens' streams are far larger than all others.
            after = given.residual[queries].float() + exact
            stream = after.square().sum(dim=-1).median().clamp_min(1e-12)
        routed = layer.route(given.q[None, :, queries], given.k[None])
        pi_q, pi_k = (by_group(x.probabilities) for x in (routed.query, routed.key))
        keep = read_probability(pi_q, pi_k, **support)
        found = layer.project(kept_output(attention, keep, given.v)).float()
        error = (found - exact).square().sum(dim=-1).mean() / stream
        price = keep.sum(dim=-1).mean() / (length / 2)
        if entropy_weight:
            price = price - entropy_weight * (_entropy(pi_q) + _entropy(pi_k))
        loss = error + cost_weight * price
        with torch.no_grad():
            logits_q, logits_k = (by_group(x.logits) for x in (routed.query, routed.key))
            read = read_attention(attention, logits_q, logits_k, queries, layer)
            pairs = expected_pairs(top1_routing(logits_q), top1_routing(logits_k), **support)
            causal = causal_pairs(queries, layer.window).float().mean()
            measure = LayerMeasure(
                float(loss), float(error), 1 - read.mean(dim=1), pairs.mean(dim=1) / causal
            )
        return loss, measure


def _soften(
    router: PostPositionRouter, x: Tensor, global_bias: float, generator: torch.Generator
) -> None:
    """x [heads, S, D]: what the router is going to read."""
    groups, _, inputs = router.weight1.shape
    x_SGI = x.float().transpose(0, 1).reshape(x.shape[1], groups, inputs)
    spread_GI, mean_GI = torch.std_mean(x_SGI, dim=0)
    noise = torch.randn(router.weight1.shape, generator=generator) / math.sqrt(inputs)
    router.weight1.copy_(noise.to(x.device) / (spread_GI[:, None] + 1e-3))
    router.bias1.copy_(-torch.einsum("ghi,gi->gh", router.weight1, mean_GI))
    router.weight2.copy_(0.1 * torch.randn(router.weight2.shape, generator=generator))
    router.bias2.zero_()
    router.bias2[:, -1] = global_bias


def scheduled_rate(number: int, total: int, peak: float, warmup: int = _WARMUP_UPDATES) -> float:
    """The learning rate of update `number` < `total`: warmed up, then a cosine."""
    warm = min(1.0, (number + 1) / warmup)
    return peak * warm * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * number / total)))


def _generator(seed: int, step: int, layer: int) -> torch.Generator:
    return torch.Generator().manual_seed((seed * 1_000_003 + step) * 1_009 + layer)


def _entropy(pi: Tensor) -> Tensor:
    return -(pi * pi.clamp_min(1e-9).log()).sum(dim=-1).mean()


def _mean(measures: list[LayerMeasure]) -> LayerMeasure:
    losses, errors, lost, density = zip(*measures, strict=True)
    return LayerMeasure(
        sum(losses) / len(losses),
        sum(errors) / len(errors),
        torch.stack(lost).mean(dim=0),
        torch.stack(density).mean(dim=0),
    )
