"""What routers of a frozen layer are trained for: an output that stays, from few pairs.

Labels are drawn from the routers' probabilities, each token on its own. A pair at distance d is
then read with probability keep_ij = sum_mn pi_Q[i, m] pi_K[j, n] [d <= delta_mn]; sinks always are.
With the layer's own attention p and values v

    o_i  = sum_j p_ij v_j                                   what the layer computes
    o'_i = sum_j keep_ij p_ij v_j / sum_j keep_ij p_ij      what it computes from what is read
    error_i = |add(o'_i) - add(o_i)|^2 / |x + add(o)|^2     against the residual stream after it

where add is the layer's output projection (and norm, where it has one) over all heads together. At
a vertex, where every choice is certain, o' is exactly what sparse routing gives on these q, k, v,
and sum_j keep_ij the pairs it reads. No gradient goes through the rest of the model.

keep depends on d only through the band between two successive reaches that it lies in, so that
the number of pairs is a difference of prefix sums per band.

Shapes: G routing groups, Q chosen queries, S keys, R regimes, H query heads, K key/value heads.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mosar.core.config import MoSARConfig
from mosar.core.regimes import support_reach
from mosar.core.routers import top1_routing
from mosar.integrations.retrofit.layer import RoutedLayer


@dataclass(frozen=True)
class Band:
    """Distances beyond `above` up to `upto`, and which regime pairs reach them."""

    above: int
    upto: int
    admits_RR: Tensor


# Farther than any token, and small enough for int64 arithmetic.
_FAR = 1 << 40


@lru_cache(maxsize=32)
def distance_bands(config: MoSARConfig) -> tuple[Band, ...]:
    """The bands between successive reaches, nearest first; the last one has no end."""
    reach_RR = support_reach(config)
    ends = sorted({math.floor(x) for x in reach_RR.flatten().tolist() if math.isfinite(x)})
    bands, above = [], -1
    for upto in (*ends, _FAR):
        admits_RR = reach_RR >= upto if upto < _FAR else reach_RR == math.inf
        bands.append(Band(above, upto, admits_RR.float()))
        above = upto
    return tuple(bands)


class Scoring(NamedTuple):
    """How a layer weighs q·k: by default divided by sqrt(D), without a cap, over all keys."""

    scale: float | None = None
    softcap: float | None = None
    window: int | None = None


PLAIN = Scoring()


def head_attention(q: Tensor, k: Tensor, queries: Tensor, scoring: Scoring = PLAIN) -> Tensor:
    """Attention of the queries at positions `queries` [Q] over all keys, [H, Q, S].

    q [H, T, D] and k [K, T, D] are those of one row without padding.
    """
    scale, softcap, window = scoring
    heads, _, dim = q.shape
    kv_heads, length = k.shape[:2]
    chosen = q[:, queries].float().reshape(kv_heads, -1, dim)
    score = torch.bmm(chosen, k.float().transpose(1, 2)) * (dim**-0.5 if scale is None else scale)
    if softcap is not None:
        score = torch.tanh(score / softcap) * softcap
    score = score.view(heads, len(queries), length)
    distance_QS = queries[:, None] - torch.arange(length, device=k.device)
    hidden_QS = distance_QS < 0
    if window is not None:
        hidden_QS |= distance_QS > window
    return torch.softmax(score.masked_fill_(hidden_QS, -torch.inf), dim=-1)


def read_probability(
    pi_q: Tensor, pi_k: Tensor, queries: Tensor, config: MoSARConfig, *, window: int | None = None
) -> Tensor:
    """keep [G, Q, S] of pi_q [G, Q, R] at positions `queries` [Q], and pi_k [G, S, R]."""
    keys = torch.arange(pi_k.shape[1], device=pi_k.device)
    distance_QS = queries[:, None] - keys
    exists_QS = distance_QS >= 0
    if window is not None:
        exists_QS &= distance_QS <= window
    keep = torch.zeros((), device=pi_k.device)
    for band in distance_bands(config):
        inside_QS = (distance_QS > band.above) & (distance_QS <= band.upto) & exists_QS
        admitted = (pi_q @ band.admits_RR.to(pi_q)) @ pi_k.transpose(1, 2)
        keep = keep + inside_QS * admitted
    return torch.where(keys < config.num_sinks, exists_QS.to(pi_q.dtype), keep)


def kept_output(attention: Tensor, keep: Tensor, v: Tensor) -> Tensor:
    """o' [Q, H * D] of attention [H, Q, S], keep [G, Q, S] and v [K, S, D]."""
    heads, queries, length = attention.shape
    kv_heads = v.shape[0]
    read = attention * keep.repeat_interleave(heads // keep.shape[0], dim=0)
    out = torch.bmm(read.view(kv_heads, -1, length), v.float()).view(heads, queries, -1)
    out = out / read.sum(dim=-1, keepdim=True).clamp_min(1e-6)
    return out.transpose(0, 1).reshape(queries, -1)


def expected_pairs(
    pi_q: Tensor, pi_k: Tensor, queries: Tensor, config: MoSARConfig, *, window: int | None = None
) -> Tensor:
    """The keys that each query reads, [G, Q]: the sum of `read_probability`, without n x n."""
    keys = torch.arange(pi_k.shape[1], device=pi_k.device)
    sinks = config.num_sinks
    # Sinks are counted apart: they are read whatever anybody chooses.
    pi_k = pi_k.masked_fill((keys < sinks)[:, None], 0.0)
    before = F.pad(pi_k.cumsum(dim=1), (0, 0, 1, 0))
    first = torch.zeros_like(queries) if window is None else (queries - window).clamp_min(0)
    sinks_seen = ((queries + 1).clamp_max(sinks) - first).clamp_min(0)
    pairs = sinks_seen.to(pi_q.dtype).expand(pi_q.shape[:2])
    for band in distance_bands(config):
        upto = band.upto if window is None else min(band.upto, window)
        if upto <= band.above:
            continue
        start, stop = (queries - upto).clamp_min(0), (queries - band.above).clamp_min(0)
        admits = pi_q @ band.admits_RR.to(pi_q)
        pairs = pairs + (admits * (before[:, stop] - before[:, start])).sum(dim=-1)
    return pairs


def causal_pairs(queries: Tensor, window: int | None = None) -> Tensor:
    """Keys that each query may read at all, [Q]."""
    whole = queries + 1
    return whole if window is None else whole.clamp_max(window + 1)


def read_attention(
    attention: Tensor, logits_q: Tensor, logits_k: Tensor, queries: Tensor, layer: RoutedLayer
) -> Tensor:
    """The share of attention [H, Q, S] that the top-1 choices of a layer read, [G, Q].

    logits_q [G, Q, R], logits_k [G, S, R].
    """
    pi_q, pi_k = top1_routing(logits_q), top1_routing(logits_k)
    keep = read_probability(pi_q, pi_k, queries, layer.config, window=layer.window)
    of_group = attention.view(layer.config.routing_groups, -1, *attention.shape[1:]).mean(dim=1)
    return (of_group * keep).sum(dim=-1)


def spread_queries(number: int, keys: Tensor) -> Tensor:
    """At most `number` positions, evenly spread over those of keys [..., S, D]."""
    length = keys.shape[-2]
    number = min(number, length)
    return torch.arange(1, number + 1, device=keys.device) * length // number - 1


def by_group(routing: Tensor) -> Tensor:
    """[1, G, T, R] or, of a single group, [1, T, R] -> [G, T, R]."""
    return routing[0] if routing.dim() == 4 else routing
