"""A geometry: what a variant of attention changes, and everything one must know about it.

    q, k -> transform (each token at its position) -> attend (which pairs, with which bias) -> out

Subclasses override one of the two hooks and state their facts: whether they route, which settings
they read, which pairs they leave out, what tensor parallelism has to know. Training, evaluation,
generation, plan and export ask for these facts and know no geometry by name.

Shapes: B batch, H query heads, K key/value heads, T queries, S keys, D head dim, R regimes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar, Literal, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mosar.attention import ROUTINGS, Routing, distance_attention
from mosar.core.config import Regime
from mosar.core.outputs import LayerRouting
from mosar.core.positional import positions_in_segments
from mosar.geometries.config import AttentionConfig
from mosar.geometries.mode import MODES, Mode
from mosar.geometries.own_settings import OwnSettings

UNROUTED = "native"
"""How records name the routing of a geometry without routers; no implementation is meant."""


def operator_routing(routing: str) -> Routing:
    """The operators' routing for what a record calls its routing."""
    return cast(Routing, routing if routing in ROUTINGS else "soft")


class HeadShape(NamedTuple):
    """What a geometry must know of its model."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_length: int
    layer: int = 0
    """The index of the layer, from 0."""
    hidden_size: int = 0
    """C of `hidden`, for geometries that read it."""
    num_layers: int | None = None
    """Of the model, for patterns over layers; None: enough for any."""


class ParameterPart(NamedTuple):
    """Parameters of one kind in one layer's geometry."""

    name: str
    count: int
    weights: int
    """How many of them are in matrices that multiply every token."""
    split: Literal["whole", "heads", "keys"]
    """What tensor-parallel ranks hold: all of it, their part, or that of the key heads."""


# The output [B, H, T, D] (the operators' own type is a union), and what the layer tells the
# objective: its routing where it has routers, a price (a scalar tensor) or None where it has not.
Attended = tuple[Any, LayerRouting | Tensor | None]


