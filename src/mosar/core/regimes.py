"""The geometry of regime pairs: how the gate g_mn(d) falls with distance d.

    delta_mn = (delta_m + delta_n)/2      alpha_mn = (alpha_m + alpha_n)/2
    T_mn = alpha_mn delta_mn              L_mn = (1 - alpha_mn) delta_mn
    g_mn(d) = exp(-B clamp((d - T_mn)/L_mn, 0, 1)^p);  a step at T_mn if L_mn = 0;  g_GG = 1
    beyond the reach, d > delta_mn, times `floor` (1 in the paper)

Shapes: R regimes; tables are [query regime, key regime].
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from mosar.core.config import MoSARConfig, check_config


class PairGeometry(NamedTuple):
    """Reach delta, plateau T and transition L of each regime pair, [R, R] in float64."""

    reach: Tensor
    plateau: Tensor
    transition: Tensor


def pair_geometry(config: MoSARConfig, device: torch.device | None = None) -> PairGeometry:
    """The geometry of every (query regime, key regime) pair; T + L is the reach."""
    check_config(config)
    delta_R = _filled([regime.reach for regime in config.regimes], device)
    alpha_R = _filled([regime.plateau for regime in config.regimes], device)
    row, column = delta_R[:, None], delta_R[None, :]
    reach_RR = {
        "mean": (row + column) / 2,
        "min": torch.minimum(row, column),
        "max": torch.maximum(row, column),
    }[config.composition]
    alpha_RR = (alpha_R[:, None] + alpha_R[None, :]) / 2
    return PairGeometry(reach_RR, alpha_RR * reach_RR, (1 - alpha_RR) * reach_RR)


def _filled(numbers: list[float], device: torch.device | None) -> Tensor:
    """Numbers created on the device; a copy from the host would have to wait for the device."""
    return torch.stack([torch.full((), x, dtype=torch.float64, device=device) for x in numbers])


def gate_extent(config: MoSARConfig) -> int:
    """The distance beyond which no gate changes; a plain number, as torch.compile needs."""
    check_config(config)
    *_, second, last = (regime.reach for regime in config.regimes)
    # The gate of the global pair never falls.
    farthest = {"mean": (second + last) / 2, "min": second, "max": last}[config.composition]
    return math.floor(farthest) + 2


def support_reach(config: MoSARConfig, device: torch.device | None = None) -> Tensor:
    """The largest distance inside the support, [R, R] float64: the reach, infinite for GG."""
    reach_RR = pair_geometry(config, device).reach
    reach_RR[-1, -1] = torch.inf
    return reach_RR


class RegimeKernel(nn.Module):
    """G(d): the gates of all regime pairs, [..., R, R], for distances of any shape."""

    reach_RR: Tensor
    plateau_RR: Tensor
    transition_RR: Tensor

    def __init__(self, config: MoSARConfig):
        super().__init__()
        self.config = config
        for name, table in pair_geometry(config)._asdict().items():
            # These are not buffers, because `module.to(bfloat16)` must not round the geometry.
            setattr(self, f"{name}_RR", table)

    def forward(self, distances: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Gates in `dtype`, by default that of float distances, else float32; d < 0 counts as 0."""
        if not isinstance(distances, Tensor):
            raise ValueError(f"distances must be a tensor, got {type(distances).__name__}")
        if dtype is None:
            dtype = distances.dtype if distances.is_floating_point() else torch.float32
        tables = (self.reach_RR, self.plateau_RR, self.transition_RR)
        pairs = PairGeometry(*(table.to(distances.device) for table in tables))
        return pair_gates(distances, pairs, self.config, dtype)


def pair_gates(
    distances: Tensor, pairs: PairGeometry, config: MoSARConfig, dtype: torch.dtype
) -> Tensor:
    """g_mn(d) of distances of any shape, [..., R, R], evaluated in float64 and rounded once."""
    excess = distances[..., None, None]
    gate = log_gate(excess, *pairs, config).exp()
    gate[..., -1, -1] = 1.0
    return gate.to(dtype)


def log_gate(
    distances: Tensor, reach: Tensor, plateau: Tensor, transition: Tensor, config: MoSARConfig
) -> Tensor:
    """log g of all pairs but the global one, in float64; the first four arguments broadcast."""
    distances = distances.double().clamp_min(0)
    excess = distances - plateau
    step = transition == 0
    progress = torch.where(step, (excess > 0).double(), excess / transition.clamp_min(1e-300))
    result = -config.barrier * progress.clamp(0, 1) ** config.exponent
    if config.floor == 1:
        return result
    factor = math.log(config.floor) if config.floor else -math.inf
    return torch.where(distances > reach, result + factor, result)
