"""MoSAR: routers choose each token's regime, and a pair's regimes choose its gate.

    bias_ij = log(pi_Q(q_i)^T G(i - j) pi_K(k_j)),  q and k after RoPE

Shapes: B batch, H query heads, K key/value heads, T queries, S keys, D head dim, R regimes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mosar.attention import Routing, attend
from mosar.core.bias import LabelBias, MixtureBias
from mosar.core.choice_gradient import sample_queries
from mosar.core.hard_domain import build_hard_domain
from mosar.core.losses import (
    expected_density,
    expected_discarded_mass,
    normalized_reach_cost,
)
from mosar.core.outputs import RoutingWithMass, regime_shares
from mosar.core.routers import PostPositionRouter
from mosar.geometries.config import AttentionConfig
from mosar.geometries.geometry import Attended, HeadShape, LayerRouting, ParameterPart
from mosar.geometries.rope import Rope

_FLOOR_LEVELS = 64


class MoSAR(Rope):
    """Routed regimes over RoPE: two routers read the rotated q and k, the gates follow."""

    routed, family = True, "routing"
    source, learns = "MoSAR", "routers of queries and keys"
    adaptive, decay = True, "learned"
    checked = "its law, and an independent oracle"
    settings = Rope.settings | {
        *("regimes", "router_hidden", "temperature", "barrier", "exponent", "floor", "epsilon"),
        *("composition", "routing_groups", "num_sinks", "cost_weight", "cost_warmup", "cost_of"),
        *("mass_weight", "hard_from", "router_queries", "floor_from", "floor_until"),
        *("start_regimes", "start_logit", "ladder", "ladder_plateau", "position_range"),
    }
    step: int | None = None
    """The current training step, if any."""
    progress: float = 1.0
    """How much of the training is done, from 0 to 1."""

    def __init__(self, attention: AttentionConfig, shape: HeadShape):
        super().__init__(attention, shape)
        self.config = attention.mosar_config(shape.max_length)
        groups, key_heads = self.config.routing_groups, shape.num_kv_heads
        if key_heads % groups:
            raise ValueError(f"routing_groups must divide num_kv_heads={key_heads}, got {groups}")
        for start in attention.start_regimes:
            self.config.regime_index(start)
        self.query_router = PostPositionRouter(shape.num_heads * shape.head_dim, self.config)
        self.key_router = PostPositionRouter(key_heads * shape.head_dim, self.config)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Attended:
        if self.training and torch.is_grad_enabled() and options.get("cache") is None:
            options.setdefault("position_offset", self.first_position)
        return super().forward(q, k, v, **options)

    @property
    def first_position(self) -> int:
        """Where the windows of this training step begin: the same in all layers and processes."""
        spare = round((self.attention.position_range - 1) * self.shape.max_length)
        if not spare or self.step is None:
            return 0
        generator = torch.Generator().manual_seed(self.step)
        return int(torch.randint(spare + 1, (), generator=generator))

    def reaches(self) -> dict[str, float]:
        return {regime.name: regime.reach for regime in self.config.regimes}

    def count_pairs(
        self,
        shape: tuple[int, int],
        *,
        routing: str = "sparse",
        labels: tuple[Tensor, Tensor] | None = None,
        segment_ids: Tensor | None = None,
    ) -> tuple[float, int] | None:
        """Of the support that the labels give, whatever the routing evaluates beyond it."""
        assert labels is not None
        domain = build_hard_domain(*labels, self.config, segment_ids=segment_ids, materialize=False)
        return domain.count, domain.causal_count

    def begin_step(self, step: int, steps: int) -> None:
        self.step, self.progress = step, step / steps
        if self.attention.floor != 1:
            self.config = replace(self.config, floor=self._floor())

    def _floor(self) -> float:
        """The floor's factor at this step, in few levels: each has tables of its own."""
        end, first = self.attention.floor, self.attention.floor_from
        if self.progress >= self.attention.floor_until:
            return end
        done = max(0.0, self.progress - first) / (self.attention.floor_until - first)
        return 1 - round(done * _FLOOR_LEVELS) / _FLOOR_LEVELS * (1 - end)

    @property
    def settings_now(self) -> AttentionConfig:
        """A checkpoint of before routing became hard, or the floor fell, is another model."""
        hard_from = self.attention.hard_from if self.is_hard else None
        return replace(self.attention, hard_from=hard_from, floor=self.config.floor)

    @property
    def is_hard(self) -> bool:
        """Whether training, and so soft routing, takes each token's first choice alone."""
        hard_from = self.attention.hard_from
        return hard_from is not None and self.progress >= hard_from

    def executed(self, routing: Routing) -> Routing:
        """A hard model has no floor beyond the reach, so its three routings are one operator.

        A soft model whose floor has fallen to 0 has two.
        """
        no_floor = routing == "top1" and self.config.floor == 0
        return "sparse" if self.is_hard or no_floor else routing

    def price_basis(
        self, layers: Sequence[LayerRouting], segment_ids: Tensor | None = None
    ) -> Tensor | None:
        """[L] expected densities, or the shares of the regimes that make the expected reach."""
        if self.attention.cost_of == "reach":
            return regime_shares(layers)
        routings = [(layer.query.probabilities, layer.key.probabilities) for layer in layers]
        return torch.stack([expected_density(*pi, self.config, segment_ids) for pi in routings])

    def price(self, basis: Tensor) -> Tensor:
        return basis.mean() if self.attention.cost_of == "pairs" else self.expected_reach(basis)

    def expected_reach(self, shares: Tensor) -> Tensor:
        """Linear in the probabilities: the reach of all tokens is that of their mean shares."""
        return normalized_reach_cost(shares[0], shares[1], self.config)

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
        if type(self).route is not MoSAR.route:
            name = self.attention.geometry
            return f": the geometry {name} routes by a rule of its own, which nothing divides"
        # Routers are divided as their heads.
        undivided = self._undivided([name for name, _ in self.named_parameters(recurse=False)])
        if undivided is not None:
            return undivided
        if self.attention.mass_weight:
            return f" does not go with attention.mass_weight={self.attention.mass_weight:g}"
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
        notes: Tensor | None = None,
        **options: Any,
    ) -> Attended:
        if options["key_valid"] is not None:
            # What a padded slot holds must not reach the router's gradient.
            k = k.masked_fill(~options["key_valid"][:, None, :, None], 0)
        routed = self._route(q, k, hidden)
        learns = torch.is_grad_enabled() and routed.query.probabilities.requires_grad
        if self.is_hard and routing == "soft" and learns:
            bias = routed.learned_bias(self.config, self._sampled_queries(q.shape[2], q.device))
        else:
            bias = routed.bias(self.config, self.executed(routing))
        if self.attention.mass_weight and learns and isinstance(bias, MixtureBias):
            mass = expected_discarded_mass(
                *(q, k, bias),
                queries=self._sampled_queries(q.shape[2], q.device),
                **options,
            )
            routed = RoutingWithMass(*routed)
            routed.discarded = mass
        of_key = self.key_bias(notes, options["key_valid"])
        if of_key is not None:
            assert isinstance(bias, LabelBias)
            bias = replace(bias, of_key=of_key)
        return self.attend_routed(q, k, v, bias, **options), routed

    def _sampled_queries(self, num_queries: int, device: torch.device) -> Tensor | None:
        """The queries that this step learns routing from, the same wherever it is computed."""
        if self.step is None:
            return None
        number, layer = self.attention.router_queries, self.shape.layer
        chosen = sample_queries(number, num_queries, step=self.step, layer=layer)
        return None if chosen is None else chosen.to(device)

    def attend_routed(
        self, q: Tensor, k: Tensor, v: Tensor, bias: LabelBias | MixtureBias, **options: Any
    ) -> Any:
        """Attention along the routing, [B, H, T, D]."""
        return attend(q, k, v, bias, **options)

    def key_bias(
        self, notes: Tensor | None, key_valid: Tensor | None, cache: Any = None
    ) -> Tensor | None:
        """[B, H, S] float64, what is added to every pair of a key; None: nothing.

        notes: of these keys; `cache` has those before them. Soft routing cannot have it.
        """
        return None

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
        notes: Tensor | None = None,
        **options: Any,
    ) -> Attended:
        """With a `RegimeLayerCache`, which attends itself."""
        _check_routing(cache, self.executed(routing))
        routed = self._route(q, k, hidden)
        options |= {"key_positions": key_positions, "key_valid": key_valid}
        options["of_key"] = self.key_bias(notes, key_valid, cache)
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
        notes: Tensor | None = None,
    ) -> None:
        """With the labels of the keys, under soft routing with their probabilities too."""
        assert isinstance(told, LayerRouting)
        _check_routing(cache, self.executed(routing))
        placement = {"key_positions": key_positions, "key_valid": key_valid}
        of_key = self.key_bias(notes, key_valid, cache)
        cache.update_routed(k, v, told, of_key=of_key, **placement)

    def route(self, q: Tensor, k: Tensor, hidden: Tensor | None = None) -> LayerRouting:
        """What each query and each key chooses; override it for another rule.

        It is given `hidden` only where the geometry reads it.
        """
        return LayerRouting(
            self.query_router(q.transpose(1, 2)), self.key_router(k.transpose(1, 2))
        )

    def _route(self, q: Tensor, k: Tensor, hidden: Tensor | None) -> LayerRouting:
        return self.route(q, k, **({"hidden": hidden} if self.reads_hidden else {}))

    def init_parameter(self, name: str, parameter: Tensor, generator: torch.Generator) -> None:
        """W1 std 0.02, W2 std 1e-3, biases 0 but for the regimes that groups start in."""
        starts = [self.config.regime_index(start) for start in self.attention.start_regimes]
        if "bias" in name:
            parameter.zero_()
            if starts and name.endswith("bias2"):
                for group in range(len(parameter)):
                    parameter[group, starts[group % len(starts)]] = self.attention.start_logit
        else:
            parameter.normal_(std=1e-3 if "weight2" in name else 0.02, generator=generator)


def _check_routing(cache: Any, routing: Routing) -> None:
    if cache.routing != routing:
        raise ValueError(
            f"the cache is for {cache.routing} routing, got routing={routing!r}; "
            "cache.set_routing changes it"
        )
