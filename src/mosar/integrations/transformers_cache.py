"""Our KV caches as layers of transformers' `Cache`, so that `generate` can move and crop them."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from mosar.model.cache import DenseLayerCache, RegimeLayerCache


class MosarCacheLayer(CacheLayerMixin):
    """One layer; `state` holds the tokens."""

    is_sliding = False
    is_croppable = True
    supports_early_init = False

    def __init__(self, state: RegimeLayerCache | DenseLayerCache):
        # Not the base class's: what it would set follows from the state.
        self.state = state

    @property
    def batch_size(self) -> int:
        return self.state.batch_size

    @property
    def keys(self) -> Tensor | None:
        """[B, K, S, D] of all tokens; None where they are kept by regime, or there are none."""
        return self.state.ordered().k if self.state.keeps_order else None

    @property
    def values(self) -> Tensor | None:
        """As `keys`."""
        return self.state.ordered().v if self.state.keeps_order else None

    @property
    def is_initialized(self) -> bool:
        return self.state.slots > 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: the first tokens bring their shapes."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Appends keys and values, where no labels belong to them."""
        if not isinstance(self.state, DenseLayerCache):
            raise ValueError(
                "a routed layer stores labels with its keys: MosarForCausalLM fills its cache "
                "itself, and no other model can"
            )
        keys = self.state.update(key_states, value_states)
        return keys.k, keys.v

    def get_seq_length(self) -> int:
        """Tokens so far, padding and evicted ones included."""
        return self.state.slots

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.state.slots + query_length, 0

    def get_max_length(self) -> int:
        """No limit."""
        return -1

    def offload(self) -> None:
        raise ValueError(
            "this cache cannot be offloaded, and it is bounded under sparse routing; use the "
            "default cache"
        )

    prefetch = offload

    def reset(self) -> None:
        self.state.reset()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.state.reorder(beam_idx)

    def crop(self, tokens_to_remove: int) -> None:
        if removed := num_removed(tokens_to_remove):
            self.state.crop(-removed)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.state.batch_repeat(repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        self.state.batch_select(indices)


def num_removed(tokens_to_remove: int) -> int:
    """How many tokens go: `crop` of transformers takes it as a negative number."""
    if tokens_to_remove > 0:
        raise ValueError(
            f"tokens_to_remove must be <= 0, the tokens to drop, got {tokens_to_remove}"
        )
    return -tokens_to_remove


def cache_bytes(cache: Cache | None) -> int:
    """The memory that a cache holds, ours or one of transformers'."""
    layers: list[Any] = [] if cache is None else cache.layers
    return sum(
        layer.state.allocated_bytes
        if isinstance(layer, MosarCacheLayer)
        else layer.keys.nbytes + layer.values.nbytes
        for layer in layers
    )
