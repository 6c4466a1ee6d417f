"""The tokens that go into or come out of a cache, and their checks; errors name the argument.

Shapes: B rows, Hq query heads, Hkv key/value heads, Gr routing groups, S tokens, D head dim,
R regimes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from mosar.attention import attend
from mosar.core.bias import LabelBias, MixtureBias, ends_at_reach
from mosar.core.config import MoSARConfig
from mosar.core.inputs import DTYPES
from mosar.core.layout import can_check_values, is_traced

FAR = torch.iinfo(torch.int32).max


class Tokens(NamedTuple):
    """Consecutive tokens of every row."""

    k: Tensor
    """[B, Hkv, S, D], post-positional, unexpanded."""
    v: Tensor
    labels: Any = None
    """[B, Gr, S] int64, any value for sinks; None if there are no regimes."""
    pi: Tensor | None = None
    """[B, Gr, S, R], under soft routing."""
    positions: Tensor | None = None
    """[B, S] int64; None: the slots."""
    valid: Tensor | None = None
    """[B, S] bool; None: all."""
    first_slot: int = 0
    """The number of tokens before these."""
    notes: Tensor | None = None
    """[B, E, S], other numbers that a geometry stores for each token besides k and v."""
    of_key: Tensor | None = None
    """[B, Hq, S] float64, what is added to every pair of a key (`LabelBias.of_key`)."""

    @property
    def num_tokens(self) -> int:
        return self.k.shape[2]

    @property
    def slots(self) -> Tensor:
        """[S]."""
        return torch.arange(self.first_slot, self.first_slot + self.num_tokens)

    @property
    def all_positions(self) -> Tensor:
        """[B, S]."""
        if self.positions is not None:
            return self.positions
        return self.slots.to(self.k.device).expand(self.k.shape[0], -1)

    @property
    def all_valid(self) -> Tensor:
        """[B, S]."""
        if self.valid is not None:
            return self.valid
        some = torch.ones(1, 1, dtype=torch.bool, device=self.k.device)
        return some.expand(self.k.shape[0], self.num_tokens)

    def check_values(self, config: MoSARConfig, last_positions: Tensor) -> None:
        """Checks that labels are regimes and that positions do not fall below those before, [B]."""
        if is_traced():
            return
        # Bookkeeping is on the CPU, so they are read there anyway.
        labels, all_positions, all_valid = (
            x.cpu() for x in (self.labels, self.all_positions, self.all_valid)
        )
        for row, last in enumerate(last_positions.tolist()):
            positions = all_positions[row][all_valid[row]]
            check_labels("labels_k", labels[row][:, all_valid[row]], config)
            if not len(positions):
                continue
            falls = positions.diff(prepend=positions.new_tensor([last])) < 0
            if falls.any() or int(positions[0]) < 0:
                at = int(falls.nonzero()[0]) if falls.any() else 0
                before = int(positions[at - 1]) if at else last
                raise ValueError(
                    "key_positions must be >= 0 and must not decrease along the valid keys of a "
                    f"row, got {int(positions[at])} after {before} in row {row}"
                )
            if int(positions[-1]) >= FAR:
                raise ValueError(
                    f"key_positions must stay below 2^31 - 1, got {int(positions[-1])}"
                )


def attend_tokens(
    q: Tensor,
    choice: Tensor,
    positions: Tensor,
    keys: Tokens,
    config: MoSARConfig,
    *,
    routing: str,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of queries [B, Hq, T, D] at positions [B, T] over keys.

    choice: labels [B, Gr, T], or probabilities [B, Gr, T, R] if the keys have probabilities.
    """
    if not keys.num_tokens:
        wide = torch.promote_types(q.dtype, torch.float32)
        return torch.zeros_like(q), q.new_full(q.shape[:-1], -torch.inf, dtype=wide)
    if keys.pi is None:
        ends = ends_at_reach(routing, config)
        bias = LabelBias(choice, keys.labels, config, ends, of_key=keys.of_key)
    else:
        bias = MixtureBias(choice, keys.pi, config)
    options |= {"query_positions": positions, "key_positions": keys.all_positions}
    k, v = keys.k.to(q.dtype), keys.v.to(q.dtype)
    return attend(q, k, v, bias, key_valid=keys.valid, return_lse=True, **options)  # pyright: ignore[reportReturnType]


