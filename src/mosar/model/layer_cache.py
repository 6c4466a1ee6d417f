"""What every KV cache can do, whatever it keeps: rows move, the last tokens go.

Shapes: B rows.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

# A tensor made inside torch.inference_mode cannot be changed outside of it; a cache outlives both.
ordinary = torch.inference_mode(False)


class Store(Protocol):
    """Where the tokens of one layer are."""

    @property
    def lengths(self) -> Tensor: ...
    @property
    def allocated_bytes(self) -> int: ...
    @property
    def used_bytes(self) -> int: ...
    def check_crop(self, length: int) -> None: ...
    def crop(self, length: int) -> None: ...
    def select_rows(self, rows: Tensor) -> None: ...


S = TypeVar("S", bound=Store)


class LayerCache(Generic[S]):
    """The cache of one layer; subclasses say how tokens come in."""

    def __init__(self):
        self.reset()

    def reset(self) -> None:
        """Forgets everything, also how many rows there were."""
        self._store: S | None = None
        self._slots = self._rows = 0
        self._tensors: dict[str, Tensor] | None = None

    @property
    def slots(self) -> int:
        """How many tokens each row was given, padding included."""
        return self._slots

    @property
    def batch_size(self) -> int:
        """B; 0 before the first tokens."""
        return self._rows

    @property
    def lengths(self) -> Tensor:
        """How many tokens each row was given, padding not included, [B] int64."""
        return torch.zeros(0, dtype=torch.int64) if self._store is None else self._store.lengths

    @property
    def allocated_bytes(self) -> int:
        """The memory that the cache holds: keys, values, bookkeeping, spare room."""
        return 0 if self._store is None else self._store.allocated_bytes

    @property
    def used_bytes(self) -> int:
        """The memory of the tokens that are stored."""
        return 0 if self._store is None else self._store.used_bytes

    def crop(self, length: int) -> None:
        """Goes back to the first `length` tokens of every row, padding included; below 0: drops as
        many. A ValueError where the next query would miss keys that have been evicted since.
        """
        length = self.check_crop(length)
        if self._store is not None and length < self._slots:
            self._store.crop(length)
            self._slots, self._tensors = length, None

    def check_crop(self, length: int) -> int:
        """What `crop` would keep; a ValueError where it would refuse."""
        if isinstance(length, bool) or not isinstance(length, int):
            raise ValueError(f"length must be an integer, got {length!r}")
        length = min(max(self._slots + length, 0) if length < 0 else length, self._slots)
        if self._store is not None and length < self._slots:
            self._store.check_crop(length)
        return length

    def reorder(self, beam_idx: Tensor) -> None:
        """Row i becomes what row beam_idx[i] was."""
        if self._store is not None and tuple(beam_idx.shape) != (self._rows,):
            raise ValueError(f"beam_idx must be [{self._rows}], got {list(beam_idx.shape)}")
        self.batch_select(beam_idx)

    def batch_repeat(self, repeats: int) -> None:
        """Every row `repeats` times in a row, as `repeat_interleave` does."""
        if isinstance(repeats, bool) or not isinstance(repeats, int) or repeats < 1:
            raise ValueError(f"repeats must be an integer >= 1, got {repeats!r}")
        self.batch_select(torch.arange(self._rows).repeat_interleave(repeats))

    def tensors(self) -> dict[str, Tensor]:
        """All tokens in the order they came, as `load_tensors` takes them.

        Until something changes they are the same objects: torch.export knows its inputs by that.
        """
        if self._tensors is None:
            stored = {} if self._store is None else self._ordered_tensors()
            # Strides of spare room would be those of one length alone.
            self._tensors = {name: tensor.contiguous() for name, tensor in stored.items()}
        return self._tensors

    def _ordered_tensors(self) -> dict[str, Tensor]:
        raise NotImplementedError

    def load_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Takes what `tensors` of another cache gave, in place of all tokens so far."""
        raise NotImplementedError

    def settings(self) -> dict[str, Any]:
        """What another cache must be made with to take this one's tensors, as JSON holds it."""
        return {}

    def batch_select(self, indices: Tensor) -> None:
        """The rows of these indices [B'], in their order; a row may come again, or not at all.

        Or the rows that a mask [B] of bool keeps.
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


L = TypeVar("L", bound=LayerCache)


class LayerCaches(Generic[L]):
    """A model's cache: those of its layers, which have been given the same tokens."""

    def __init__(self, layers: Sequence[L]):
        self.layers = list(layers)

    def __len__(self) -> int:
        return len(self.layers)

    def __getitem__(self, layer: int) -> L:
        return self.layers[layer]

    def __iter__(self) -> Iterator[L]:
        return iter(self.layers)

    @property
    def slots(self) -> int:
        """How many tokens each row was given, padding included."""
        return self.layers[0].slots

    @property
    def batch_size(self) -> int:
        """B; 0 before the first tokens."""
        return self.layers[0].batch_size

    @property
    def lengths(self) -> Tensor:
        """How many tokens each row was given, padding not included, [B] int64."""
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
        """All layers or none: they must not end up at different tokens."""
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

    @classmethod
    def from_settings(cls, settings: Sequence[dict[str, Any]]) -> LayerCaches[L]:
        """An empty cache of layers with these settings."""
        raise NotImplementedError


def enter_graphs(kind: type[LayerCaches]) -> None:
    """Lets torch.export take a cache and give it back: tensors by layer, the rest a constant."""

    def flatten(cache: LayerCaches) -> tuple[list[Any], str]:
        return [layer.tensors() for layer in cache], json.dumps([x.settings() for x in cache])

    def flatten_with_keys(cache: LayerCaches) -> tuple[list[Any], str]:
        layers, settings = flatten(cache)
        return [(pytree.SequenceKey(i), layer) for i, layer in enumerate(layers)], settings

    def unflatten(layers: Iterable[Any], settings: str) -> LayerCaches:
        cache = kind.from_settings(json.loads(settings))
        for layer, tensors in zip(cache, layers, strict=True):
            # torch.export also builds trees of other things than tensors; nobody reads them.
            if tensors and all(isinstance(x, Tensor) for x in tensors.values()):
                layer.load_tensors(tensors)
        return cache

    pytree.register_pytree_node(
        kind,
        flatten,
        unflatten,
        serialized_type_name=f"{kind.__module__}.{kind.__qualname__}",
        flatten_with_keys_fn=flatten_with_keys,
    )
