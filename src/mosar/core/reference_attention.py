"""The dense definition of MoSAR attention; tests compare every fast path with it.

    out = softmax(cap(scale q·k) + bias + mask) v,   cap(s) = c tanh(s / c)

It is plain torch, needs T x S memory and supports float64. q·k, softmax and the sum over values run
in float32 (in float64 for float64 inputs), whatever the inputs' dtype. Heads of a KV group share
keys; heads of a routing group share the bias.

Shapes: B batch, H query heads, K key/value heads, Gr routing groups, T queries, S keys, D head dim,
R regimes.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from mosar.core.bias import Bias, DistanceBias, LabelBias, MixtureBias, Scores
from mosar.core.config import MoSARConfig, check_config
from mosar.core.hard_domain import support_mask
from mosar.core.inputs import check_attention_inputs, without_autocast
from mosar.core.layout import Layout
from mosar.core.outputs import LayerRouting, ReferenceAttentionOutput
from mosar.core.routers import PostPositionRouter
from mosar.core.worth_field import WorthField


def attend(
    q: Tensor, k: Tensor, v: Tensor, layout: Layout, bias: Bias, scores: Scores
) -> tuple[Tensor, Tensor]:
    """Attention with any bias; returns output and log-sum-exp."""
    options: Any = {"scale": scores.scale, "softcap": scores.softcap}
    if not isinstance(bias, DistanceBias):
        result = attend_routed(q, k, v, layout, bias, **options)
        return result.output, result.lse
    distances_B1TS = layout.distances()[:, None]
    admissible_BHTS = layout.exists()[:, None]
    bias_BHTS = None
    if bias.log_gate is not None:
        table = _at_least_float32(bias.log_gate)
        index = distances_B1TS.clamp(0, table.shape[1] - 1)[:, 0]
        bias_BHTS = table[:, index].transpose(0, 1)
        admissible_BHTS = admissible_BHTS & (bias_BHTS > -torch.inf)
    if bias.slopes is not None:
        slopes = _at_least_float32(bias.slopes)
        linear_BHTS = -slopes[:, None, None] * distances_B1TS.clamp_min(0)
        bias_BHTS = linear_BHTS if bias_BHTS is None else bias_BHTS + linear_BHTS
    if bias.key is not None:
        of_key_BH1S = _at_least_float32(bias.key)[:, :, None]
        bias_BHTS = of_key_BH1S if bias_BHTS is None else bias_BHTS + of_key_BH1S
    output, lse, _ = dense_attention(
        *(q, k, v),
        bias=bias_BHTS,
        admissible=admissible_BHTS,
        key_valid=layout.key_valid,
        **options,
    )
    return output, lse


def attend_routed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: Layout,
    bias: LabelBias | MixtureBias,
    *,
    scale: float | None = None,
    softcap: float | None = None,
) -> ReferenceAttentionOutput:
    """Attention with a routed bias, with all intermediate results."""
    config, admissible_BGTS = bias.config, layout.exists()[:, None]
    mixture = bias
    if isinstance(bias, LabelBias):
        mixture = bias.mixture(torch.float64 if q.dtype == torch.float64 else torch.float32)
        if bias.ends_at_reach:
            admissible_BGTS = support_mask(bias.query, bias.key, config, layout)
    field = WorthField(config)(mixture.query, mixture.key, layout.distances()[:, None])
    worth_BGTS, bias_BGTS = field.worth, field.bias
    if config.num_sinks:
        sinks_BGTS = layout.sinks(config.num_sinks)[:, None, None, :]
        worth_BGTS = worth_BGTS.masked_fill(sinks_BGTS, 1.0)
        bias_BGTS = bias_BGTS.masked_fill(sinks_BGTS, 0.0)
    heads_per_group = q.shape[1] // bias.groups
    bias_BHTS = bias_BGTS.repeat_interleave(heads_per_group, dim=1)
    if isinstance(bias, LabelBias) and bias.of_key is not None:
        bias_BHTS = bias_BHTS + _at_least_float32(bias.of_key)[:, :, None]
    output, lse, attention = dense_attention(
        q,
        k,
        v,
        bias=bias_BHTS,
        admissible=admissible_BGTS.repeat_interleave(
            heads_per_group if admissible_BGTS.shape[1] > 1 else 1, dim=1
        ),
        key_valid=layout.key_valid,
        scale=scale,
        softcap=softcap,
    )
    return ReferenceAttentionOutput(output, lse, attention, worth_BGTS, bias_BGTS)


def _at_least_float32(x: Tensor) -> Tensor:
    return x.float() if x.dtype.itemsize < 4 else x


def dense_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    bias: Tensor | None,
    admissible: Tensor,
    key_valid: Tensor | None,
    scale: float | None,
    softcap: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Softmax attention with an additive bias and a mask, both broadcastable to [B, H, T, S].

    Returns output [B, H, T, D], log-sum-exp [B, H, T] and probabilities [B, H, T, S]. A row without
    an admissible key has output 0 and log-sum-exp -inf.
    """
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    repeats = q.shape[1] // k.shape[1]
    with without_autocast(q):
        if key_valid is not None:
            # Padded slots may contain anything, often uninitialised memory.
            k = k.masked_fill(~key_valid[:, None, :, None], 0)
            v = v.masked_fill(~key_valid[:, None, :, None], 0)
        k_BHSD = k.to(dtype).repeat_interleave(repeats, dim=1)
        v_BHSD = v.to(dtype).repeat_interleave(repeats, dim=1)
        score_BHTS = torch.einsum("bhtd,bhsd->bhts", q.to(dtype), k_BHSD)
        score_BHTS = score_BHTS * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
        if softcap is not None:
            score_BHTS = softcap * torch.tanh(score_BHTS / softcap)
        if bias is not None:
            score_BHTS = score_BHTS + bias.to(dtype)
        score_BHTS = score_BHTS.masked_fill(~admissible, -torch.inf)
        # An empty row is computed as a row of zeros and cleared later: no NaN and no gradient.
        empty_BHT1 = ~admissible.any(dim=-1, keepdim=True)
        score_BHTS = score_BHTS.masked_fill(empty_BHT1, 0)
        attention_BHTS = torch.softmax(score_BHTS, dim=-1).masked_fill(~admissible, 0)
        lse_BHT = torch.logsumexp(score_BHTS, dim=-1).masked_fill(empty_BHT1[..., 0], -torch.inf)
        output_BHTD = torch.einsum("bhts,bhsd->bhtd", attention_BHTS, v_BHSD)
        return output_BHTD.to(q.dtype), lse_BHT, attention_BHTS


