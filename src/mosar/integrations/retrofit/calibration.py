"""Moves all routers along the price of a pair until they read a given share of the pairs.

A router that was trained with another price would have moved each logit by the price's change
times the pairs that the regime reads. One such change c, the same in all layers, is found by
bisection:

    bias[g, m] -= c · cost[g, m],   cost = the density of the group if all of its tokens chose m

so that a run ends at its target density, and one run gives a family of densities.

Shapes: G routing groups, T tokens, R regimes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from mosar.core.routers import top1_routing
from mosar.integrations.retrofit.attach import Retrofit
from mosar.integrations.retrofit.layer import RoutedLayer
from mosar.integrations.retrofit.objective import by_group, causal_pairs, expected_pairs

# Logits farther than this from where they were trained decide nothing by the token any more.
_FARTHEST, _HALVINGS = 40.0, 24


class _Choices(NamedTuple):
    """What a layer's routers say of one window."""

    layer: RoutedLayer
    window: int | None
    logits_q: Tensor
    """[G, T, R]."""
    logits_k: Tensor


@torch.no_grad()
def calibrate(attached: Retrofit, windows: Tensor, target: float) -> float:
    """Shifts the routers' last biases so that windows [N, T] are read with density `target`.

    Returns the density that was reached; it is the nearest possible where the target is not. The
    model ends under "sparse" routing.
    """
    found = _choices(attached, windows)
    costs = _costs(found)
    low, high = -_FARTHEST, _FARTHEST
    for _ in range(_HALVINGS):
        change = (low + high) / 2
        if _density(found, costs, change) > target:
            low = change
        else:
            high = change
    for layer, cost in costs.items():
        for router, shift in zip(layer.routers, high * cost, strict=True):
            router.bias2.sub_(shift)
    return _density(found, costs, high)


def _choices(attached: Retrofit, windows: Tensor) -> list[_Choices]:
    """Of sparse passes: later layers see what earlier ones leave."""
    found = []

    def observer(layer: RoutedLayer, q: Tensor, k: Tensor, *others: object) -> None:
        routed = layer.route(q, k)
        logits = (by_group(x.logits) for x in (routed.query, routed.key))
        found.append(_Choices(layer, layer.window, *logits))

    attached.set_routing("sparse")
    attached.observe(observer)
    try:
        for window in windows.to(attached.model.device):
            attached.model.base_model(input_ids=window[None], use_cache=False)
    finally:
        attached.observe(None)
    return found


def _costs(found: list[_Choices]) -> dict[RoutedLayer, Tensor]:
    """Of each layer's queries and keys [2, G, R]: the derivative of the density by their share."""
    costs: dict[RoutedLayer, list[Tensor]] = {}
    for choices in found:
        with torch.enable_grad():
            hard = [top1_routing(x).requires_grad_() for x in (choices.logits_q, choices.logits_k)]
            grads = torch.autograd.grad(_pairs(choices, *hard).sum(), hard)
        costs.setdefault(choices.layer, []).append(torch.stack([g.sum(dim=1) for g in grads]))
    return {layer: torch.stack(windows).mean(dim=0) for layer, windows in costs.items()}


def _density(found: list[_Choices], costs: dict[RoutedLayer, Tensor], change: float) -> float:
    densities = []
    for choices in found:
        shift_q, shift_k = change * costs[choices.layer]
        labels_q = top1_routing(choices.logits_q - shift_q[:, None])
        labels_k = top1_routing(choices.logits_k - shift_k[:, None])
        densities.append(_pairs(choices, labels_q, labels_k).mean())
    return float(torch.stack(densities).double().mean())


def _pairs(choices: _Choices, pi_q: Tensor, pi_k: Tensor) -> Tensor:
    """The density of each group [G]."""
    queries = torch.arange(pi_q.shape[1], device=pi_q.device)
    pairs = expected_pairs(
        pi_q, pi_k, queries=queries, config=choices.layer.config, window=choices.window
    )
    return pairs.mean(dim=1) / causal_pairs(queries, choices.window).float().mean()