def check_labels(name: str, labels: Tensor, config: MoSARConfig) -> None:
    """A ValueError unless every label is the index of a regime."""
    if labels.numel() and can_check_values(labels):
        low, high = (int(x) for x in torch.aminmax(labels))
        if low < 0 or high >= config.num_regimes:
            raise ValueError(
                f"{name} must lie in 0..{config.num_regimes - 1}, got values {low}..{high}"
            )


def check_heads(
    name: str, x: object, wanted: tuple[int | None, ...], device: torch.device | None
) -> None:
    """Checks that x is [B, heads, length, D] with these sizes (None: any), floats, no gradient."""
    if not isinstance(x, Tensor):
        raise ValueError(f"{name} must be a tensor, got {type(x).__name__}")
    fits = x.dim() == 4 and 0 not in x.shape
    if not fits or any(w not in (None, n) for w, n in zip(wanted, x.shape, strict=True)):
        axes = zip(wanted, ("B", "heads", "length", "D"), strict=True)
        sizes = ", ".join(str(axis if size is None else size) for size, axis in axes)
        raise ValueError(f"{name} must be [{sizes}], none of them 0, got {list(x.shape)}")
    if x.dtype not in DTYPES:
        raise ValueError(f"{name} must be one of {[str(d) for d in DTYPES]}, got {x.dtype}")
    if device is not None and x.device != device:
        raise ValueError(f"{name} must be on the device of the cache, {device}, got {x.device}")
    if x.device.type == "meta":
        raise ValueError(f"{name} is on the meta device; a cache cannot store it")
    if x.requires_grad:
        raise ValueError(
            f"{name} requires a gradient, which a cache cannot store; call the model under "
            "torch.no_grad() or torch.inference_mode()"
        )


def check_routing(
    name: str, routing: object, like: Tensor, groups: int | None, regimes: int | None = None
) -> None:
    """Checks integer labels [B, length] or [B, Gr, length] of `like` [B, heads, length, D].

    With `regimes`, checks probabilities [..., R] in float32 or float64 instead.
    """
    if not isinstance(routing, Tensor):
        raise ValueError(f"{name} must be a tensor, got {type(routing).__name__}")
    batch, heads, length, _ = like.shape
    tail = () if regimes is None else (regimes,)
    shape = tuple(routing.shape)
    found = shape[1] if len(shape) == 3 + len(tail) else 1
    plain, grouped = (batch, length, *tail), (batch, found, length, *tail)
    if shape not in (plain, grouped) or groups not in (None, found):
        rest = ", ".join(map(str, (length, *tail)))
        raise ValueError(
            f"{name} must be [{batch}, {rest}] or [{batch}, {groups or 'groups'}, {rest}], "
            f"got {list(shape)}"
        )
    if not found or heads % found:
        raise ValueError(
            f"{name} has {found} routing groups, which must divide the {heads} heads it routes"
        )
    if routing.device != like.device:
        raise ValueError(f"{name} must be on {like.device}, got {routing.device}")
    if regimes is not None and routing.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"{name} must be float32 or float64, got {routing.dtype}")
    if regimes is None and not _is_integer(routing):
        raise ValueError(f"{name} must hold integer regime labels, got {routing.dtype}")


def check_grid(name: str, x: Tensor | None, like: Tensor, *, of_bool: bool = False) -> None:
    """Checks that x is None or [B, length] of `like` [B, heads, length, D], integers or bool."""
    if x is None:
        return
    batch, _, length, _ = like.shape
    if not isinstance(x, Tensor) or tuple(x.shape) != (batch, length):
        got = list(x.shape) if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(f"{name} must be [{batch}, {length}], got {got}")
    if (x.dtype != torch.bool) if of_bool else not _is_integer(x):
        raise ValueError(f"{name} must hold {'bool' if of_bool else 'integers'}, got {x.dtype}")
    if x.device != like.device:
        raise ValueError(f"{name} must be on {like.device}, got {x.device}")


def _is_integer(x: Tensor) -> bool:
    return not (x.is_floating_point() or x.is_complex() or x.dtype == torch.bool)