class MoSARReferenceAttention(nn.Module):
    """Routers and dense attention in one readable module; takes post-positional q and k."""

    def __init__(
        self,
        config: MoSARConfig,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        scale: float | None = None,
        softcap: float | None = None,
    ):
        super().__init__()
        check_config(config)
        for name, count in (
            ("num_heads", num_heads),
            ("num_kv_heads", num_kv_heads),
            ("head_dim", head_dim),
        ):
            if count < 1:
                raise ValueError(f"{name} must be >= 1, got {count}")
        if num_heads % num_kv_heads:
            raise ValueError(
                f"num_heads must be a multiple of num_kv_heads={num_kv_heads}, got {num_heads}"
            )
        if num_kv_heads % config.routing_groups:
            raise ValueError(
                f"routing_groups must divide num_kv_heads={num_kv_heads}, "
                f"got {config.routing_groups}"
            )
        self.config = config
        self.scale, self.softcap = scale, softcap
        self.query_router = PostPositionRouter(num_heads * head_dim, config)
        self.key_router = PostPositionRouter(num_kv_heads * head_dim, config)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        routing: str = "soft",
        window: float | None = None,
        query_positions: Tensor | None = None,
        key_positions: Tensor | None = None,
        key_valid: Tensor | None = None,
        segment_ids: Tensor | None = None,
    ) -> ReferenceAttentionOutput:
        """q [B, H, T, D]; k, v [B, K, S, D], keys unexpanded; returns all intermediate results."""
        if routing not in ("soft", "top1", "sparse"):
            raise ValueError(f"routing must be one of soft, top1, sparse, got {routing!r}")
        layout = check_attention_inputs(
            *(q, k, v, self.scale, self.softcap),
            window=window,
            query_positions=query_positions,
            key_positions=key_positions,
            key_valid=key_valid,
            segment_ids=segment_ids,
        )
        if key_valid is not None:
            # As in dense_attention; a NaN in the key router would make its gradient NaN.
            k = k.masked_fill(~key_valid[:, None, :, None], 0)
        query_routing = self.query_router(q.transpose(1, 2))
        key_routing = self.key_router(k.transpose(1, 2))
        bias = LayerRouting(query_routing, key_routing).bias(self.config, routing)
        result = attend_routed(q, k, v, layout, bias, scale=self.scale, softcap=self.softcap)
        return replace(result, query_routing=query_routing, key_routing=key_routing)
