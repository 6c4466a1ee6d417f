"""Keys in the order they came: for geometries without regimes, and for soft and top-1 routing.

Shapes: B rows, Hq query heads, Hkv key/value heads, Gr routing groups, T queries, S tokens,
D head dim, R regimes.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mosar.core.config import MoSARConfig
from mosar.model.cache.tokens import Tokens, attend_tokens, check_labels

# A tensor made inside torch.inference_mode cannot be changed outside of it, but a cache may be used
# in both.
outlives_inference_mode = torch.inference_mode(False)
# The dimension that runs over tokens.
_AXES = {"k": 2, "v": 2, "labels": 2, "pi": 2, "positions": 1, "valid": 1}
_AXES |= {"notes": 2, "of_key": 2}


class OrderedKeys:
    """Tensors, named as in `Tokens`, that grow together along the tokens.

    Storage grows by an eighth when it is full, so a token is copied eight times on average, however
    long the row gets.
    """

    has_evicted = False

    def __init__(self, config: MoSARConfig | None = None, **options: Any):
        """config and options (routing, window, impl) are those of `attend`."""
        self.config, self._options = config, options
        self.length = 0
        self._storage: dict[str, Tensor] = {}

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Uses these tensors without a copy."""
        self._storage, self.length = dict(tensors), tensors["k"].shape[2]

    def ordered(self) -> Tokens:
        """All stored tokens, without the spare room."""
        stored: dict[str, Any] = {
            name: x.narrow(_AXES[name], 0, self.length) for name, x in self._storage.items()
        }
        return Tokens(**stored)

    @property
    def last_of_key(self) -> Tensor | None:
        """[B, Hq], that of the newest token; None if keys have none."""
        of_key = self.ordered().of_key
        if of_key is None:
            return None
        return of_key[:, :, -1] if self.length else of_key.new_zeros(of_key.shape[:2])

    @property
    def allocated_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._storage.values())

    @property
    def used_bytes(self) -> int:
        return sum(x.nbytes for x in self.ordered() if isinstance(x, Tensor))

    @property
    def lengths(self) -> Tensor:
        """Valid tokens of each row, [B]."""
        return self.ordered().all_valid.sum(dim=1).cpu()

    @property
    def counts(self) -> Tensor:
        """Stored keys, [B, Gr, R or, with sinks, R + 1] int64."""
        keys, config = self.ordered(), self.config
        assert config is not None
        valid = keys.all_valid
        sinks = valid & (valid.cumsum(dim=1) <= config.num_sinks)
        labels = keys.labels.masked_fill(sinks[:, None], config.num_regimes)
        one_hot = F.one_hot(labels, config.num_regimes + 1) * valid[:, None, :, None]
        return one_hot.sum(dim=2)[..., : config.num_regimes + bool(config.num_sinks)].cpu()

    @outlives_inference_mode
    def append(self, tokens: Tokens) -> None:
        """Adds tokens, in the dtypes of the first ones."""
        if self.config is not None:
            tokens.check_values(self.config, self._last_positions(len(tokens.k)))
        filled = tokens._replace(positions=tokens.all_positions, valid=tokens.all_valid)
        tensors = {name: x for name, x in filled._asdict().items() if isinstance(x, Tensor)}
        added = tokens.num_tokens
        for name, tensor in tensors.items():
            axis, stored = _AXES[name], self._storage.get(name)
            if torch.compiler.is_exporting():
                # A graph must not write into its inputs, and does not need spare room.
                before = [] if stored is None else [stored.narrow(axis, 0, self.length)]
                self._storage[name] = torch.cat([*before, tensor], dim=axis)
                continue
            if stored is None or stored.shape[axis] < self.length + added:
                shape = list(tensor.shape)
                shape[axis] = self.length + added + max(64, (self.length + added) // 8)
                grown = (tensor if stored is None else stored).new_empty(shape)
                if stored is not None:
                    grown.narrow(axis, 0, self.length).copy_(stored.narrow(axis, 0, self.length))
                self._storage[name] = stored = grown
            stored.narrow(axis, self.length, added).copy_(tensor)
        self.length = self.length + added

    def _last_positions(self, rows: int) -> Tensor:
        """The last position of each row, -1 if it has no valid token, [B]."""
        if not self._storage:
            return torch.full((rows,), -1)
        keys = self.ordered()
        positions = torch.where(keys.all_valid, keys.all_positions, -1)
        return F.pad(positions, (1, 0), value=-1).amax(dim=1).cpu()

    def attend(
        self, q: Tensor, choice: Tensor, positions: Tensor | None, **scores: Any
    ) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp of q [B, Hq, T, D], computed by the dense operators.

        The routing is labels [B, Gr, T], or probabilities if those of keys are stored.
        """
        keys, config, count = self.ordered(), self.config, q.shape[2]
        assert config is not None
        if positions is None:
            if count > self.length:
                raise ValueError(
                    f"the queries are the last of {self.length} tokens, but there are {count}; "
                    "give query_positions"
                )
            positions = keys.all_positions[:, self.length - count :]
        if keys.pi is None:
            check_labels("labels_q", choice, config)
        return attend_tokens(q, choice, positions, keys, config, **self._options, **scores)

    def settle(self) -> None:
        """Does nothing, because this store has no waiting chunk."""

    def check_crop(self, length: int) -> None:
        """Does nothing, because this store keeps all keys and can crop to any length."""

    def crop(self, length: int) -> None:
        self.length = min(self.length, length)

    @outlives_inference_mode
    def select_rows(self, rows: Tensor) -> None:
        self._storage = {
            name: x.index_select(0, rows.to(x.device)) for name, x in self._storage.items()
        }
