"""What a text's routing comes to: who is global, what is read, what the cache keeps.

    alive(t) = #{j <= t : t - j <= max_m delta_mn, n the regime of key j}     sinks never leave

Shapes: L layers, Gr routing groups, T tokens, R regimes, C classes of keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mosar.core.config import MoSARConfig
from mosar.core.hard_domain import class_reach
from mosar.microscope.attention import LayerView

ROLES = ("query", "key")
_LISTED = 12
_POINTS = 400


@dataclass(frozen=True)
class Chooser:
    """A piece of text or a position, and what it chose over all layers and groups."""

    piece: str
    position: int
    """The token itself, or the first one with this piece."""
    count: int
    """Tokens with this piece; 1 for a position."""
    far: float
    """The share of its choices that are the global regime."""
    reach: float
    """The mean of min(reach / T, 1) over its choices."""


@dataclass(frozen=True)
class Ranking:
    """The most global and the most local pieces and positions of one role.

    The lists of far ones hold none that never chose the global regime.
    """

    far_pieces: list[Chooser]
    near_pieces: list[Chooser]
    far_positions: list[Chooser]
    near_positions: list[Chooser]


def rank_choosers(labels: Tensor, pieces: Sequence[str], config: MoSARConfig) -> dict[str, Ranking]:
    """The rankings of labels [L, 2, Gr, T], by role."""
    length = len(pieces)
    costs = [min(regime.reach / length, 1.0) for regime in config.regimes[:-1]]
    reach_R = torch.tensor([*costs, 1.0], dtype=torch.float64)
    rankings = {}
    for index, role in enumerate(ROLES):
        chosen = labels[:, index].flatten(0, 1).long()
        far_T = (chosen == config.global_index).double().mean(dim=0)
        reach_T = reach_R[chosen].mean(dim=0)
        positions = [
            Chooser(piece, place, 1, far, reach)
            for place, (piece, far, reach) in enumerate(
                zip(pieces, far_T.tolist(), reach_T.tolist(), strict=True)
            )
        ]
        by_piece: dict[str, list[Chooser]] = {}
        for chooser in positions:
            by_piece.setdefault(chooser.piece, []).append(chooser)
        least = fewest_occurrences(length)
        means = [_mean(found) for found in by_piece.values() if len(found) >= least]
        rankings[role] = Ranking(
            *_ends([chooser for chooser in means if chooser.piece]), *_ends(positions)
        )
    return rankings


def fewest_occurrences(length: int) -> int:
    """In a longer text, a piece that occurs once or twice says little and is not ranked."""
    return 1 if length < 200 else 3


def _mean(found: list[Chooser]) -> Chooser:
    first, count = found[0], len(found)
    far, reach = (sum(getattr(c, name) for c in found) / count for name in ("far", "reach"))
    return Chooser(first.piece, first.position, count, far, reach)


def _ends(choosers: list[Chooser]) -> tuple[list[Chooser], list[Chooser]]:
    far = sorted(
        (chooser for chooser in choosers if chooser.far),
        key=lambda c: (-c.far, -c.reach, -c.count, c.position),
    )
    near = sorted(choosers, key=lambda c: (c.reach, c.far, -c.count, c.position))
    return far[:_LISTED], near[:_LISTED]


@dataclass(frozen=True)
class Savings:
    """What the support and the cache hold, beside dense attention."""

    places: list[int]
    """Positions of the two curves, each counted from 1."""
    reads: list[float]
    """Keys that a query there may read, mean over layers and groups."""
    alive: list[float]
    """Keys in the cache after that token, mean over layers and groups."""
    layer_reads: list[float]
    """By layer: pairs of the support over pairs that exist."""
    layer_alive: list[float]
    """By layer: keys in the cache at the end over those of a dense cache."""
    layer_outside: list[float]
    """By layer: the mean share of attention outside of the support."""


def sum_savings(views: Sequence[LayerView], config: MoSARConfig) -> Savings:
    length = views[0].reads.shape[-1]
    causal_T = torch.arange(1, length + 1, dtype=torch.float64)
    reads_LT = torch.stack([view.reads.double().mean(dim=0) for view in views])
    exist_LT = torch.stack(
        [causal_T if v.window is None else causal_T.clamp_max(v.window + 1) for v in views]
    )
    alive_LT = torch.stack([count_alive(view, config).double().mean(dim=0) for view in views])
    places = torch.linspace(0, length - 1, min(length, _POINTS)).round().long()
    return Savings(
        places=(places + 1).tolist(),
        reads=reads_LT.mean(dim=0)[places].tolist(),
        alive=alive_LT.mean(dim=0)[places].tolist(),
        layer_reads=(reads_LT.sum(dim=1) / exist_LT.sum(dim=1)).tolist(),
        layer_alive=(alive_LT[:, -1] / length).tolist(),
        layer_outside=[float(view.outside.double().mean()) for view in views],
    )


def count_alive(view: LayerView, config: MoSARConfig) -> Tensor:
    """Keys that the cache holds after each token, [Gr, T] int64."""
    labels_k = view.labels[1].long()
    length = labels_k.shape[-1]
    positions = torch.arange(length)
    limit = length if view.window is None else view.window
    reach_C = class_reach(config).amax(dim=0).clamp_max(limit).floor().long()
    classes = labels_k.masked_fill(positions < config.num_sinks, config.num_regimes)
    gone = (positions + reach_C[classes] + 1).clamp_max(length)
    steps = torch.zeros(labels_k.shape[0], length + 1, dtype=torch.int64)
    steps[:, :length] += 1
    steps.scatter_add_(1, gone, torch.full_like(gone, -1))
    return steps[:, :length].cumsum(dim=1)
