"""What the routers of a pass chose, and what was read: shares of the regimes, reach, pairs.

    reach     ½ (mean pi_Q·c + mean pi_K·c),  c_m = min(delta_m / n, 1),  c_G = 1

Shapes: B windows, T tokens, L layers, R regimes.
"""

from __future__ import annotations

from collections.abc import Sequence
from string import ascii_uppercase, digits
from typing import Any

import torch
from torch import Tensor

from mosar.core.config import MoSARConfig
from mosar.core.losses import normalized_reach_cost
from mosar.geometries import Geometry, LayerRouting

# How many labels of the first window are kept, at most the training length.
EXAMPLE_TOKENS = 2048
ROLES = ("query", "key")
# The fields of a record without routers.
NO_ROUTING: dict[str, Any] = {
    **{"reach_soft": None, "reach_top1": None, "shares_soft": {}, "shares_top1": {}},
    **{"regimes": [], "example_labels": {}},
}


class RoutingTally:
    """Sums over the passes of one length under one routing."""

    def __init__(self, config: MoSARConfig, num_layers: int, length: int):
        self.config, self.length = config, length
        self._soft = torch.zeros(2, num_layers, config.num_regimes, dtype=torch.float64)
        self._top1 = torch.zeros_like(self._soft)
        self._tokens = 0
        self.example_labels: dict[str, list[str]] = {}

    def add(self, routings: Sequence[LayerRouting]) -> None:
        if not self.example_labels:
            self._keep_example(routings)
        self._tokens += routings[0].query.probabilities[..., 0].numel()
        for layer, routing in enumerate(routings):
            for role, router in enumerate((routing.query, routing.key)):
                labels, size = router.labels.flatten(), self.config.num_regimes
                rows = router.probabilities.flatten(0, -2)
                self._soft[role, layer] += rows.sum(dim=0, dtype=torch.float64).cpu()
                self._top1[role, layer] += torch.bincount(labels, minlength=size).cpu()

    def _keep_example(self, routings: Sequence[LayerRouting]) -> None:
        letters = regime_letters([regime.name for regime in self.config.regimes])
        kept = min(self.config.max_length, EXAMPLE_TOKENS)
        for index, role in enumerate(ROLES):
            # With several routing groups, the first.
            labels = [r.labels[index].flatten(0, -2)[0, :kept].tolist() for r in routings]
            self.example_labels[role] = ["".join(letters[m] for m in layer) for layer in labels]

    def shares(self, *, top1: bool) -> dict[str, list[list[float]]]:
        """ "query" and "key": [L][R]."""
        shares = (self._top1 if top1 else self._soft) / self._tokens
        return dict(zip(ROLES, shares.tolist(), strict=True))

    def reach(self, *, top1: bool) -> float:
        # Reach is linear in the probabilities: the reach of the mean is the mean reach.
        shares = (self._top1 if top1 else self._soft) / self._tokens
        return float(normalized_reach_cost(shares[0], shares[1], self.config, self.length))

    def record_fields(self) -> dict[str, Any]:
        """The fields of a record about the routers."""
        return {
            "reach_soft": self.reach(top1=False),
            "reach_top1": self.reach(top1=True),
            "shares_soft": self.shares(top1=False),
            "shares_top1": self.shares(top1=True),
            "regimes": [regime.name for regime in self.config.regimes],
            "example_labels": self.example_labels,
        }


def regime_letters(names: Sequence[str]) -> list[str]:
    """A letter for each regime: the first of its name that is still free."""
    taken: list[str] = []
    for name in names:
        taken.append(next(c for c in (*name, *ascii_uppercase, *digits) if c not in taken))
    return taken


class PairTally:
    """Pairs of the support and causal pairs, layer by layer; empty where all layers read all."""

    def __init__(self):
        self._counts: dict[int, tuple[float, int]] = {}
        self._num_layers = 0

    def add(
        self,
        geometries: Sequence[Geometry],
        shape: tuple[int, int],
        routing: str,
        routed: Sequence[LayerRouting],
        segment_ids: Tensor | None = None,
    ) -> None:
        """Counts a batch of so many rows of tokens, while they execute `routing`."""
        self._num_layers = len(geometries)
        for layer, geometry in enumerate(geometries):
            counted = geometry.acting.count_pairs(
                shape,
                routing=routing,
                labels=routed[layer].labels if routed else None,
                segment_ids=segment_ids,
            )
            if counted is not None:
                inside, causal = self._counts.get(layer, (0, 0))
                self._counts[layer] = inside + counted[0], causal + counted[1]

    @property
    def layer_density(self) -> list[float]:
        if not self._counts:
            return []
        # A layer that is not counted reads everything.
        counts = [self._counts.get(layer, (1, 1)) for layer in range(self._num_layers)]
        return [inside / causal for inside, causal in counts]

    @property
    def density(self) -> float:
        """The mean over the layers."""
        layers = self.layer_density
        return sum(layers) / len(layers) if layers else 1.0
