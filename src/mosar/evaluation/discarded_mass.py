"""The discarded mass: the share of a row's attention that `top1` has outside of the support.

    mass = 1 - sum_{j in Omega} p_j = 1 - exp(lse_sparse - lse_top1);  |p_sparse - p_top1| = 2 mass

Both log-sum-exps are of the same queries and keys, those of a pass with top-1 routing; no n x n
tensor is made. The mean and the worst row are exact; the 95th percentile is read from a histogram.

Shapes: B windows, H heads, T queries.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from mosar.attention import Routing, attend
from mosar.geometries import Attended, LayerRouting, MoSAR

# Smaller masses count as _LEAST; each bin is 0.1 % wider than the one before.
_LEAST, _BINS = 1e-9, 20_000


def discarded_mass(
    geometry: MoSAR, q: Tensor, k: Tensor, v: Tensor, routed: LayerRouting, options: dict[str, Any]
) -> Tensor:
    """The mass of each row, [B, H, T] float64, from the arguments of one layer's `attend`."""
    top1, sparse = (
        attend(q, k, v, routed.bias(geometry.config, routing), return_lse=True, **options)[1]
        for routing in ("top1", "sparse")
    )
    return -torch.expm1((sparse.double() - top1.double()).clamp_max(0.0))


class MassTally:
    """Sums over the rows (windows, heads, queries) of one layer."""

    def __init__(self) -> None:
        self._rows, self._sum, self._worst = 0, 0.0, 0.0
        self._histogram = torch.zeros(_BINS, dtype=torch.int64)

    def add(self, mass: Tensor) -> None:
        mass = mass.flatten().cpu()
        self._rows += mass.numel()
        self._sum += float(mass.sum())
        self._worst = max(self._worst, float(mass.max()))
        depth = mass.clamp(_LEAST, 1.0).log_() / torch.tensor(_LEAST).double().log()
        bins = (depth * _BINS).long().clamp_(0, _BINS - 1)
        self._histogram += torch.bincount(bins, minlength=_BINS)

    def percentile(self, share: float) -> float:
        """The upper end of the bin where `share` of the rows lie below or in it."""
        # Bin 0 holds the largest masses.
        above = self._histogram.cumsum(0)
        index = int(torch.searchsorted(above, int(self._rows * (1 - share)), right=True))
        return min(_LEAST ** (index / _BINS), self._worst)

    def summary(self) -> dict[str, float]:
        """Zeros without a row: a model whose gates have no floor has no mass outside."""
        if not self._rows:
            return dict.fromkeys(("mean", "p95", "worst"), 0.0)
        return {
            "mean": self._sum / self._rows,
            "p95": self.percentile(0.95),
            "worst": self._worst,
        }


# Called with a layer's geometry, its q [B, H, T, D], k, v [B, K, S, D] after their positions, what
# its routers chose, and the operators' options.
Watcher = Callable[[MoSAR, Tensor, Tensor, Tensor, LayerRouting, dict[str, Any]], None]


@contextmanager
def watching(geometries: list[MoSAR], tallies: list[MassTally]) -> Iterator[None]:
    """While it lasts, what the geometries attend to is measured; what they return is the same."""
    tally_of = dict(zip(geometries, tallies, strict=True))

    def measure(geometry: MoSAR, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> None:
        tally_of[geometry].add(discarded_mass(geometry, q, k, v, *rest))

    with watching_attention(geometries, measure):
        yield


@contextmanager
def watching_attention(geometries: Sequence[MoSAR], watcher: Watcher) -> Iterator[None]:
    """While it lasts, `watcher` is called after each layer has attended."""
    with ExitStack() as stack:
        for geometry in geometries:
            stack.enter_context(_watching_one(geometry, watcher))
        yield


@contextmanager
def _watching_one(geometry: MoSAR, watcher: Watcher) -> Iterator[None]:
    attend_layer = geometry.attend

    def watched(q: Tensor, k: Tensor, v: Tensor, *, routing: Routing, **options: Any) -> Attended:
        out, routed = attend_layer(q, k, v, routing=routing, **options)
        assert isinstance(routed, LayerRouting)
        options.pop("hidden", None)
        watcher(geometry, q, k, v, routed, options)
        return out, routed

    # On the instance alone: the class and every other model stay as they are.
    geometry.attend = watched
    try:
        yield
    finally:
        del geometry.attend
