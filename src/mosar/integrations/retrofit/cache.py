"""A layer of transformers' KV cache that is a regime cache.

transformers hands new keys and values to `update` and gives what comes back to the attention
function; the regimes are known only there, so `update` passes the new tokens on and the attention
function stores them. An empty cache of any dynamic kind is given these layers, in place: `generate`
and whoever holds the cache need not know.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from mosar.errors import ModelError
from mosar.integrations.retrofit.layer import RoutedLayer
from mosar.model.regime_cache import RegimeLayerCache

# How many tokens assisted decoding may take back after keys were evicted.
CROP_MARGIN = 32


class RegimeCacheLayer(CacheLayerMixin):
    """The cache of one retrofitted layer; `regime` holds the tokens."""

    is_sliding = False
    is_croppable = True
    supports_early_init = False

    def __init__(self, layer: RoutedLayer):
        super().__init__()
        # The first tokens come with the window of the layer.
        self.regime = RegimeLayerCache(layer.config, routing=layer.routing, crop_margin=CROP_MARGIN)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """The new tokens as they are: the attention function stores them with their regimes."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        return key_states, value_states

    def get_seq_length(self) -> int:
        return self.regime.slots

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.regime.slots + query_length, 0

    def get_max_length(self) -> int:
        return -1

    @property
    def batch_size(self) -> int:
        return self.regime.batch_size

    def crop(self, tokens_to_remove: int) -> None:
        """Drops the last tokens; their number comes as a negative one."""
        if tokens_to_remove:
            self.regime.crop(max(self.regime.slots - abs(tokens_to_remove), 0))

    def reset(self) -> None:
        self.regime.reset()
        self.is_initialized = False

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        self.regime.reorder(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.regime.batch_repeat(repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        self.regime.batch_select(indices)

    def offload(self) -> None:
        raise ModelError("a regime cache cannot be offloaded; use the default cache")


def adopt_cache(cache: Cache, layers: list[RoutedLayer]) -> None:
    """Gives an empty cache regime layers; a ModelError where it cannot serve."""
    routing = layers[0].routing
    found = cache.layers
    if found and all(isinstance(layer, RegimeCacheLayer) for layer in found):
        other = found[0].regime.routing  # pyright: ignore[reportAttributeAccessIssue]
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
            f"{type(cache).__name__} is of fixed size or offloaded, a regime cache grows where it "
            "is; use the default cache"
        )
    cache.layers = [RegimeCacheLayer(layer) for layer in layers]  # pyright: ignore
    cache.layer_class_to_replicate = None
