"""What every KV cache can do: reorder rows, drop the last tokens.

Shapes: B rows, Hkv key/value heads, Gr routing groups, S tokens, D head dim.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from mosar.model.cache.ordered_keys import OrderedKeys
from mosar.model.cache.regime_keys import RegimeKeys
from mosar.model.cache.tokens import Tokens, check_grid, check_heads


class LayerCache:
    """The cache of one layer; subclasses define how tokens are added."""

    def __init__(self):
        self.reset()

    def reset(self) -> None:
        """Forgets everything, including the number of rows."""
        self._store: OrderedKeys | RegimeKeys | None = None
        self._slots = self._rows = 0
        # The Hkv, D, Gr and device of the stored tokens.
        self._sizes: tuple[int, int, int] | None = None
        self._device: torch.device | None = None
        self._tensors: dict[str, Tensor] | None = None

    @property
    def slots(self) -> int:
        """The number of tokens of each row, including padding."""
        return self._slots

    @property
    def batch_size(self) -> int:
        """B; 0 before the first tokens."""
        return self._rows

    @property
    def lengths(self) -> Tensor:
        """The number of tokens of each row, without padding, [B] int64."""
        return torch.zeros(0, dtype=torch.int64) if self._store is None else self._store.lengths

    @property
    def allocated_bytes(self) -> int:
        """Allocated bytes: keys, values, bookkeeping, spare room."""
        return 0 if self._store is None else self._store.allocated_bytes

    @property
    def used_bytes(self) -> int:
        """The memory of the tokens that are stored."""
        return 0 if self._store is None else self._store.used_bytes

    @property
    def keeps_order(self) -> bool:
        """Whether there are tokens and they are stored in the order they came."""
        return isinstance(self._store, OrderedKeys)

    def ordered(self) -> Tokens:
        """All tokens in order of arrival; a ValueError if keys have been evicted."""
        if self._store is None:
            raise ValueError("the cache is empty")
        return self._store.ordered()

    def crop(self, length: int) -> None:
        """Goes back to the first `length` tokens of every row, including padding.

        A negative length drops that many tokens. A ValueError if the next query would miss keys
        that have been evicted.
        """
        length = self.check_crop(length)
        if self._store is not None and length < self._slots:
            self._store.crop(length)
            self._slots, self._tensors = length, None

    def check_crop(self, length: int) -> int:
        """The length that `crop` would keep; a ValueError if it would refuse."""
        if isinstance(length, bool) or not isinstance(length, int):
            raise ValueError(f"length must be an integer, got {length!r}")
        length = min(max(self._slots + length, 0) if length < 0 else length, self._slots)
        if self._store is not None and length < self._slots:
            self._store.check_crop(length)
        return length

    def reorder(self, beam_idx: Tensor) -> None:
        """Row i becomes the former row beam_idx[i]."""
        if self._store is not None and tuple(beam_idx.shape) != (self._rows,):
            raise ValueError(f"beam_idx must be [{self._rows}], got {list(beam_idx.shape)}")
        self.batch_select(beam_idx)

    def batch_repeat(self, repeats: int) -> None:
        """Repeats every row `repeats` times, like `repeat_interleave`."""
        if isinstance(repeats, bool) or not isinstance(repeats, int) or repeats < 1:
            raise ValueError(f"repeats must be an integer >= 1, got {repeats!r}")
        self.batch_select(torch.arange(self._rows).repeat_interleave(repeats))

    def batch_select(self, indices: Tensor) -> None:
        """Selects the rows with these indices [B'], in this order; a row may be repeated.

        A bool mask [B] selects the rows that are True.
        """
        if self._store is None:
            return
        if indices.dtype == torch.bool:
            if tuple(indices.shape) != (self._rows,):
                raise ValueError(f"a mask must be [{self._rows}], got {list(indices.shape)}")
            indices = indices.nonzero()[:, 0]
        rows = indices.detach().long().cpu()
        last = self._rows - 1
        if rows.dim() != 1 or not len(rows) or not 0 <= int(rows.min()) <= int(rows.max()) <= last:
            raise ValueError(f"indices must be rows 0..{last}, [B'], got {indices.tolist()}")
        if not torch.equal(rows, torch.arange(self._rows)):
            self._store.select_rows(rows)
            self._rows, self._tensors = len(rows), None

    def tensors(self) -> dict[str, Tensor]:
        """All tokens in the order they came, as `load_tensors` takes them.

        They are the same objects until the cache changes, because torch.export identifies its
        inputs by object.
        """
        if self._tensors is None:
            stored = {} if self._store is None else self.ordered()._asdict()
            # Without the spare room, whose strides would fit only one length.
            self._tensors = {
                name: x.contiguous() for name, x in stored.items() if isinstance(x, Tensor)
            }
        return self._tensors

    def load_tensors(self, tensors: dict[str, Any]) -> None:
        """Replaces all tokens by the `tensors` of another cache."""
        self.reset()
        tokens = Tokens(**tensors)
        store = self._new_store(tokens, in_order=True)
        store.load(tensors)
        self._note(store, tokens)

    def settings(self) -> dict[str, Any]:
        """The settings, as JSON values, that another cache needs to load these tensors."""
        return {}

    @classmethod
    def from_settings(cls, settings: dict[str, Any]):
        """An empty cache with these settings."""
        return cls(**settings)

    def _new_store(self, tokens: Tokens, in_order: bool = False) -> Any:
        """The store for tokens like these; `in_order`: the store that keeps their order."""
        raise NotImplementedError

    def _append(self, tokens: Tokens) -> None:
        store = self._new_store(tokens) if self._store is None else self._store
        store.append(tokens)
        self._note(store, tokens)

    def _note(self, store: OrderedKeys | RegimeKeys, tokens: Tokens) -> None:
        """Updates the counts after the store has added these tokens."""
        self._store, self._tensors = store, None
        self._rows, heads, added, dim = tokens.k.shape
        self._slots += added
        self._sizes = (heads, dim, 1 if tokens.labels is None else tokens.labels.shape[1])
        self._device = tokens.k.device

    def _check_tokens(
        self, k: Tensor, v: Tensor, positions: Tensor | None, valid: Tensor | None
    ) -> None:
        heads, dim, _ = self._sizes or (None, None, None)
        check_heads("k", k, (self._rows or None, heads, None, dim), self._device)
        check_heads("v", v, (k.shape[0], k.shape[1], None, k.shape[3]), k.device)
        if v.shape != k.shape or v.dtype != k.dtype:
            raise ValueError(
                f"v must be as k, {list(k.shape)} {k.dtype}, got {list(v.shape)} {v.dtype}"
            )
        check_grid("key_positions", positions, k)
        check_grid("key_valid", valid, k, of_bool=True)


L = TypeVar("L", bound=LayerCache)


class ModelCache(Generic[L]):
    """A model's cache: one cache per layer, all with the same tokens."""

    layer_class: type[LayerCache]

    def __init__(self, layers: Iterable[L]):
        self.layers = list(layers)

    def __len__(self) -> int:
        return len(self.layers)

    def __getitem__(self, layer: int) -> L:
        return self.layers[layer]

    def __iter__(self) -> Iterator[L]:
        return iter(self.layers)

    @property
    def slots(self) -> int:
        """The number of tokens of each row, including padding."""
        return self.layers[0].slots

    @property
    def batch_size(self) -> int:
        """B; 0 before the first tokens."""
        return self.layers[0].batch_size

    @property
    def lengths(self) -> Tensor:
        """The number of tokens of each row, without padding, [B] int64."""
        return self.layers[0].lengths

    @property
    def allocated_bytes(self) -> int:
        """The memory that all layers hold."""
        return sum(layer.allocated_bytes for layer in self.layers)

    @property
    def used_bytes(self) -> int:
        """The memory of the tokens that are stored."""
        return sum(layer.used_bytes for layer in self.layers)

    def reset(self) -> None:
        for layer in self.layers:
            layer.reset()

    def crop(self, length: int) -> None:
        """Changes all layers or none, because they must always hold the same tokens."""
        for layer in self.layers:
            layer.check_crop(length)
        for layer in self.layers:
            layer.crop(length)

    def reorder(self, beam_idx: Tensor) -> None:
        for layer in self.layers:
            layer.reorder(beam_idx)

    def batch_repeat(self, repeats: int) -> None:
        for layer in self.layers:
            layer.batch_repeat(repeats)

    def batch_select(self, indices: Tensor) -> None:
        for layer in self.layers:
            layer.batch_select(indices)


def enter_graphs(kind: type[ModelCache], name: str) -> None:
    """Lets torch.export take and return a cache: tensors by layer, everything else as a constant.

    name: the name of the cache in saved programs.
    """

    def flatten(cache: ModelCache) -> tuple[list[Any], str]:
        return [layer.tensors() for layer in cache], json.dumps([x.settings() for x in cache])

    def flatten_with_keys(cache: ModelCache) -> tuple[list[Any], str]:
        layers, settings = flatten(cache)
        return [(pytree.SequenceKey(i), layer) for i, layer in enumerate(layers)], settings

    def unflatten(layers: Iterable[Any], settings: str) -> ModelCache:
        cache = kind.__new__(kind)
        ModelCache.__init__(cache, map(kind.layer_class.from_settings, json.loads(settings)))
        for layer, tensors in zip(cache, layers, strict=True):
            # torch.export also builds trees of objects that are not tensors; nothing reads them.
            if tensors and all(isinstance(x, Tensor) for x in tensors.values()):
                layer.load_tensors(tensors)
        return cache

    pytree.register_pytree_node(
        kind,
        flatten,
        unflatten,
        serialized_type_name=name,
        flatten_with_keys_fn=flatten_with_keys,
    )
