"""A layer of transformers' KV cache that is a regime cache.

transformers hands new keys and values to `update` and gives what comes back to the attention
function; the regimes are known only there, so `update` passes the new tokens on and the attention
function stores them. An empty cache of any dynamic kind is given these layers, in place: `generate`
and other holders of the cache need not know.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache

from mosar.errors import ModelError
from mosar.integrations.retrofit.layer import AttentionLayer
from mosar.integrations.transformers_cache import MosarCacheLayer
from mosar.model.cache import RegimeLayerCache

# How many tokens assisted decoding may take back after keys were evicted.
CROP_MARGIN = 32


class RegimeCacheLayer(MosarCacheLayer):
    """The cache of one retrofitted layer."""

    state: RegimeLayerCache

    def __init__(self, layer: AttentionLayer):
        # The first tokens come with the window of the layer.
        super().__init__(
            RegimeLayerCache(layer.config, routing=layer.routing, crop_margin=CROP_MARGIN)
        )

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """The new tokens as they are: the attention function stores them with their regimes."""
        return key_states, value_states


def adopt_cache(cache: Cache, layers: list[AttentionLayer]) -> None:
    """Gives an empty cache regime layers; a ModelError where it cannot serve."""
    routing = layers[0].routing
    found = cache.layers
    if found and all(isinstance(layer, RegimeCacheLayer) for layer in found):
        other = found[0].state.routing  # pyright: ignore[reportAttributeAccessIssue]
        if other != routing and cache.get_seq_length():
            raise ModelError(
                f"the cache was filled under {other} routing, not {routing}; start with a new one"
            )
        if other == routing:
            return
    elif cache.get_seq_length():
        raise ModelError(
            f"the cache holds {cache.get_seq_length()} tokens without regimes, of dense attention; "
            f"start with a new one under {routing} routing"
        )
    elif getattr(cache, "is_compileable", False) or getattr(cache, "offloading", False):
        raise ModelError(
            f"{type(cache).__name__} has a fixed size or is offloaded, which a regime cache does "
            "not support; use the default cache"
        )
    cache.layers = [RegimeCacheLayer(layer) for layer in layers]  # pyright: ignore
    cache.layer_class_to_replicate = None
