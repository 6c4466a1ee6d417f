"""Our KV caches as a `Cache` of transformers, so that `generate` can move and crop them.

The model reads and writes `cache.states` itself: a routed layer takes labels with its keys, which
`Cache.update` has no place for. Everything else `generate` asks for passes through.
"""

from __future__ import annotations

from transformers import Cache

from mosar.integrations.transformers_cache import MosarCacheLayer, num_removed
from mosar.model.cache import DenseCache, RegimeCache

# How far assisted decoding may go back: its candidates are a few tens of tokens.
PAST_MARGIN = 256


class MosarCache(Cache):
    """`Decoder.new_cache` for transformers; `MosarForCausalLM.new_cache` makes one."""

    def __init__(self, states: RegimeCache | DenseCache):
        self.states = states
        super().__init__(layers=[MosarCacheLayer(state) for state in states])

    @property
    def routing(self) -> str | None:
        """The routing that the cache serves; None: any."""
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
        if removed := num_removed(tokens_to_remove):
            self.states.crop(-removed)

    def activate_past_recording(self) -> None:
        """Keys are kept `PAST_MARGIN` tokens longer, if the cache is still empty."""
        if isinstance(self.states, RegimeCache) and not self.states.slots:
            for layer in self.states:
                layer.crop_margin = max(layer.crop_margin, PAST_MARGIN)
