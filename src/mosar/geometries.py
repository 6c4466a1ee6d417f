"""Geometries: what a variant of attention changes, and nothing else.

    q, k -> transform (each token at its position) -> attend (which pairs, with which bias) -> out

A geometry is one small class with two hooks, entered in `GEOMETRIES` by name; a variant is a named
setting of it in `VARIANTS`. docs/geometries.md shows how to add one.

Shapes: B batch, H query heads, K key/value heads, T queries, S keys, D head dim, R regimes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Integral
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mosar.attention import Routing, distance_attention, mosar_attention
from mosar.core.config import Composition, MoSARConfig, Regime
from mosar.core.outputs import RouterOutput
from mosar.core.positional import alibi_slopes, positions_in_segments, rotate, rotation
from mosar.core.regimes import RegimeKernel, gate_extent
from mosar.core.routers import PostPositionRouter, forced_routing, top1_routing
from mosar.kernels.tables import has_table, kept_table


@dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    """A geometry by name and its settings; each geometry reads the settings that concern it."""

    geometry: str = "rope"
    """A name in `GEOMETRIES`."""
    rope_theta: float = 10000.0
    """Base of the rotation's wavelengths."""
    rope_fraction: float = 1.0
    """The share of frequencies that rotate, highest first; the others stay as they are."""
    regime: str | None = None
    """The one regime of "fixed" and "rope-mask", by name."""
    regimes: tuple[Regime, ...] | None = None
    """Reaches and plateaus; None: the default geometry scaled to the training length."""
    router_hidden: int = 64
    """d_r: hidden width of each router."""
    temperature: float = 1.0
    """tau: the routers end in softmax(z / tau)."""
    barrier: float = 6.0
    """B: the gate's floor is e^-B."""
    exponent: float = 2.0
    """p: how the decay sets in after the plateau."""
    epsilon: float = 1e-6
    """Guard of the logarithm of the worth."""
    composition: Composition = "mean"
    """How two reaches make a pair's reach: "mean", "min" or "max"."""
    routing_groups: int = 1
    """Gr: heads of a layer route in this many groups; a divisor of the key/value heads."""
    num_sinks: int = 0
    """The first keys of a row (of a segment) that every query may read with gate 1."""
    cost_weight: float = 0.0
    """lambda: weight of the normalized reach cost in the training loss."""
    cost_warmup: int = 500
    """Steps over which lambda rises linearly from 0."""

    def __post_init__(self) -> None:
        if self.geometry not in GEOMETRIES:
            raise ValueError(f"geometry must be one of {list(GEOMETRIES)}, got {self.geometry!r}")
        for name, low, high in (
            ("rope_theta", 1.0, math.inf),
            ("rope_fraction", 0.0, 1.0),
            ("cost_weight", 0.0, math.inf),
        ):
            value = getattr(self, name)
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not number or not math.isfinite(value) or not low <= value <= high:
                raise ValueError(f"{name} must be a number in [{low}, {high}], got {value!r}")
            object.__setattr__(self, name, float(value))
        warmup = self.cost_warmup
        if not isinstance(warmup, Integral) or isinstance(warmup, bool) or warmup < 0:
            raise ValueError(f"cost_warmup must be an integer >= 0, got {warmup!r}")
        # MoSARConfig checks its own fields; the length does not matter for that.
        config = self.mosar_config(MoSARConfig().max_length)
        if self.regimes is not None:
            object.__setattr__(self, "regimes", config.regimes)
        if self.regime is not None:
            config.regime_index(self.regime)

    def mosar_config(self, max_length: int) -> MoSARConfig:
        """The geometry of regimes for a training length N."""
        regimes = MoSARConfig.scaled(max_length).regimes if self.regimes is None else self.regimes
        return MoSARConfig(
            max_length=max_length,
            regimes=regimes,
            router_hidden=self.router_hidden,
            temperature=self.temperature,
            barrier=self.barrier,
            exponent=self.exponent,
            epsilon=self.epsilon,
            composition=self.composition,
            routing_groups=self.routing_groups,
            num_sinks=self.num_sinks,
        )


