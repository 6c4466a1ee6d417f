"""Gates as tables by distance, and the routing that mixes them.

Tables depend only on the configuration, so they are made once and cached. Gates are constant beyond
the longest reach, so a table ends there, and farther distances read its last entry. If the longest
reach is very long, there is no table, and the kernels compute each gate.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import cache, lru_cache, wraps
from typing import ParamSpec

import torch
from torch import Tensor

from mosar.core.config import MoSARConfig
from mosar.core.layout import Layout, is_traced
from mosar.core.regimes import gate_extent, pair_gates, pair_geometry

P = ParamSpec("P")


def cached_table(make: Callable[P, Tensor]) -> Callable[P, Tensor]:
    """Caches the result of `make` for each set of arguments; torch.compile calls `make` again.

    A cache cannot be traced, and two tables of one function collide as constants of a graph, e.g.
    for layers with different windows. `make` takes microseconds.
    """

    @lru_cache(maxsize=64)
    def cached(*args: Hashable, **kwargs: Hashable) -> Tensor:
        # The first call may be an evaluation, and a later one may train with the same tensor.
        with torch.inference_mode(False), torch.device("cpu"):
            return make(*args, **kwargs)  # pyright: ignore[reportCallIssue]

    @wraps(make)
    def table(*args: P.args, **kwargs: P.kwargs) -> Tensor:
        if is_traced():
            return make(*args, **kwargs)
        return cached(*args, **kwargs)

    return table


# These are never freed, because a captured graph of launches may still read one.
@cache
def _kept_on(device: torch.device, make: Callable[..., Tensor], *arguments: Hashable) -> Tensor:
    with torch.inference_mode(False):
        return make(*arguments).to(device)


def on_device(device: torch.device, make: Callable[..., Tensor], *arguments: Hashable) -> Tensor:
    """A cached table on a device, copied there only once, because a copy waits for the device.

    In a graph of torch.compile it is created on the device; the device is the last argument of
    `make`.
    """
    if is_traced():
        return make(*arguments, device=device)
    return _kept_on(device, make, *arguments)


# If a table would be longer than this, the kernels compute the gates instead.
_LONGEST_TABLE = 1 << 16


def has_table(config: MoSARConfig) -> bool:
    """Whether the gates of a configuration are in a table; if not, each pair computes its own.

    The kernels can compute only gates whose floor is e^-B.
    """
    return gate_extent(config) <= _LONGEST_TABLE or config.floor != 1


@cached_table
def gate_table(
    config: MoSARConfig, dtype: torch.dtype = torch.float32, device: torch.device | None = None
) -> Tensor:
    """Gates by distance, [R, C, length], with ones for sinks; constant past the end."""
    distances = torch.arange(gate_extent(config), device=device)
    gate_RCd = pair_gates(distances, pair_geometry(config, device), config, dtype).permute(1, 2, 0)
    if config.num_sinks:
        ones = gate_RCd.new_ones(config.num_regimes, 1, gate_RCd.shape[2])
        gate_RCd = torch.cat([gate_RCd, ones], dim=1)
    return gate_RCd.contiguous()


def routing_with_sinks(
    pi_q: Tensor, pi_k: Tensor, config: MoSARConfig, layout: Layout
) -> tuple[Tensor, Tensor]:
    """The routing that mixes `gate_table`: [B, Gr, T, R] and [B, Gr, S, C], float32.

    Sinks have all of their weight in their own column.
    """
    pi_q, pi_k = pi_q.float(), pi_k.float()
    if config.num_sinks:
        sinks = layout.sinks(config.num_sinks)[:, None, :, None].expand(*pi_k.shape[:-1], 1)
        pi_k = torch.cat([pi_k.masked_fill(sinks, 0), sinks.to(pi_k.dtype)], dim=-1)
    return pi_q.contiguous(), pi_k.contiguous()