class Geometry(nn.Module):
    """Causal attention without any position; subclasses override `transform` or `attend`."""

    routed: ClassVar[bool] = False
    """Whether it has routers, and so a choice between soft, top-1 and sparse routing."""
    settings: ClassVar[frozenset[str]] = frozenset()
    """The fields of `AttentionConfig` that it reads, besides its name and its own settings."""
    Own: ClassVar[type[OwnSettings]] = OwnSettings
    """Its own settings; a subclass states them as a dataclass (own_settings.py)."""
    family: ClassVar[Literal["positions", "distance", "window", "routing"]] = "positions"
    """What its attention depends on; figures may group variants by it."""
    learns: ClassVar[str] = "–"
    """What its own parameters are, in a few words."""
    adaptive: ClassVar[bool] = False
    """Whether contents decide which pairs are read or how they are weighed, besides q·k."""
    decay: ClassVar[Literal["no", "fixed", "learned"]] = "no"
    """How attention falls with the distance of a pair, if it does."""
    native: ClassVar[bool] = True
    """Whether compiled kernels attend; else torch operators do, in chunks of queries."""
    source: ClassVar[str] = "Kazemnejad et al. 2023 (NoPE)"
    """The paper or repository that it follows."""
    checked: ClassVar[str] = "its law"
    """What its results were compared with."""
    reads_hidden: ClassVar[bool] = False
    """Whether `attend` is given `hidden`, the input that q, k and v are projected from."""
    mode: Mode | None = None
    """What executes it in place of its own hooks; see `enter_mode`."""
    of_heads: ClassVar[tuple[str, ...]] = ()
    """Its parameters whose first dimension counts query heads, so that processes divide them."""
    own_heads: slice = slice(None)
    """The query heads of this process, where tensor parallelism divides them."""

    def __init__(self, attention: AttentionConfig, shape: HeadShape):
        super().__init__()
        self.attention, self.shape = attention, shape
        self.own: Any = attention.own

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float,
        softcap: float | None = None,
        routing: Routing = "soft",
        query_positions: Tensor | None = None,
        key_positions: Tensor | None = None,
        key_valid: Tensor | None = None,
        segment_ids: Tensor | None = None,
        cache: Any = None,
        hidden: Tensor | None = None,
        position_offset: int = 0,
    ) -> Attended:
        """q [B, T, H, D]; k, v [B, S, K, D], before any positional transform -> [B, T, H, D].

        Positions are as in `mosar_attention`; where none are given they count from 0 in each
        segment (a run of equal `segment_ids`), so that a segment is the same wherever it stands.
        With the layer's `cache` (see `attend_cached`) q, k and v are of new tokens alone, which
        follow those it has been given, and their `key_positions` are needed. hidden [B, T, C]: the
        layer's input after its norm, for geometries that read it. position_offset: `transform` sees
        positions that are larger by this; distances stay as they are.
        """
        at_q, at_k = _positions(
            q, k, query_positions, key_positions, key_valid=key_valid, segment_ids=segment_ids
        )
        if position_offset:
            same = at_q is at_k
            at_k = at_k + position_offset
            at_q = at_k if same else at_q + position_offset
        q, k = self.acting.transform(q, k, at_q, at_k)
        options = {
            "routing": routing,
            "scale": scale,
            "softcap": softcap,
            "key_positions": key_positions,
            "key_valid": key_valid,
        }
        if self.reads_hidden:
            options["hidden"] = hidden
        notes = self.note(q, k, hidden)
        if notes is not None:
            options["notes"] = notes
        # Views: the kernels read any layout whose last dimension is contiguous.
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        differentiated = any(x.requires_grad for x in (q, k, v))
        if cache is not None and (cache.slots or not differentiated):
            out, told = self.attend_cached(q, k, v, cache, **options)
        else:
            options |= {"query_positions": query_positions, "segment_ids": segment_ids}
            out, told = self.acting.attend(q, k, v, **options)
            if cache is not None:
                # Gradients pass through the first tokens; what is stored of them has none.
                notes = None if notes is None else notes.detach()
                where = (routing, key_positions, key_valid, notes)
                self.store(k.detach(), v.detach(), cache, told, *where)
        return out.transpose(1, 2), told

    def transform(self, q: Tensor, k: Tensor, at_q: Tensor, at_k: Tensor) -> tuple[Tensor, Tensor]:
        """q [B, T, H, D] at positions at_q [B or 1, T], and k likewise, each token on its own."""
        return q, k

    @property
    def kept_notes(self) -> int:
        """Numbers that a cache keeps of each token besides k and v."""
        return 0

    def note_bytes(self, width: int) -> int:
        """Their bytes in a cache whose keys have `width` bytes a number."""
        return width * self.kept_notes

    def note(self, q: Tensor, k: Tensor, hidden: Tensor | None) -> Tensor | None:
        """[B, E, S]: what `attend` is given as `notes` of every key, and a cache keeps; or None.

        q [B, T, H, D] and k [B, T, K, D] are transformed.
        """
        return None

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, *, routing: Routing, **options: Any
    ) -> Attended:
        """q [B, H, T, D]; k, v [B, K, S, D], transformed -> [B, H, T, D]; a routing, price or None.

        `options` are those of the operators: scale, softcap, positions, key_valid, segment_ids;
        and where the geometry has them `hidden` [B, T, C] and `notes` [B, E, S].
        """
        return plain_attention(q, k, v, **options), None

    def attend_cached(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cache: Any,
        *,
        key_positions: Tensor,
        key_valid: Tensor | None,
        notes: Tensor | None = None,
        **options: Any,
    ) -> Attended:
        """The same with k, v of new tokens only, which a `DenseLayerCache` adds to the others."""
        keys = self.store(k, v, cache, None, options["routing"], key_positions, key_valid, notes)
        if keys.notes is not None:
            options["notes"] = keys.notes
        placement = {
            "query_positions": None if keys.positions is None else key_positions,
            "key_positions": keys.positions,
            "key_valid": keys.valid,
            "segment_ids": None,
        }
        return self.acting.attend(q, keys.k, keys.v, **placement, **options)

    def store(
        self,
        k: Tensor,
        v: Tensor,
        cache: Any,
        told: LayerRouting | Tensor | None,
        routing: Routing,
        key_positions: Tensor | None,
        key_valid: Tensor | None,
        notes: Tensor | None = None,
    ) -> Any:
        """Adds k, v [B, K, S, D] of new tokens to the cache, and returns what its `update` does."""
        return cache.update(k, v, key_positions=key_positions, key_valid=key_valid, notes=notes)

    @property
    def modes(self) -> tuple[str, ...]:
        """Ways to execute a trained model that it was not trained with; see `enter_mode`."""
        return tuple(name for name, mode in MODES.items() if mode.serves(self))

    def enter_mode(self, mode: str | None, length: int = 0) -> None:
        """Executes texts of this length in one of its `modes`; None ends the mode."""
        self.mode = None if mode is None else MODES[mode](self, length)

    @property
    def acting(self) -> Geometry | Mode:
        """What executes it now: its mode, or the geometry itself."""
        return self if self.mode is None else self.mode

    def begin_step(self, step: int, steps: int) -> None:
        """Is told the next training step, or the step of a checkpoint; for schedules."""

    @property
    def settings_now(self) -> AttentionConfig:
        """The settings of the model as it is at this step; a schedule may be on its way."""
        return self.attention

    def executed(self, routing: Routing) -> Routing:
        """The routing that computes what `routing` asks for; soft routing may have become hard."""
        return routing

    def price_basis(
        self, layers: Sequence[Any], segment_ids: Tensor | None = None
    ) -> Tensor | None:
        """What the price follows from: here [L], the prices that `attend` of each layer returned.

        It is a mean over tokens; processes that divide the heads average it. None: no price.
        """
        return torch.stack(list(layers)) if layers else None

    def price(self, basis: Tensor) -> Tensor:
        """The scalar that the objective adds to the loss, times `cost_weight`."""
        return basis.mean()

    @property
    def routings(self) -> tuple[str, ...]:
        """How a trained model can be executed; the first is what it was trained with."""
        if self.routed:
            return ROUTINGS
        return (UNROUTED,) if self.band("sparse") == self.band(UNROUTED) else (UNROUTED, "sparse")

    def band(self, routing: str) -> float | None:
        """The distance beyond which it reads no pair under `routing`; None: it reads all pairs."""
        return None

    @classmethod
    def default_regimes(cls, max_length: int) -> tuple[Regime, ...] | None:
        """The regimes at a training length, where the settings name none; None: the paper's."""
        return None

    def keys_read(self, positions: Tensor, routing: str) -> Tensor | None:
        """How many keys queries at these positions (of their document) read, a mean over the heads.

        None: all of them.
        """
        band = self.band(routing)
        return None if band is None else (positions + 1).clamp_max(math.floor(band) + 1)

    def products(self, position: int) -> float | None:
        """Products q·k per head for the query at a position, including those that choose its keys.

        None: it depends on the contents.
        """
        if self.routed:
            return None
        read = self.keys_read(torch.tensor(position), UNROUTED)
        return position + 1 if read is None else float(read)

    def tokens(self, share: float) -> int:
        """A share of the training length in tokens, at least one."""
        return max(1, round(share * self.shape.max_length))

    def reaches(self) -> dict[str, float]:
        """Regime -> reach, of the regimes that it uses."""
        return {}

    def count_pairs(
        self,
        shape: tuple[int, int],
        *,
        routing: str = UNROUTED,
        labels: tuple[Tensor, Tensor] | None = None,
        segment_ids: Tensor | None = None,
    ) -> tuple[float, int] | None:
        """(pairs of the support, causal pairs) of so many rows of tokens; None: all are read.

        labels: of queries and of keys, where there are routers.
        """
        rows, length = (1, shape[1]) if segment_ids is None else shape
        if segment_ids is None:
            # Rows are alike: one of them is counted.
            at = torch.arange(length)[None]
        else:
            at = positions_in_segments(segment_ids)
        read = self.keys_read(at, routing)
        if read is None:
            return None
        times, causal = shape[0] // rows, int((at + 1).sum())
        # Entries need not be tokens and may outnumber pairs; the density stays at most 1.
        return times * min(read.sum().item(), causal), times * causal

    def parameter_parts(self) -> list[ParameterPart]:
        """Its own parameters by kind, as `mosar plan` counts them."""
        return [
            ParameterPart(
                name,
                p.numel(),
                p.numel() if p.dim() > 1 else 0,
                "heads" if name in self.of_heads else "whole",
            )
            for name, p in self.named_parameters()
        ]

    def split_obstacle(self, tensor: int) -> str | None:
        """Why `tensor` processes cannot divide its heads, to follow their number; None: they can.

        Here heads attend on their own, and nothing but parameters has to be divided.
        """
        return self._undivided([name for name, _ in self.named_parameters()])

    def _undivided(self, names: list[str]) -> str | None:
        """The obstacle if one of these parameters of its own does not count heads."""
        if set(names) <= set(self.of_heads):
            return None
        name = self.attention.geometry
        return f": the geometry {name} has parameters, and nothing says how to divide them"

    def init_parameter(self, name: str, parameter: Tensor, generator: torch.Generator) -> None:
        """Fills one of the geometry's own parameters: vectors with 0, the rest normal, std 0.02."""
        if parameter.dim() < 2:
            parameter.zero_()
        else:
            parameter.normal_(std=0.02, generator=generator)