class HeadShape(NamedTuple):
    """What a geometry must know of its model."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_length: int


class LayerRouting(NamedTuple):
    """What the routers of one layer decided for its queries and keys."""

    query: RouterOutput
    key: RouterOutput


# The output [B, H, T, D] (the operators' own type is a union), and the routing or None.
Attended = tuple[Any, LayerRouting | None]


class Geometry(nn.Module):
    """Causal attention without any position; subclasses override `transform` or `attend`."""

    def __init__(self, attention: AttentionConfig, shape: HeadShape):
        super().__init__()
        self.attention, self.shape = attention, shape

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
    ) -> tuple[Tensor, LayerRouting | None]:
        """q [B, T, H, D]; k, v [B, S, K, D], before any positional transform -> [B, T, H, D].

        Positions are as in `mosar_attention`; where none are given they count from 0 in each
        segment (a run of equal `segment_ids`), so that a segment is the same wherever it stands.
        With the layer's `cache` (see `attend_cached`) q, k and v are of new tokens alone, which
        follow those it has been given, and their `key_positions` are needed.
        """
        at_q, at_k = _positions(
            q, k, query_positions, key_positions, key_valid=key_valid, segment_ids=segment_ids
        )
        q, k = self.transform(q, k, at_q, at_k)
        options = {
            "routing": routing,
            "scale": scale,
            "softcap": softcap,
            "key_positions": key_positions,
            "key_valid": key_valid,
        }
        # Views: the kernels read any layout whose last dimension is contiguous.
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        differentiated = any(x.requires_grad for x in (q, k, v))
        if cache is not None and (cache.slots or not differentiated):
            out, layer_routing = self.attend_cached(q, k, v, cache, **options)
        else:
            options |= {"query_positions": query_positions, "segment_ids": segment_ids}
            out, layer_routing = self.attend(q, k, v, **options)
            if cache is not None:
                # Gradients pass through the first tokens; what is stored of them has none.
                self.store(
                    k.detach(), v.detach(), cache, layer_routing, routing, key_positions, key_valid
                )
        return out.transpose(1, 2), layer_routing

    def transform(self, q: Tensor, k: Tensor, at_q: Tensor, at_k: Tensor) -> tuple[Tensor, Tensor]:
        """q [B, T, H, D] at positions at_q [B or 1, T], and k likewise, each token on its own."""
        return q, k

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, *, routing: Routing, **options: Any
    ) -> Attended:
        """q [B, H, T, D]; k, v [B, K, S, D], transformed -> [B, H, T, D], and the routing if any.

        `options` are those of the operators: scale, softcap, positions, key_valid, segment_ids.
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
        **options: Any,
    ) -> Attended:
        """The same with k, v of new tokens only, which a `DenseLayerCache` adds to the others."""
        keys = self.store(k, v, cache, None, options["routing"], key_positions, key_valid)
        placement = {
            "query_positions": None if keys.positions is None else key_positions,
            "key_positions": keys.positions,
            "key_valid": keys.valid,
            "segment_ids": None,
        }
        return self.attend(q, keys.k, keys.v, **placement, **options)

    def store(
        self,
        k: Tensor,
        v: Tensor,
        cache: Any,
        routed: LayerRouting | None,
        routing: Routing,
        key_positions: Tensor | None,
        key_valid: Tensor | None,
    ) -> Any:
        """Adds k, v [B, K, S, D] of new tokens to the cache, and returns what its `update` does."""
        return cache.update(k, v, key_positions=key_positions, key_valid=key_valid)

    def init_parameter(self, name: str, parameter: Tensor, generator: torch.Generator) -> None:
        """Fills one of the geometry's own parameters: vectors with 0, the rest normal, std 0.02."""
        if parameter.dim() < 2:
            parameter.zero_()
        else:
            parameter.normal_(std=0.02, generator=generator)


class Rope(Geometry):
    """Rotation of q and k by their positions; below `rope_fraction` 1 the slowest do not turn."""

    def __init__(self, attention: AttentionConfig, shape: HeadShape):
        super().__init__(attention, shape)
        if shape.head_dim % 2:
            raise ValueError(f"rotation pairs dimensions: head_dim must be even, got {shape}")

    def transform(self, q: Tensor, k: Tensor, at_q: Tensor, at_k: Tensor) -> tuple[Tensor, Tensor]:
        settings = {
            "theta": self.attention.rope_theta,
            "fraction": self.attention.rope_fraction,
            "dtype": _wide(q),
        }
        turn_q = rotation(at_q, self.shape.head_dim, **settings)
        turn_k = turn_q if at_k is at_q else rotation(at_k, self.shape.head_dim, **settings)
        return rotate(q, *turn_q), rotate(k, *turn_k)


