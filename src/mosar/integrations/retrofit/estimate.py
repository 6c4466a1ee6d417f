"""Is a retrofit worth it? What fewer pairs would lose, from the dense model alone.

For a sample of queries of every layer and group, the attention beyond each reach is measured.
Two frontiers of (density, attention lost) follow, without any training:

    window   every token has the same reach
    choice   each query takes the reach that minimises  lost + price · pairs / (n/2)

A choice here knows its attention beforehand, which routers do not. On the other hand it reads all
keys within its reach, where routers also leave out keys. So it is an estimate and not a bound. The
share of attention in the whole arithmetic says what can be saved at most.

Shapes: H query heads, G routing groups, Q sampled queries, S keys, E reaches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mosar.integrations.retrofit.attach import DENSE, Retrofit
from mosar.integrations.retrofit.layer import RoutedLayer
from mosar.integrations.retrofit.objective import (
    Scoring,
    causal_pairs,
    head_attention,
    spread_queries,
)

DENSITIES = (0.1, 0.2, 0.33, 0.5)
_QUERIES, _REACHES_PER_OCTAVE, _HALVINGS = 64, 2, 40


@dataclass(frozen=True)
class Estimate:
    """What the dense model says about one length."""

    length: int
    density: list[float]
    window: list[float]
    """The attention that a window of each density loses."""
    choice: list[float]
    """The attention that choices by query lose at each density."""
    attention_share: float
    """Of layers with routers, in the multiplications of a dense prefill, without logits."""

    def speedup(self, density: float) -> float:
        """The largest possible one of a prefill that reads a density of the pairs."""
        return 1 / (1 - self.attention_share * (1 - density))


@torch.no_grad()
def estimate_frontier(
    attached: Retrofit, windows: Tensor, *, advance: Callable[[], None] = lambda: None
) -> Estimate:
    """Of windows [N, T], one dense pass each; the routing is "dense" afterwards."""
    lost: list[Tensor] = []
    pairs: list[Tensor] = []
    length = windows.shape[1]
    octaves = math.ceil(math.log2(length) * _REACHES_PER_OCTAVE)
    reaches = sorted({round(2 ** (i / _REACHES_PER_OCTAVE)) for i in range(octaves + 1)})

    def observer(
        layer: RoutedLayer, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]
    ) -> None:
        queries = spread_queries(_QUERIES, k)
        scoring = Scoring(options["scale"], options["softcap"], layer.window)
        attention = head_attention(q[0], k[0], queries, scoring)
        groups = layer.config.routing_groups
        attention_GQS = attention.view(groups, -1, *attention.shape[1:]).mean(dim=1)
        beyond_GQE, read_QE = _beyond(attention_GQS, queries, reaches, layer)
        causal = causal_pairs(queries, layer.window).float().mean()
        lost.append(beyond_GQE)
        pairs.append((read_QE / causal).expand_as(beyond_GQE))

    attached.set_routing(DENSE)
    attached.observe(observer)
    try:
        for window in windows.to(attached.model.device):
            attached.model.base_model(input_ids=window[None], use_cache=False)
            advance()
    finally:
        attached.observe(None)
    lost_NE, pairs_NE = (torch.cat([x.flatten(0, 1) for x in parts]) for parts in (lost, pairs))
    return Estimate(
        length,
        list(DENSITIES),
        [_of_window(lost_NE, pairs_NE, density) for density in DENSITIES],
        [_of_choices(lost_NE, pairs_NE, density) for density in DENSITIES],
        attention_share(attached, length),
    )


def _beyond(
    attention_GQS: Tensor, queries: Tensor, reaches: list[int], layer: RoutedLayer
) -> tuple[Tensor, Tensor]:
    """Attention beyond each reach, sinks aside [G, Q, E], and the pairs within it [Q, E]."""
    keys = torch.arange(attention_GQS.shape[-1], device=queries.device)
    is_sink = keys < layer.config.num_sinks
    distance_QS = queries[:, None] - keys
    exists_QS = distance_QS >= 0
    if layer.window is not None:
        exists_QS &= distance_QS <= layer.window
    beyond, read = [], []
    for reach in reaches:
        reads_QS = exists_QS & ((distance_QS <= reach) | is_sink)
        beyond.append(1 - (attention_GQS * reads_QS).sum(dim=-1))
        read.append(reads_QS.sum(dim=-1).float())
    return torch.stack(beyond, dim=-1).clamp_min(0), torch.stack(read, dim=-1)


def _of_window(lost_NE: Tensor, pairs_NE: Tensor, density: float) -> float:
    """On straight lines between the reaches."""
    lost, read = lost_NE.double().mean(dim=0), pairs_NE.double().mean(dim=0)
    above = int((read < density).sum().clamp(1, len(read) - 1))
    share = ((density - read[above - 1]) / (read[above] - read[above - 1]).clamp_min(1e-9)).clamp(
        0, 1
    )
    return float(lost[above - 1] + share * (lost[above] - lost[above - 1]))


def _of_choices(lost_NE: Tensor, pairs_NE: Tensor, density: float) -> float:
    """At the price that gives this density, by bisection of its logarithm."""
    low, high = math.log(1e-9), math.log(1e6)
    taken = torch.zeros(len(lost_NE), 1, dtype=torch.long, device=lost_NE.device)
    for _ in range(_HALVINGS):
        price = math.exp((low + high) / 2)
        taken = (lost_NE + price * pairs_NE).argmin(dim=1, keepdim=True)
        if float(pairs_NE.gather(1, taken).double().mean()) > density:
            low = math.log(price)
        else:
            high = math.log(price)
    taken = (lost_NE + math.exp(high) * pairs_NE).argmin(dim=1, keepdim=True)
    return float(lost_NE.gather(1, taken).double().mean())


def attention_share(attached: Retrofit, length: int) -> float:
    """The share of the layers that routers can thin out in a dense prefill's multiplications."""

    def multiplications(layers: Iterable[Any]) -> int:
        return sum(
            2 * int(causal_pairs(places, layer.window).sum()) * layer.num_heads * layer.head_dim
            for layer in layers
        )

    places = torch.arange(length)
    routed, attention = multiplications(attached), multiplications(attached.layers)
    decoder = attached.model.base_model
    embeddings = {id(p) for p in attached.model.get_input_embeddings().parameters()}
    weights = sum(p.numel() for p in decoder.parameters() if id(p) not in embeddings)
    return routed / (attention + weights * length)
