"""The price of reach: what MoSAR-Cost adds to the language-modelling loss.

L_cost = 1/2 E[pi_Q·c + pi_K·c],   c_m = min(delta_m / N, 1),   c_G = 1
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mosar.core.config import MoSARConfig, check_config


def warmed_up(weight: float, warmup: int, step: int | None) -> float:
    """lambda in update `step` >= 1: linear up to `weight` at step `warmup`; None: it is over."""
    return weight if step is None or step >= warmup else weight * step / warmup


def normalized_reach(config: MoSARConfig, length: int | None = None) -> Tensor:
    """c: each regime's reach as a fraction of `length` (default N), at most 1; [R] float64."""
    check_config(config)
    length = config.max_length if length is None else length
    if not isinstance(length, (int, float)) or not 1 <= length < math.inf:
        raise ValueError(f"length must be a number >= 1, got {length!r}")
    cost_R = torch.tensor([regime.reach / length for regime in config.regimes], dtype=torch.float64)
    cost_R = cost_R.clamp_max(1.0)
    cost_R[-1] = 1.0
    return cost_R


def normalized_reach_cost(
    pi_q: Tensor, pi_k: Tensor, config: MoSARConfig, length: int | None = None
) -> Tensor:
    """Expected normalized reach of pi_q and pi_k [..., R], both roles averaged: a scalar.

    `length` evaluates the same routing at another context length; this is the figure reported as
    normalized reach. It is not the support density, which counts pairs (`build_hard_domain`).
    """
    check_config(config)
    for name, pi in (("pi_q", pi_q), ("pi_k", pi_k)):
        if pi.shape[-1:] != (config.num_regimes,):
            raise ValueError(
                f"{name} must end in {config.num_regimes} regimes, got shape {list(pi.shape)}"
            )
        if not pi.numel():
            raise ValueError(f"{name} must hold at least one token, got shape {list(pi.shape)}")
    cost_R = normalized_reach(config, length)

    def expected(pi: Tensor) -> Tensor:
        dtype = torch.promote_types(pi.dtype, torch.float32)
        return (pi.to(dtype) * cost_R.to(pi.device, dtype)).sum(dim=-1).mean()

    return (expected(pi_q) + expected(pi_k)) / 2