class Alibi(Geometry):
    """A bias of -slope * distance, one slope per head, and no rotation."""

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, *, routing: Routing, **options: Any
    ) -> Attended:
        slopes = torch.tensor(self.slopes(), dtype=_wide(q), device=q.device)
        return distance_attention(q, k, v, slopes=slopes, **options), None

    def slopes(self) -> list[float]:
        """One a query head."""
        return list(alibi_slopes(self.shape.num_heads))


class Fixed(Rope):
    """The gate of one regime for every pair, over RoPE; under "sparse" routing it ends there."""

    def __init__(self, attention: AttentionConfig, shape: HeadShape):
        super().__init__(attention, shape)
        self.config = attention.mosar_config(shape.max_length)
        self.regime = _regime(attention, self.config)
        if attention.num_sinks:
            raise ValueError(
                "num_sinks must be 0 where geometry is 'fixed': its bias is by distance"
            )

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, *, routing: Routing, **options: Any
    ) -> Attended:
        if not has_table(self.config):
            # So far a reach is a case for the operator that computes gates.
            pi_q, pi_k = (
                forced_routing(
                    self.config, self.regime, *x.shape[:3:2], dtype=_wide(q), device=q.device
                )
                for x in (q, k)
            )
            routing = "sparse" if routing == "sparse" else "top1"
            return mosar_attention(
                q, k, v, pi_q, pi_k, self.config, routing=routing, **options
            ), None
        log_gate = _log_gate(self.config, self.regime).to(q.device, _wide(q))
        everywhere = routing != "sparse" or self.regime == self.config.global_index
        window = None if everywhere else self.config.regimes[self.regime].reach
        out = distance_attention(
            q, k, v, log_gate=log_gate, log_gate_extends=True, window=window, **options
        )
        return out, None


class RopeMask(Rope):
    """RoPE inside a hard window: pairs farther than the regime's reach do not exist."""

    def __init__(self, attention: AttentionConfig, shape: HeadShape):
        super().__init__(attention, shape)
        config = attention.mosar_config(shape.max_length)
        self.window = config.regimes[_regime(attention, config)].reach

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, *, routing: Routing, **options: Any
    ) -> Attended:
        return distance_attention(q, k, v, window=self.window, **options), None


