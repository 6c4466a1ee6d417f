"""A bias: what attention adds to the scores, and which pairs it leaves out.

    LabelBias     the gate of each pair's two labels; beyond the reach the floor, or no pair at all;
                  and one number per key, where its geometry has one
    MixtureBias   log(pi_Q^T G(d) pi_K)
    DistanceBias  log_gate[h, d] - slopes[h] d + key[h, j]

Every implementation has one function, `attend(q, k, v, layout, bias, scores)`, which returns output
and log-sum-exp. Routing groups are always an axis here.

Shapes: B batch, Gr routing groups, T queries, S keys, R regimes, H query heads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mosar.core.config import MoSARConfig

Change = Callable[[Tensor, Tensor], tuple[Tensor, ...]]
"""New tensors for those of queries and of keys."""


class Scores(NamedTuple):
    """How q·k becomes a score s: the factor of q·k, and the c in c tanh(s/c)."""

    scale: float
    softcap: float | None


@dataclass(frozen=True)
class MixtureBias:
    """Soft routing: the mixture of all gates."""

    query: Tensor
    """[B, Gr, T, R] probabilities."""
    key: Tensor
    """[B, Gr, S, R]."""
    config: MoSARConfig

    @property
    def groups(self) -> int:
        return self.query.shape[1]

    def through(self, change: Change) -> MixtureBias:
        """The same with its probabilities, which gradients reach, passed through `change`."""
        query, key = change(self.query, self.key)
        return replace(self, query=query, key=key)

    def of_groups(self, groups: list[int]) -> MixtureBias:
        """That of some groups."""
        return replace(self, query=self.query[:, groups], key=self.key[:, groups])


@dataclass(frozen=True)
class RoutingToLearn:
    """Probabilities that get the gradient of hard routing (`mosar.core.choice_gradient`)."""

    query: Tensor
    """[B, Gr, T, R], from which the labels were chosen."""
    key: Tensor
    """[B, Gr, S, R]."""
    queries: Tensor | None = None
    """[n] int64: the gradient is estimated from these queries; None: from all."""


@dataclass(frozen=True)
class LabelBias:
    """One regime per token: top-1 routing, or sparse routing, where pairs end at the reach."""

    query: Tensor
    """[B, Gr, T] labels."""
    key: Tensor
    """[B, Gr, S]."""
    config: MoSARConfig
    ends_at_reach: bool
    learned: RoutingToLearn | None = None
    """None: the labels are constants, and no gradient reaches a routing."""
    of_key: Tensor | None = None
    """[B, H, S], added to every pair of a key; only where `ends_at_reach`. Float64 where it grows
    along the text: only its differences within a row matter."""

    @property
    def groups(self) -> int:
        return self.query.shape[1]

    def learning(self, query: Tensor, key: Tensor, queries: Tensor | None = None) -> LabelBias:
        """The same, with a gradient for the probabilities [B, T, R] or [B, Gr, T, R] of its labels.

        queries: see `RoutingToLearn`.
        """
        if query.dim() == 3:
            query, key = query[:, None], key[:, None]
        return replace(self, learned=RoutingToLearn(query, key, queries))

    def through(self, change: Change) -> LabelBias:
        """The same with the probabilities that learn, if any, passed through `change`."""
        if self.learned is None:
            return self
        query, key = change(self.learned.query, self.learned.key)
        return replace(self, learned=replace(self.learned, query=query, key=key))

    def of_groups(self, groups: list[int]) -> LabelBias:
        """That of some groups."""
        some = replace(self, query=self.query[:, groups], key=self.key[:, groups])
        return some.through(lambda query, key: (query[:, groups], key[:, groups]))

    def mixture(self, dtype: torch.dtype) -> MixtureBias:
        """The same gates as a one-hot mixture, which does not end at the reach."""
        query, key = (
            F.one_hot(labels, self.config.num_regimes).to(dtype)
            for labels in (self.query, self.key)
        )
        return MixtureBias(query, key, self.config)


@dataclass(frozen=True)
class DistanceBias:
    """A bias by distance, the same for every token, and one number per key; all None: no bias."""

    log_gate: Tensor | None = None
    """[1 or H, length]; the last entry applies to all farther distances."""
    slopes: Tensor | None = None
    """[H]."""
    key: Tensor | None = None
    """[B, H, S]."""


Bias = LabelBias | MixtureBias | DistanceBias


def routed_bias(
    query: Tensor, key: Tensor, config: MoSARConfig, routing: str
) -> LabelBias | MixtureBias:
    """The bias of probabilities; "top1" and "sparse" take their largest entry as the label.

    query [B, T, R] or [B, Gr, T, R], and key in the same way. For "top1" and "sparse" they may be
    logits.
    """
    if query.dim() == 3:
        query, key = query[:, None], key[:, None]
    if routing == "soft":
        return MixtureBias(query, key, config)
    # argmax takes the first of equal entries. A label is a constant without gradient.
    labels_q, labels_k = (x.detach().argmax(dim=-1) for x in (query, key))
    return LabelBias(labels_q, labels_k, config, ends_at_reach(routing, config))


def ends_at_reach(routing: str, config: MoSARConfig) -> bool:
    """Whether top-1 or sparse routing leaves out the pairs beyond the reach."""
    return routing == "sparse" or config.floor == 0
