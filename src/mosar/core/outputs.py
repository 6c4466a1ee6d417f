"""Structured results of the core, complete for tests and diagnostics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from mosar.core.bias import LabelBias, MixtureBias, routed_bias
from mosar.core.config import MoSARConfig


@dataclass(frozen=True)
class RouterOutput:
    """What a router decided; [B, T, R], or [B, Gr, T, R] with more than one routing group."""

    logits: Tensor
    """z, before the temperature, float32 or float64."""
    probabilities: Tensor
    """pi = softmax(z / tau), float32 or float64."""

    @property
    def labels(self) -> Tensor:
        """The top-1 regime of each token, from the logits, lowest index on ties."""
        return self.logits.argmax(dim=-1)


class LayerRouting(NamedTuple):
    """What the routers of one layer decided for its queries and keys."""

    query: RouterOutput
    key: RouterOutput

    @property
    def labels(self) -> tuple[Tensor, Tensor]:
        """The labels of queries and of keys, [B, T] and [B, S], or with groups."""
        return self.query.labels, self.key.labels

    def bias(self, config: MoSARConfig, routing: str) -> LabelBias | MixtureBias:
        """The bias that the operators add to the scores under `routing`.

        Labels come from the logits: two logits can differ where their probabilities are equal.
        """
        if routing == "soft":
            return routed_bias(self.query.probabilities, self.key.probabilities, config, routing)
        return routed_bias(self.query.logits, self.key.logits, config, routing)

    def learned_bias(self, config: MoSARConfig, queries: Tensor | None = None) -> LabelBias:
        """The bias of sparse routing, where probabilities learn what other choices would change.

        queries: see `RoutingToLearn`.
        """
        bias = routed_bias(self.query.logits, self.key.logits, config, "sparse")
        assert isinstance(bias, LabelBias)
        return bias.learning(self.query.probabilities, self.key.probabilities, queries)


class RoutingWithMass(LayerRouting):
    """A routing with its expected discarded mass (a scalar), which the objective may use."""

    discarded: Tensor


def regime_shares(layers: Sequence[LayerRouting]) -> Tensor:
    """[2, L, R]: the mean probability of each regime, of queries and of keys."""
    routers = [layer.query for layer in layers] + [layer.key for layer in layers]
    means = [router.probabilities.flatten(0, -2).mean(dim=0) for router in routers]
    return torch.stack(means).unflatten(0, (2, len(layers)))


@dataclass(frozen=True)
class WorthFieldOutput:
    """The worth of each pair and its logarithm, [B, T, S] (with groups [B, Gr, T, S])."""

    worth: Tensor
    bias: Tensor


@dataclass(frozen=True)
class HardDomain:
    """The support Omega that top-1 labels induce, known before any q·k."""

    mask: Tensor | None
    """[B, T, S] (with groups [B, Gr, T, S]) bool, True inside; None if it was not materialized."""
    row_counts: Tensor
    """The number of pairs inside the support per batch row (and group), [B] or [B, Gr] int64."""
    row_causal_counts: Tensor
    """The number of pairs that exist: causal, valid, in one segment, inside the window."""

    @property
    def count(self) -> int:
        """|Omega|, over all rows."""
        return int(self.row_counts.sum())

    @property
    def causal_count(self) -> int:
        """|causal|, over all rows."""
        return int(self.row_causal_counts.sum())

    @property
    def density(self) -> float:
        """rho = |Omega| / |causal|; 0 if no pair exists."""
        return self.count / max(self.causal_count, 1)


@dataclass(frozen=True)
class ReferenceAttentionOutput:
    """The output of the reference and all of its intermediate results."""

    output: Tensor
    """[B, H, T, D] in the dtype of the queries."""
    lse: Tensor
    """log-sum-exp of the logits, [B, H, T]; -inf for a row without keys."""
    attention: Tensor
    """Attention probabilities, [B, H, T, S]."""
    worth: Tensor
    """The worth of each pair, [B, Gr, T, S]."""
    bias: Tensor
    """log worth, before the mask, [B, Gr, T, S]."""
    query_routing: RouterOutput | None = None
    key_routing: RouterOutput | None = None
