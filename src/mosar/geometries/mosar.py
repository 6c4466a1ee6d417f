"""MoSAR: routers choose each token's regime, and a pair's regimes choose its gate.

    bias_ij = log(pi_Q(q_i)^T G(i - j) pi_K(k_j)),  q and k after RoPE

Shapes: B batch, H query heads, K key/value heads, T queries, S keys, D head dim, R regimes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mosar.attention import Routing, attend
from mosar.core.bias import LabelBias, MixtureBias
from mosar.core.hard_domain import build_hard_domain
from mosar.core.losses import normalized_reach_cost
from mosar.core.routers import PostPositionRouter
from mosar.geometries.config import AttentionConfig
from mosar.geometries.geometry import Attended, HeadShape, LayerRouting, ParameterPart
from mosar.geometries.rope import Rope


class MoSAR(Rope):
    """Routed regimes over RoPE: two routers read the rotated q and k, the gates follow."""

    routed, family = True, "routing"
    settings = Rope.settings | {
        *("regimes", "router_hidden", "temperature", "barrier", "exponent", "epsilon"),
        *("composition", "routing_groups", "num_sinks", "cost_weight", "cost_warmup"),
    }

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

    def reaches(self) -> dict[str, float]:
        return {regime.name: regime.reach for regime in self.config.regimes}

    def count_pairs(
        self,
        shape: tuple[int, int],
        *,
        routing: str = "sparse",
        labels: tuple[Tensor, Tensor] | None = None,
        segment_ids: Tensor | None = None,
    ) -> tuple[int, int] | None:
        """Of the support that the labels give, whatever the routing evaluates beyond it."""
        assert labels is not None
        domain = build_hard_domain(*labels, self.config, segment_ids=segment_ids, materialize=False)
        return domain.count, domain.causal_count

    def price_basis(self, layers: Sequence[LayerRouting]) -> Tensor | None:
        """[2, L, R]: the mean probability of each regime, of queries and of keys."""
        routers = [layer.query for layer in layers] + [layer.key for layer in layers]
        means = [router.probabilities.flatten(0, -2).mean(dim=0) for router in routers]
        return torch.stack(means).unflatten(0, (2, len(layers)))

    def price(self, basis: Tensor) -> Tensor:
        """The expected reach; linear in the probabilities, so that of their means."""
        return normalized_reach_cost(basis[0], basis[1], self.config)

    def parameter_parts(self) -> list[ParameterPart]:
        first_q, first_k = (r.weight1.numel() for r in (self.query_router, self.key_router))
        routers = (self.query_router, self.key_router)
        second = sum(router.weight2.numel() for router in routers)
        biases = sum(router.bias1.numel() + router.bias2.numel() for router in routers)
        # A routing group is one rank's, with all that routes it.
        rest = "heads" if self.config.routing_groups > 1 else "whole"
        return [
            ParameterPart("query routers' first layer", first_q, first_q, "heads"),
            ParameterPart("key routers' first layer", first_k, first_k, "keys"),
            ParameterPart("routers' second layer", second + biases, second, rest),
        ]

    def split_obstacle(self, tensor: int) -> str | None:
        if type(self) is not MoSAR:
            name = self.attention.geometry
            return f": the geometry {name} routes by a rule of its own, which nothing divides"
        groups = self.config.routing_groups
        if groups == 1 or groups % tensor == 0:
            return None
        return (
            f" must divide attention.routing_groups={groups}, so that a group stays with one "
            "process"
        )

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        routing: Routing,
        hidden: Tensor | None = None,
        **options: Any,
    ) -> Attended:
        if options["key_valid"] is not None:
            # What a padded slot holds must not reach the router's gradient.
            k = k.masked_fill(~options["key_valid"][:, None, :, None], 0)
        routed = self._route(q, k, hidden)
        bias = routed.bias(self.config, routing)
        return self.attend_routed(q, k, v, bias, **options), routed

    def attend_routed(
        self, q: Tensor, k: Tensor, v: Tensor, bias: LabelBias | MixtureBias, **options: Any
    ) -> Any:
        """Attention along the routing, [B, H, T, D]."""
        return attend(q, k, v, bias, **options)

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
        hidden: Tensor | None = None,
        **options: Any,
    ) -> Attended:
        """With a `RegimeLayerCache`, which attends itself."""
        _check_routing(cache, routing)
        routed = self._route(q, k, hidden)
        options |= {"key_positions": key_positions, "key_valid": key_valid}
        return cache.attend_routed(q, k, v, routed, **options), routed

    def store(
        self,
        k: Tensor,
        v: Tensor,
        cache: Any,
        told: LayerRouting | Tensor | None,
        routing: Routing,
        key_positions: Tensor | None,
        key_valid: Tensor | None,
    ) -> None:
        """With the labels of the keys, under soft routing with their probabilities too."""
        assert isinstance(told, LayerRouting)
        _check_routing(cache, routing)
        cache.update_routed(k, v, told, key_positions=key_positions, key_valid=key_valid)

    def route(self, q: Tensor, k: Tensor) -> LayerRouting:
        """What each query and each key chooses; override it for another rule.

        It is given `hidden=` too where the geometry reads it.
        """
        return LayerRouting(
            self.query_router(q.transpose(1, 2)), self.key_router(k.transpose(1, 2))
        )

    def _route(self, q: Tensor, k: Tensor, hidden: Tensor | None) -> LayerRouting:
        return self.route(q, k, **({"hidden": hidden} if self.reads_hidden else {}))

    def init_parameter(self, name: str, parameter: Tensor, generator: torch.Generator) -> None:
        """W1 std 0.02, W2 std 1e-3, biases 0: routing starts nearly uniform."""
        if "bias" in name:
            parameter.zero_()
        else:
            parameter.normal_(std=1e-3 if "weight2" in name else 0.02, generator=generator)


def _check_routing(cache: Any, routing: Routing) -> None:
    if cache.routing != routing:
        raise ValueError(
            f"the cache is for {cache.routing} routing, got routing={routing!r}; "
            "cache.set_routing changes it"
        )
