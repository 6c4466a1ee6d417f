"""The cache of a layer without regimes: it stores every token."""

from __future__ import annotations

import torch
from torch import Tensor

from mosar.model.cache.layer import LayerCache, ModelCache, enter_graphs
from mosar.model.cache.ordered_keys import OrderedKeys
from mosar.model.cache.tokens import Tokens


class DenseLayerCache(LayerCache):
    """Keys and values of one layer, for any geometry."""

    def reset(self) -> None:
        super().reset()
        self._placed = False

    def update(
        self,
        k: Tensor,
        v: Tensor,
        *,
        key_positions: Tensor | None = None,
        key_valid: Tensor | None = None,
        notes: Tensor | None = None,
    ) -> Tokens:
        """Appends k, v [B, Hkv, S, D] and returns those of all tokens so far.

        key_positions [B, S]: by default 0, 1, 2, ... over all calls. key_valid [B, S]: False for
        padding. The result contains them only if they differ from the default. notes [B, E, S]:
        other numbers of each token that the geometry needs later.
        """
        self._check_tokens(k, v, key_positions, key_valid)
        positions = None if key_positions is None else key_positions.long()
        counted = Tokens(k, v, notes=notes, valid=key_valid, first_slot=self._slots)
        # An exported graph must work for any positions.
        self._placed |= key_valid is not None or (
            positions is not None
            and (torch.compiler.is_exporting() or not torch.equal(positions, counted.all_positions))
        )
        self._append(counted._replace(positions=positions))
        keys = self.ordered()
        return keys if self._placed else keys._replace(positions=None, valid=None)

    def _new_store(self, tokens: Tokens, in_order: bool = True) -> OrderedKeys:
        return OrderedKeys()


class DenseCache(ModelCache[DenseLayerCache]):
    """One `DenseLayerCache` per layer."""

    layer_class = DenseLayerCache

    def __init__(self, num_layers: int):
        super().__init__(DenseLayerCache() for _ in range(num_layers))


enter_graphs(DenseCache, "mosar.model.dense_cache.DenseCache")
