"""Terms that the training loss may add: a price on reach, on pairs, or on discarded mass.

reach   1/2 E[pi_Q·c + pi_K·c],   c_m = min(delta_m / N, 1),   c_G = 1   (MoSAR-Cost)
pairs   E|Omega| / |causal|, if each token draws its regime from its own probabilities
mass    mean_i sum_j p_ij (1 - keep_ij),   keep_ij = sum_mn pi_Q pi_K [d <= delta_mn]

Shapes: B batch, H query heads, Gr routing groups, T queries, S keys, R regimes.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from mosar.core.bias import MixtureBias
from mosar.core.config import MoSARConfig, check_config
from mosar.core.inputs import check_attention_inputs, without_autocast
from mosar.core.layout import is_traced
from mosar.core.reference_attention import attend_routed
from mosar.core.regimes import support_reach

# How many numbers to compute at a time.
_CHUNK = 1 << 22


def warmed_up(weight: float, warmup: int, step: int | None) -> float:
    """lambda in update `step` >= 1: it grows linearly to `weight` at step `warmup`.

    step None: after the warm-up.
    """
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
    """The expected normalized reach of pi_q and pi_k [..., R], averaged over both: a scalar.

    `length` evaluates the same routing at another context length; reports show this figure as
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


def expected_density(
    pi_q: Tensor,
    pi_k: Tensor,
    config: MoSARConfig,
    segment_ids: Tensor | None = None,
    valid: Tensor | None = None,
    window: int | None = None,
) -> Tensor:
    """The expected share of the causal pairs in the support: a scalar, in O(T R^2).

    pi_q and pi_k [B, T, R] or [B, Gr, T, R] of the same tokens, at consecutive positions;
    segment_ids [B, T], each id one run; valid [B, T]: False for padding at either end; window: the
    largest distance of a pair. One-hot routing gives the exact density.
    """
    check_config(config)
    if pi_q.shape != pi_k.shape or pi_q.shape[-1] != config.num_regimes:
        raise ValueError(
            f"pi_q and pi_k must have one shape that ends in {config.num_regimes} regimes, "
            f"got {list(pi_q.shape)} and {list(pi_k.shape)}"
        )
    if is_traced() or not (torch.is_grad_enabled() and (pi_q.requires_grad or pi_k.requires_grad)):
        return _expected_density(pi_q, pi_k, config, segment_ids, valid, window)
    # The backward pass recomputes the R^2 numbers per token instead of storing them.
    given = (pi_q, pi_k, config, segment_ids, valid, window)
    return checkpoint(_expected_density, *given, use_reentrant=False, preserve_rng_state=False)  # pyright: ignore[reportReturnType]