class MoSAR(Rope):
    """Routed regimes over RoPE: two routers read the rotated q and k, the gates follow."""

    def __init__(self, attention: AttentionConfig, shape: HeadShape):
        super().__init__(attention, shape)
        self.config = attention.mosar_config(shape.max_length)
        if shape.num_kv_heads % self.config.routing_groups:
            raise ValueError(
                f"routing_groups must divide num_kv_heads={shape.num_kv_heads}, "
                f"got {self.config.routing_groups}"
            )
        self.query_router = PostPositionRouter(shape.num_heads * shape.head_dim, self.config)
        self.key_router = PostPositionRouter(shape.num_kv_heads * shape.head_dim, self.config)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, *, routing: Routing, **options: Any
    ) -> Attended:
        if options["key_valid"] is not None:
            # What a padded slot holds must not reach the router's gradient.
            k = k.masked_fill(~options["key_valid"][:, None, :, None], 0)
        routed = self.route(q, k)
        if routing == "soft":
            pi_q, pi_k = routed.query.probabilities, routed.key.probabilities
        else:
            # Labels come from the logits: two may differ where their probabilities tie.
            pi_q, pi_k = top1_routing(routed.query.logits), top1_routing(routed.key.logits)
        return self.attend_routed(q, k, v, pi_q, pi_k, routing=routing, **options), routed

    def attend_routed(
        self, q: Tensor, k: Tensor, v: Tensor, pi_q: Tensor, pi_k: Tensor, **options: Any
    ) -> Any:
        """Attention along the routing, [B, H, T, D]."""
        return mosar_attention(q, k, v, pi_q, pi_k, self.config, **options)

    def attend_cached(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cache: Any,
        *,
        routing: Routing,
        key_positions: Tensor,
        key_valid: Tensor | None,
        **options: Any,
    ) -> Attended:
        """With a `RegimeLayerCache`, which attends itself."""
        routed, soft = self.route(q, k), routing == "soft"
        self.store(k, v, cache, routed, routing, key_positions, key_valid)
        out = cache.attend(
            q,
            routed.query.labels,
            key_positions,
            pi_q=routed.query.probabilities if soft else None,
            **options,
        )
        return out, routed

    def store(
        self,
        k: Tensor,
        v: Tensor,
        cache: Any,
        routed: LayerRouting | None,
        routing: Routing,
        key_positions: Tensor | None,
        key_valid: Tensor | None,
    ) -> None:
        """With the labels of the keys, under soft routing with their probabilities too."""
        assert routed is not None
        if cache.routing != routing:
            raise ValueError(
                f"the cache is for {cache.routing} routing, got routing={routing!r}; "
                "cache.set_routing changes it"
            )
        cache.update(
            k,
            v,
            routed.key.labels,
            pi_k=routed.key.probabilities.detach() if routing == "soft" else None,
            key_positions=key_positions,
            key_valid=key_valid,
        )

    def route(self, q: Tensor, k: Tensor) -> LayerRouting:
        """What each query and each key chooses; override it for another rule."""
        return LayerRouting(
            self.query_router(q.transpose(1, 2)), self.key_router(k.transpose(1, 2))
        )

    def init_parameter(self, name: str, parameter: Tensor, generator: torch.Generator) -> None:
        """W1 std 0.02, W2 std 1e-3, biases 0: routing starts nearly uniform."""
        if "bias" in name:
            parameter.zero_()
        else:
            parameter.normal_(std=1e-3 if "weight2" in name else 0.02, generator=generator)


def plain_attention(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, softcap: float | None, **placement: Any
) -> Any:
    """Causal attention without a bias: by our operator, or by torch's where that is the quicker.

    That is where it can compute the same (no soft-cap, plain causal): for one query a row anywhere,
    and off the CPU for any number. On the CPU ours is quicker then, forward and backward.
    """
    if softcap is None and all(value is None for value in placement.values()):
        if q.shape[2] == 1:
            # It reads every key: the query heads of a key head are so many queries of it.
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


def _wide(x: Tensor) -> torch.dtype:
    """The precision of tables for x: float32, or float64 where x is."""
    return torch.promote_types(x.dtype, torch.float32)


def _regime(attention: AttentionConfig, config: MoSARConfig) -> int:
    """The index of the one regime that a geometry without routers is fixed to."""
    if attention.regime is None:
        names = [regime.name for regime in config.regimes]
        raise ValueError(f"geometry {attention.geometry!r} needs a regime, one of {names}")
    return config.regime_index(attention.regime)


@kept_table
def _log_gate(config: MoSARConfig, regime: int) -> Tensor:
    """log g_mm(d) by distance, [1, length] float64; constant past its end."""
    distances = torch.arange(gate_extent(config))
    return RegimeKernel(config)(distances, torch.float64)[:, regime, regime].log()[None]


GEOMETRIES: dict[str, type[Geometry]] = {
    "rope": Rope,
    "p-rope": Rope,
    "alibi": Alibi,
    "fixed": Fixed,
    "rope-mask": RopeMask,
    "mosar": MoSAR,
}

VARIANTS: dict[str, AttentionConfig] = {
    "rope": AttentionConfig(geometry="rope"),
    "alibi": AttentionConfig(geometry="alibi"),
    "p-rope": AttentionConfig(geometry="p-rope", rope_fraction=0.75),
    "fixed-s": AttentionConfig(geometry="fixed", regime="S"),
    "fixed-m": AttentionConfig(geometry="fixed", regime="M"),
    "rope-m-mask": AttentionConfig(geometry="rope-mask", regime="M"),
    "mosar": AttentionConfig(geometry="mosar"),
    "mosar-cost": AttentionConfig(geometry="mosar", cost_weight=0.01, cost_warmup=500),
}
