"""Our KV caches as a `Cache` of transformers, so that `generate` can move and crop them.

The model reads and writes `cache.states` itself: a routed layer takes labels with its keys, which
`Cache.update` has no place for. Everything else `generate` asks for passes through.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

from mosar.model.dense_cache import DenseCache, DenseKeys, DenseLayerCache
from mosar.model.regime_cache import RegimeCache, RegimeLayerCache

# How far assisted decoding may go back: its candidates are a few tens of tokens.
PAST_MARGIN = 256


class MosarCacheLayer(CacheLayerMixin):
    """One layer of a `MosarCache`."""

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
        return self._stored("k")

    @property
    def values(self) -> Tensor | None:
        """As `keys`."""
        return self._stored("v")

    def _stored(self, name: str) -> Tensor | None:
        store = self.state._store
        return store[name] if isinstance(store, DenseKeys) else None

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
        raise ValueError("a MosarCache cannot be offloaded; it is bounded under sparse routing")

    prefetch = offload

    def reset(self) -> None:
        self.state.reset()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.state.reorder(beam_idx)

    def crop(self, tokens_to_remove: int) -> None:
        if (removed := _removed(tokens_to_remove)) != 0:
            self.state.crop(-removed)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.state.batch_repeat(repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        self.state.batch_select(indices)


class MosarCache(Cache):
    """`Decoder.new_cache` for transformers; `MosarForCausalLM.new_cache` makes one."""

    def __init__(self, states: RegimeCache | DenseCache):
        self.states = states
        super().__init__(layers=[MosarCacheLayer(state) for state in states])

    @property
    def routing(self) -> str | None:
        """The routing it is for; None: any."""
        return self.states[0].routing if isinstance(self.states, RegimeCache) else None

    def set_routing(self, routing: str) -> None:
        """Makes it serve another routing; a ValueError where keys that it needs were evicted."""
        if not isinstance(self.states, RegimeCache):
            raise ValueError("a cache without regimes serves any routing: it has none to set")
        self.states.set_routing(routing)

    @property
    def used_bytes(self) -> int:
        """The memory of the tokens that are stored."""
        return self.states.used_bytes

    @property
    def allocated_bytes(self) -> int:
        """The memory that all layers hold."""
        return self.states.allocated_bytes

    @property
    def batch_size(self) -> int:
        """Rows; -1 before the first tokens."""
        return self.states.batch_size or -1

    def crop(self, tokens_to_remove: int) -> None:
        """Drops the last -tokens_to_remove tokens, of all layers or of none.

        A ValueError where keys that would be needed again have been evicted.
        """
        if (removed := _removed(tokens_to_remove)) != 0:
            self.states.crop(-removed)

    def activate_past_recording(self) -> None:
        """Keys are kept `PAST_MARGIN` tokens longer, if the cache is still empty."""
        if isinstance(self.states, RegimeCache) and not self.states.slots:
            for layer in self.states:
                layer.crop_margin = max(layer.crop_margin, PAST_MARGIN)


def _removed(tokens_to_remove: int) -> int:
    """How many tokens go: `crop` of transformers takes it as a negative number."""
    if tokens_to_remove > 0:
        raise ValueError(
            f"tokens_to_remove must be <= 0, the tokens to drop, got {tokens_to_remove}"
        )
    return -tokens_to_remove
