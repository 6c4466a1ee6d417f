"""The attention function that transformers calls for a retrofitted layer.

It gets post-positional q and k, keys unexpanded, and what is special to the layer: its scale, its
soft-cap, its sliding window. The mask is what FlashAttention's would be: None, or which tokens are
no padding [B, S]; causality, window and support are the operator's own.

Shapes: B batch, H query heads, K key/value heads, T queries, S keys, D head dim.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, flash_attention_mask

from mosar.attention import distance_attention, mosar_attention
from mosar.core.routers import top1_routing
from mosar.geometries import LayerRouting
from mosar.integrations.retrofit.cache import RegimeCacheLayer
from mosar.integrations.retrofit.errors import RetrofitError
from mosar.integrations.retrofit.layer import RoutedLayer

NAME = "mosar_retrofit"
ATTRIBUTE = "mosar"
# What some models add to attention, and our operators have no place for.
_FOREIGN = ("s_aux", "position_bias", "head_mask", "cache")


def routed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    sliding_window: int | None = None,
    position_ids: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """query [B, H, T, D]; key, value [B, K, S, D] -> [B, T, H, D]; no attention weights."""
    layer = module.__dict__.get(ATTRIBUTE)
    if layer is None:
        raise RetrofitError(
            f"{type(module).__name__} has no routers, but its model is routed; retrofit it first"
        )
    for name in _FOREIGN:
        if others.get(name) is not None:
            raise RetrofitError(f"{type(module).__name__} passes {name}, which has no routed form")
    if attention_mask is not None and attention_mask.dim() != 2:
        raise RetrofitError(
            f"attention_mask must be [batch, tokens] (1: a token, 0: padding) under "
            f"{layer.routing} routing, got {list(attention_mask.shape)}"
        )
    valid = None if attention_mask is None else attention_mask[:, -key.shape[2] :].bool()
    options: dict[str, Any] = {"scale": scaling, "softcap": softcap}
    cache, layer.cache = layer.cache, None
    if cache is not None:
        out = _attend_cached(layer, cache, query, key, value, valid, options)
    else:
        options |= {
            "window": layer.window,
            "key_valid": valid,
            "segment_ids": _segments(position_ids, query, key, valid),
            "dropout": dropout,
        }
        out = _attend(layer, query, key, value, options)
    return out.transpose(1, 2).contiguous(), None


def _attend(layer: RoutedLayer, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> Tensor:
    if layer.observer is not None:
        layer.observer(layer, q, k, v, options)
    if layer.routing == "dense":
        return distance_attention(q, k, v, **options)  # pyright: ignore[reportReturnType]
    pi_q, pi_k = _chosen(layer, layer.route(q, k))
    return mosar_attention(q, k, v, pi_q, pi_k, layer.config, routing=layer.routing, **options)  # pyright: ignore


def _chosen(layer: RoutedLayer, routed: LayerRouting) -> tuple[Tensor, Tensor]:
    if layer.routing == "soft":
        return routed.query.probabilities, routed.key.probabilities
    # Labels come from the logits: two may differ where their probabilities tie.
    return top1_routing(routed.query.logits), top1_routing(routed.key.logits)


def _attend_cached(
    layer: RoutedLayer,
    cache: RegimeCacheLayer,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    valid: Tensor | None,
    options: dict[str, Any],
) -> Tensor:
    """k and v are of the new tokens alone; the cache has the others, with their regimes."""
    routed = layer.route(q, k)
    soft = layer.routing == "soft"
    cache.regime.update(
        k,
        v,
        routed.key.labels,
        pi_k=routed.key.probabilities if soft else None,
        key_valid=valid,
    )
    pi_q = routed.query.probabilities if soft else None
    return cache.regime.attend(q, routed.query.labels, pi_q=pi_q, **options)


def _segments(
    position_ids: Tensor | None, q: Tensor, k: Tensor, valid: Tensor | None
) -> Tensor | None:
    """Packed sequences: where positions start again, as transformers detects them."""
    if position_ids is None or valid is not None or q.shape[2] != k.shape[2]:
        return None
    if position_ids.dim() != 2 or position_ids.shape[1] != k.shape[2]:
        return None
    segments = _packed(position_ids)
    return None if segments is None else segments.expand(k.shape[0], -1).contiguous()


_KNOWN = WeakTensorKeyDictionary()


def _packed(position_ids: Tensor) -> Tensor | None:
    """Segments of packed rows, None where nothing is packed.

    All layers of a pass are given the same tensor; it is looked into once, as a GPU is waited for.
    """
    # Of an inference tensor nobody knows whether it was written to since.
    version = None if position_ids.is_inference() else position_ids._version
    known = _KNOWN.get(position_ids)
    if version is not None and known is not None and known[0] == version:
        return known[1]
    starts = position_ids.diff(dim=1) != 1
    segments = None
    if bool(starts.any()):
        segments = F.pad(starts.long().cumsum(dim=1), (1, 0))
    _KNOWN[position_ids] = (version, segments)
    return segments


AttentionInterface.register(NAME, routed_attention)
AttentionMaskInterface.register(NAME, flash_attention_mask)