def plain_attention(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, softcap: float | None, **placement: Any
) -> Any:
    """Causal attention without a bias: by our operator, or by torch's where that is the quicker.

    That is where it can compute the same (no soft-cap, plain causal): for one query a row anywhere,
    and off the CPU for any number. On the CPU ours is quicker then, forward and backward.
    """
    if softcap is None and all(value is None for value in placement.values()):
        if q.shape[2] == 1:
            # It reads every key, so the query heads of a key head can be its queries.
            grouped = q.reshape(q.shape[0], k.shape[1], -1, q.shape[3])
            return F.scaled_dot_product_attention(grouped, k, v, scale=scale).reshape(q.shape)
        if q.device.type != "cpu" and q.shape[2] == k.shape[2]:
            return F.scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
            )
    return distance_attention(q, k, v, scale=scale, softcap=softcap, **placement)


def _positions(
    q: Tensor,
    k: Tensor,
    query_positions: Tensor | None,
    key_positions: Tensor | None,
    *,
    key_valid: Tensor | None,
    segment_ids: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Where queries and keys stand, [B or 1, T] and [B or 1, S]; one tensor if it is the same."""
    if key_positions is not None:
        at_k = key_positions.long()
        if key_valid is not None:
            at_k = at_k.masked_fill(~key_valid, 0)
    elif segment_ids is not None and query_positions is None:
        at_k = positions_in_segments(segment_ids)
    else:
        at_k = torch.arange(k.shape[1], device=k.device)[None]
    if query_positions is not None:
        return query_positions.long(), at_k
    return (at_k if q.shape[1] == k.shape[1] else at_k[:, k.shape[1] - q.shape[1] :]), at_k


def wide_dtype(x: Tensor) -> torch.dtype:
    """The precision of tables for x: float32, or float64 where x is."""
    return torch.promote_types(x.dtype, torch.float32)
