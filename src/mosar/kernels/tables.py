"""Small tensors that depend on a configuration alone, made once per configuration and kept."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from functools import lru_cache, wraps
from typing import ParamSpec

import torch
from torch import Tensor

from mosar.core.config import MoSARConfig
from mosar.core.regimes import RegimeKernel

P = ParamSpec("P")


def kept_table(make: Callable[P, Tensor]) -> Callable[P, Tensor]:
    """Keeps what `make` returns, one per arguments; torch.compile makes it anew in its graph.

    (As constants of a graph two tables of one function collide, e.g. of layers whose windows
    differ, and a cache cannot be traced; `make` takes microseconds.)
    """

    @lru_cache(maxsize=64)
    def cached(*args: Hashable) -> Tensor:
        # The first call may be an evaluation, a later one trains with the same tensor.
        with torch.inference_mode(False), torch.device("cpu"):
            return make(*args)  # pyright: ignore[reportCallIssue]

    @wraps(make)
    def table(*args: P.args, **kwargs: P.kwargs) -> Tensor:
        if torch.compiler.is_compiling():
            return make(*args, **kwargs)
        return cached(*args, **kwargs)

    return table


@kept_table
def gate_table(config: MoSARConfig, dtype: torch.dtype = torch.float32) -> Tensor:
    """Gates by distance, [R, C, length], a column of ones for sinks; constant past its end."""
    # No pair but the global one, whose gate is 1 everywhere, reaches farther than this.
    *_, second, last = (regime.reach for regime in config.regimes)
    farthest = {"mean": (second + last) / 2, "min": second, "max": last}[config.composition]
    distances = torch.arange(math.floor(farthest) + 3)
    gate_RCd = RegimeKernel(config)(distances, dtype).permute(1, 2, 0)
    if config.num_sinks:
        ones = gate_RCd.new_ones(config.num_regimes, 1, len(distances))
        gate_RCd = torch.cat([gate_RCd, ones], dim=1)
    return gate_RCd.contiguous()
