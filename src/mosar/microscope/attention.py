"""What a layer's queries attend to, kept sparsely: the largest shares, inside and outside of Omega.

    p_i = softmax_j(cap(scale q_i·k_j) + bias_ij)     over every key that exists for query i
    outside_i = sum of p_ij over j that are not in the support of i

bias is the log gate of the pair's labels, with its floor beyond the reach (top-1 routing), and what
forget gates add. A retrofitted layer has none: there p is what the base model attends to. Rows are
computed for a chunk of queries at a time, so that memory grows with the length and not with its
square.

Shapes: H query heads, K key/value heads, Gr routing groups, T tokens, Q queries of a chunk, S keys,
R regimes, C classes of keys (R, or R + 1 with sinks), E entries that are kept.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mosar.core.config import MoSARConfig
from mosar.core.hard_domain import class_reach, key_classes
from mosar.core.layout import resolve_layout
from mosar.core.regimes import log_gate, pair_geometry

INSIDE, OUTSIDE = 16, 4
"""How many of the largest shares are kept per query on either side of the support."""
# Scores of a chunk of queries, all heads together: 32 MB in float32.
_CHUNK = 1 << 23


class Largest(NamedTuple):
    """The largest shares of each row, falling; 0 where there are fewer."""

    distance: Tensor
    """[Gr, T, E] int32, from the query back to the key."""
    share: Tensor
    """[Gr, T, E] float32, mean over the heads of the group."""


@dataclass(frozen=True)
class LayerView:
    """What one layer did with a text."""

    labels: Tensor
    """[2, Gr, T] uint8: of queries and of keys."""
    reads: Tensor
    """[Gr, T] int32: how many keys each query may read."""
    outside: Tensor
    """[Gr, T] float32: the share of its attention outside of the support."""
    inside_largest: Largest
    outside_largest: Largest
    window: int | None
    """The largest distance that exists in this layer; None: any."""


@torch.no_grad()
def view_layer(
    q: Tensor,
    k: Tensor,
    labels: tuple[Tensor, Tensor],
    config: MoSARConfig,
    *,
    gated: bool,
    scale: float | None,
    softcap: float | None,
    window: int | None = None,
    of_key: Tensor | None = None,
    **ignored: Any,
) -> LayerView:
    """One layer's view, from q [H, T, D] and k [K, T, D] after rotation, and labels [Gr, T].

    gated: whether pairs are weighed by their gate, as in top-1 routing. of_key [H, T]: what is
    added to every pair of a key.
    """
    heads, length = q.shape[0], q.shape[1]
    labels_q, labels_k = labels
    layout = resolve_layout(1, length, length, window=window, device=q.device)
    classes_GS = key_classes(labels_k[None], config, layout)[0]
    reach_RC = class_reach(config).to(q.device)
    gate_RCN = _log_gates(config, length, q.device) if gated else None
    parts = []
    step = max(1, _CHUNK // (heads * length))
    for start in range(0, length, step):
        stop = min(start + step, length)
        distance_QS = torch.arange(start, stop, device=q.device)[:, None] - torch.arange(
            stop, device=q.device
        )
        exists_QS = (distance_QS >= 0) & (distance_QS <= (length if window is None else window))
        query_GQ1, key_G1S = labels_q[:, start:stop, None], classes_GS[:, None, :stop]
        bias_GQS = None
        if gate_RCN is not None:
            bias_GQS = gate_RCN[query_GQ1, key_G1S, distance_QS.clamp_min(0)]
        of_key_HS = None
        if of_key is not None:
            # It grows along the text; what matters are differences from the newest key.
            of_key_HS = (of_key[:, :stop] - of_key[:, stop - 1 : stop]).float()
        share_GQS = _attention(
            *(q[:, start:stop], k[:, :stop], bias_GQS, of_key_HS, exists_QS),
            *(len(labels_q), scale, softcap),
        )
        inside_GQS = exists_QS & (distance_QS <= reach_RC[query_GQ1, key_G1S])
        read_GQS = share_GQS * inside_GQS
        left_GQS = share_GQS * ~inside_GQS
        parts.append(
            (
                inside_GQS.sum(dim=-1, dtype=torch.int32),
                left_GQS.sum(dim=-1),
                *_largest(read_GQS, start, INSIDE),
                *_largest(left_GQS, start, OUTSIDE),
            )
        )
    reads, outside, *entries = (torch.cat(part, dim=1).cpu() for part in zip(*parts, strict=True))
    return LayerView(
        labels=torch.stack([labels_q, labels_k]).to(torch.uint8).cpu(),
        reads=reads,
        outside=outside,
        inside_largest=Largest(*entries[:2]),
        outside_largest=Largest(*entries[2:]),
        window=window,
    )


def _log_gates(config: MoSARConfig, length: int, device: torch.device) -> Tensor:
    """log g of each (query regime, key class) at distances 0..length-1, [R, C, length]; sinks 0."""
    pairs = pair_geometry(config)
    distances = torch.arange(length)[:, None, None]
    gate_RRN = log_gate(distances, *pairs, config).permute(1, 2, 0)
    gate_RRN[-1, -1] = 0
    if config.num_sinks:
        gate_RRN = torch.cat([gate_RRN, torch.zeros_like(gate_RRN[:, :1])], dim=1)
    return gate_RRN.float().to(device)


def _attention(
    q: Tensor,
    k: Tensor,
    bias_GQS: Tensor | None,
    of_key_HS: Tensor | None,
    exists_QS: Tensor,
    groups: int,
    scale: float | None,
    softcap: float | None,
) -> Tensor:
    """[Gr, Q, S], the mean over the heads of each routing group."""
    heads, _, size = q.shape
    by_key_head = q.float().unflatten(0, (k.shape[0], -1))
    score_HQS = torch.einsum("khqd,ksd->khqs", by_key_head, k.float()).flatten(0, 1)
    score_HQS *= 1 / math.sqrt(size) if scale is None else scale
    if softcap is not None:
        score_HQS = (score_HQS / softcap).tanh_().mul_(softcap)
    if bias_GQS is not None:
        score_HQS += bias_GQS.repeat_interleave(heads // groups, dim=0)
    if of_key_HS is not None:
        score_HQS += of_key_HS[:, None]
    score_HQS.masked_fill_(~exists_QS, -torch.inf)
    return score_HQS.softmax(dim=-1).unflatten(0, (groups, -1)).mean(dim=1)


def _largest(share_GQS: Tensor, start: int, most: int) -> Largest:
    share, place = share_GQS.topk(min(most, share_GQS.shape[-1]), dim=-1)
    queries = torch.arange(start, start + share.shape[1], device=share.device)[:, None]
    missing = most - share.shape[-1]
    distance, share = (
        torch.nn.functional.pad(x, (0, missing)) for x in ((queries - place).int(), share)
    )
    return Largest(distance.clamp_min(0), share)
