"""The attention function that transformers calls for a retrofitted layer.

It gets post-positional q and k, keys unexpanded, and what is special to the layer: its scale, its
soft-cap, its sliding window. Which pairs exist is decided by the mask that the model asks for, as
in transformers' own attention: `module.sliding_window` may be set on layers that read everything,
and some models name their window in the mask alone. No mask is built: a `RoutedMask` describes it.

Shapes: B batch, H query heads, K key/value heads, T queries, S keys, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import (
    AttentionMaskInterface,
    causal_mask_function,
    flash_attention_mask,
)

from mosar.errors import ModelError
from mosar.integrations.retrofit.layer import NAME, AttentionLayer

ATTRIBUTE = "mosar"
# What some models add to attention, and our operators have no place for.
_FOREIGN = ("s_aux", "position_bias", "head_mask", "cache")


class RoutedMask(NamedTuple):
    """What a causal mask says besides causality."""

    valid: Tensor | None
    """[B, S]: False for padding; None: there is none."""
    window: int | None
    """The largest distance, None: any."""
    segments: Tensor | None
    """[B, T]: tokens of different segments do not see each other; None: there is one."""


def routed_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    *,
    local_size: int | None = None,
    use_vmap: bool = False,
    device: torch.device | str | None = None,
    **others: Any,
) -> RoutedMask:
    """The mask of a pass, called by transformers; a ModelError where it is not causal.

    local_size: the tokens of a window, with the query's own. use_vmap: the model brings a mask
    function of its own.
    """
    valid = flash_attention_mask(
        batch_size, q_length, kv_length, q_offset, kv_offset, attention_mask=attention_mask
    )
    segments = None
    if mask_function is not causal_mask_function:
        rows = torch.arange(batch_size, device=device)[:, None]
        places = torch.arange(max(q_offset - 1, 0), q_offset + q_length, device=device)
        earlier, later = places[None, :-1], places[None, 1:]
        if use_vmap or bool(torch.any(mask_function(rows, 0, earlier, later))):
            raise ModelError(
                "the model asks for an attention mask that is not causal; only causal masks, with "
                "or without a window, can be routed"
            )
        starts = ~mask_function(rows, 0, later, earlier).expand(batch_size, -1)
        if bool(starts.any()):
            segments = F.pad(starts.long().cumsum(dim=1), (q_length - starts.shape[1], 0))
    return RoutedMask(valid, None if local_size is None else local_size - 1, segments)


def routed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: RoutedMask | Tensor | None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """query [B, H, T, D]; key, value [B, K, S, D] -> [B, T, H, D]; no attention weights."""
    layer: AttentionLayer | None = module.__dict__.get(ATTRIBUTE)
    if layer is None:
        raise ModelError(
            f"{type(module).__name__} has no routers, but its model is routed; retrofit it first"
        )
    if not layer.waiting:
        raise ModelError(
            f"{type(module).__name__} calls attention twice in one pass, which routing does "
            "not support; this model cannot be retrofitted"
        )
    layer.waiting = False
    for name in _FOREIGN:
        if others.get(name) is not None:
            raise ModelError(
                f"{type(module).__name__} passes {name}, which routing does not support"
            )
    mask = _read_mask(attention_mask, sliding_window, layer.routing)
    layer.window = mask.window
    valid = None if mask.valid is None else mask.valid[:, -key.shape[2] :].bool()
    options: dict[str, Any] = {"scale": scaling, "softcap": softcap}
    cache, layer.cache = layer.cache, None
    if cache is not None:
        if mask.segments is not None:
            raise ModelError(
                f"{type(module).__name__} attends in chunks, which a regime cache does not "
                "support; pass use_cache=False"
            )
        # The new tokens alone; the cache has the others, with their regimes.
        state = cache.state
        if not state.slots:
            state.window = layer.window
        routed = layer.route(query, key)
        out = state.attend_routed(query, key, value, routed, key_valid=valid, **options)
    else:
        options |= {
            "window": layer.window,
            "key_valid": valid,
            "segment_ids": mask.segments,
            "dropout": dropout,
        }
        out = layer.attend(query, key, value, options)
    return out.transpose(1, 2).contiguous(), None


def _read_mask(
    mask: RoutedMask | Tensor | None, sliding_window: int | None, routing: str
) -> RoutedMask:
    """Also of a mask that we did not make, where only the call names the window."""
    if isinstance(mask, RoutedMask):
        return mask
    if mask is not None and mask.dim() != 2:
        raise ModelError(
            f"attention_mask must be [batch, tokens] (1: a token, 0: padding) under {routing} "
            f"routing, got {list(mask.shape)}"
        )
    return RoutedMask(mask, None if sliding_window is None else sliding_window - 1, None)


AttentionInterface.register(NAME, routed_attention)
AttentionMaskInterface.register(NAME, routed_mask)
