"""A cache that keeps every token in the order they came.

Geometries without regimes read it whole, and so do soft and top-1 routing.

Shapes: B rows, Hkv key/value heads, Gr routing groups, S tokens, D head dim, R regimes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mosar.model.cache_tokens import check_grid, check_heads
from mosar.model.layer_cache import LayerCache, LayerCaches, enter_graphs, ordinary

# Which dimension runs over tokens.
_AXES = {"k": 2, "v": 2, "labels": 2, "pi": 2, "positions": 1, "valid": 1}


class DenseKeys:
    """Tensors by name that grow along the tokens together: k, v [B, Hkv, S, D], positions and valid
    [B, S], and where they are given labels [B, Gr, S] and pi [B, Gr, S, R].

    Storage grows by an eighth when it is full: a token costs eight copies of itself on average,
    however long the row gets.
    """

    def __init__(self):
        self.length = 0
        self._storage: dict[str, Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        """What has been stored under a name, without the spare room."""
        return self._storage[name].narrow(_AXES[name], 0, self.length)

    @classmethod
    def of(cls, tensors: dict[str, Tensor]) -> DenseKeys:
        """A store that holds these tensors themselves."""
        store = cls()
        store._storage, store.length = dict(tensors), tensors["k"].shape[2]
        return store

    def tensors(self) -> dict[str, Tensor]:
        """Everything that has been stored, by name."""
        return {name: self[name] for name in self._storage}

    def get(self, name: str) -> Tensor | None:
        return self[name] if name in self._storage else None

    @property
    def allocated_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._storage.values())

    @property
    def used_bytes(self) -> int:
        return sum(self[name].nbytes for name in self._storage)

    @property
    def lengths(self) -> Tensor:
        """Valid tokens of each row, [B]."""
        return self["valid"].sum(dim=1).cpu()

    @property
    def last_positions(self) -> Tensor:
        """The last position of each row, -1 where it has no valid token, [B]."""
        positions = torch.where(self["valid"], self["positions"], -1)
        return torch.nn.functional.pad(positions, (1, 0), value=-1).amax(dim=1).cpu()

    @ordinary
    def append(self, **tensors: Tensor) -> None:
        """Adds tokens; dtypes are those of the first call."""
        added = tensors["k"].shape[2]
        if torch.compiler.is_exporting():
            # A graph writes into none of its inputs, and has no use for spare room.
            for name, tensor in tensors.items():
                stored = [self[name]] if name in self._storage else []
                self._storage[name] = torch.cat([*stored, tensor], dim=_AXES[name])
            self.length = self.length + added
            return
        for name, tensor in tensors.items():
            axis, stored = _AXES[name], self._storage.get(name)
            if stored is None or stored.shape[axis] < self.length + added:
                shape = list(tensor.shape)
                shape[axis] = size_with_reserve(self.length + added)
                grown = (tensor if stored is None else stored).new_empty(shape)
                if stored is not None:
                    grown.narrow(axis, 0, self.length).copy_(self[name])
                self._storage[name] = stored = grown
            stored.narrow(axis, self.length, added).copy_(tensor)
        self.length += added

    def check_crop(self, length: int) -> None:
        """Everything is there: any length will do."""

    def crop(self, length: int) -> None:
        self.length = min(self.length, length)

    @ordinary
    def select_rows(self, rows: Tensor) -> None:
        self._storage = {
            name: tensor.index_select(0, rows.to(tensor.device))
            for name, tensor in self._storage.items()
        }


class AllKeys(NamedTuple):
    """All tokens of a layer, as the operators take them."""

    k: Tensor
    """[B, Hkv, S, D]."""
    v: Tensor
    positions: Tensor | None
    """[B, S]; None: 0..S-1."""
    valid: Tensor | None
    """[B, S]; None: all."""


class DenseLayerCache(LayerCache[DenseKeys]):
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
    ) -> AllKeys:
        """Appends k, v [B, Hkv, S, D] and returns those of all tokens so far.

        key_positions [B, S]: by default tokens count 0, 1, 2, ... over all calls. key_valid [B, S]:
        False for padding.
        """
        wanted, device = (None, None, None), None
        if self._store is not None:
            stored = self._store["k"]
            wanted, device = (stored.shape[0], stored.shape[1], stored.shape[3]), stored.device
        check_heads("k", k, *wanted, device)
        check_heads("v", v, k.shape[0], k.shape[1], k.shape[3], k.device)
        if v.shape != k.shape:
            raise ValueError(f"v must be as k, {list(k.shape)}, got {list(v.shape)}")
        check_grid("key_positions", key_positions, k)
        check_grid("key_valid", key_valid, k, of_bool=True)
        rows, _, count, _ = k.shape
        slots = torch.arange(self._slots, self._slots + count, device=k.device).expand(rows, -1)
        store = DenseKeys() if self._store is None else self._store
        store.append(
            k=k,
            v=v,
            positions=slots if key_positions is None else key_positions.long(),
            valid=torch.ones_like(slots, dtype=torch.bool) if key_valid is None else key_valid,
        )
        self._store, self._rows, self._slots = store, rows, self._slots + count
        self._tensors = None
        # What a graph is given may be anything.
        self._placed |= key_valid is not None or (
            key_positions is not None
            and (torch.compiler.is_exporting() or not torch.equal(key_positions, slots))
        )
        placement = (store["positions"], store["valid"]) if self._placed else (None, None)
        return AllKeys(store["k"], store["v"], *placement)

    def _ordered_tensors(self) -> dict[str, Tensor]:
        assert self._store is not None
        return self._store.tensors()

    def load_tensors(self, tensors: dict[str, Tensor]) -> None:
        self.reset()
        self._store, self._placed = DenseKeys.of(tensors), True
        self._rows, _, self._slots, _ = tensors["k"].shape


class DenseCache(LayerCaches[DenseLayerCache]):
    """One `DenseLayerCache` per layer."""

    def __init__(self, num_layers: int):
        super().__init__([DenseLayerCache() for _ in range(num_layers)])

    @classmethod
    def from_settings(cls, settings: Sequence[dict[str, Any]]) -> DenseCache:
        return cls(len(settings))


enter_graphs(DenseCache)


def size_with_reserve(length: int) -> int:
    """Room for so many tokens and an eighth more."""
    return length + max(64, length // 8)