def _expected_density(
    pi_q: Tensor,
    pi_k: Tensor,
    config: MoSARConfig,
    segment_ids: Tensor | None,
    valid: Tensor | None,
    window: int | None,
) -> Tensor:
    length, device = pi_q.shape[-2], pi_q.device
    # Sums over so many pairs need float32 at least, also under autocast.
    wide = torch.promote_types(pi_q.dtype, torch.float32)
    pi_q, pi_k = (pi.to(wide)[:, None] if pi.dim() == 3 else pi.to(wide) for pi in (pi_q, pi_k))
    at_BT = torch.arange(length, device=device).expand(len(pi_q), -1)
    start_BT, exists_BT = torch.zeros_like(at_BT), torch.ones_like(at_BT, dtype=torch.bool)
    if segment_ids is not None:
        begins_BT = F.pad(segment_ids[:, 1:] != segment_ids[:, :-1], (1, 0), value=True)
        start_BT = torch.where(begins_BT, at_BT, 0).cummax(dim=1).values
    if valid is not None:
        exists_BT = valid.expand(at_BT.shape)
    existing_BT = F.pad(exists_BT.long().cumsum(dim=1), (1, 0))
    # Existing keys of each token's own segment, up to the token itself.
    keys_BT = (existing_BT[:, 1:] - existing_BT.gather(1, start_BT)) * exists_BT
    is_routed_BT = exists_BT & (keys_BT > config.num_sinks)
    sinks_BT = keys_BT.clamp_max(config.num_sinks)
    if window is not None:
        nearest_BT = start_BT.maximum(at_BT - window)
        outside_BT = existing_BT.gather(1, nearest_BT) - existing_BT.gather(1, start_BT)
        keys_BT, sinks_BT = ((x - outside_BT).clamp_min(0) for x in (keys_BT, sinks_BT))
        start_BT = nearest_BT
    pi_q, pi_k = pi_q * exists_BT[:, None, :, None], pi_k * is_routed_BT[:, None, :, None]
    # The keys of regime n before each token; the keys in a window are the difference of two sums.
    before_BGTR = F.pad(pi_k.cumsum(dim=-2), (0, 0, 1, 0))
    reach_RR = support_reach(config, device).clamp_max(length).floor().long()
    first_BTRR = (at_BT[..., None, None] - reach_RR).maximum(start_BT[..., None, None])
    index = first_BTRR.flatten(-2)[:, None].expand(*pi_q.shape[:2], -1, -1)
    columns = before_BGTR.repeat(1, 1, 1, config.num_regimes)
    window_BGTRR = before_BGTR[..., 1:, None, :] - columns.gather(2, index).unflatten(
        -1, (config.num_regimes, -1)
    )
    groups = pi_q.shape[1]
    pairs = (pi_q[..., None] * window_BGTRR).sum() + groups * sinks_BT.sum()
    return pairs / (groups * keys_BT.sum()).clamp_min(1)


def expected_discarded_mass(
    q: Tensor,
    k: Tensor,
    bias: MixtureBias,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    queries: Tensor | None = None,
    **placement: Any,
) -> Tensor:
    """The share of soft attention outside the support, if each token draws its regime: a scalar.

    q [B, H, T, D] and k [B, K, S, D] as attention takes them. It is differentiable in q, k and both
    routings. queries [n] int64: the mean is over these; None: over all. `placement` is as in the
    operators. It is computed for some rows at a time, and again in the backward pass.
    """
    layout = check_attention_inputs(q, k, k, scale, softcap, **placement)
    if queries is None:
        queries = torch.arange(q.shape[2], device=q.device)
    width = max(q.shape[1], bias.groups * bias.config.num_regimes**2)
    rows = max(1, _CHUNK // (q.shape[0] * width * k.shape[2]))

    def mass_of(some: Tensor, q: Tensor, k: Tensor, pi_q: Tensor, pi_k: Tensor) -> Tensor:
        part, pi_q = layout.of_queries(some), pi_q.index_select(2, some)
        mixture = MixtureBias(pi_q, pi_k, bias.config)
        # The values do not matter here.
        result = attend_routed(
            *(q.index_select(2, some), k, k[..., :1].detach()),
            part,
            mixture,
            scale=scale,
            softcap=softcap,
        )
        inside = part.distances()[..., None, None] <= support_reach(bias.config, q.device)
        with without_autocast(q):
            dtype = result.attention.dtype
            keep_BGTS = torch.einsum(
                "bgtm,btsmn,bgsn->bgts",
                pi_q.to(dtype),
                inside.to(dtype).expand(len(q), *[-1] * 4),
                pi_k.to(dtype),
            )
            if bias.config.num_sinks:
                sinks_BGTS = part.sinks(bias.config.num_sinks)[:, None, None, :]
                keep_BGTS = keep_BGTS.masked_fill(sinks_BGTS, 1.0)
            of_group = result.attention.unflatten(1, (bias.groups, -1))
            return (of_group * (1 - keep_BGTS[:, :, None])).sum()

    masses = [
        checkpoint(mass_of, some, q, k, bias.query, bias.key, use_reentrant=False)
        for some in queries.split(rows)
    ]
    return torch.stack(masses).sum() / (q.shape[0] * q.shape[1] * max(len(queries), 1))  # pyright: ignore[reportArgumentType, reportCallIssue]
