"""The attention layers of a pretrained model: those with routers, and local ones without.

A layer with routers may also have low-rank changes of its projections (LoRA), which are off under
"dense" routing. Routers and low-rank changes are not submodules of the model. So the base model
keeps its parameters, its state dict and its dtype, and ours stay in float32 when it is cast.

Shapes: B batch, H query heads, K key/value heads, T queries, S keys, D head dim.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mosar.attention import attend, distance_attention
from mosar.core.bias import LabelBias, MixtureBias
from mosar.core.config import MoSARConfig
from mosar.core.outputs import RouterOutput
from mosar.core.routers import PostPositionRouter
from mosar.errors import ModelError
from mosar.geometries import LayerRouting

NAME = "mosar_retrofit"
"""The name under which transformers registers the attention function of routed layers."""
# exp(-40) is far below the rounding of 1 in float32: the global regime has all of the probability.
SATURATED = 40.0


class OutputProjection:
    """What a layer makes of its heads' outputs before it adds them to the residual stream."""

    def __init__(self, output: Any, norm: nn.Module | None):
        """norm: a norm of the attention's output (Gemma 2), None: there is none."""
        self.output, self.norm = output, norm

    def __call__(self, heads: Tensor) -> Tensor:
        """[..., H * D] -> [..., hidden]."""
        added = self.output(heads.to(self.output.weight.dtype))
        return added if self.norm is None else self.norm(added)


# Called with the layer, its q [B, H, T, D], k, v [B, K, S, D] and the operators' options.
Observer = Callable[["RoutedLayer", Tensor, Tensor, Tensor, dict[str, Any]], None]
# Called with the layer and what its routers say; the labels that it takes instead.
Labelling = Callable[["RoutedLayer", LayerRouting], LabelBias]


class LowRank(nn.Module):
    """A change of a frozen linear map: x -> up (down x). up is 0 at first: no change."""

    def __init__(self, inputs: int, outputs: int, rank: int, generator: torch.Generator):
        super().__init__()
        down = torch.randn(rank, inputs, generator=generator) / math.sqrt(inputs)
        self.down = nn.Parameter(down)
        self.up = nn.Parameter(torch.zeros(outputs, rank))

    def forward(self, x: Tensor) -> Tensor:
        """[..., inputs] -> [..., outputs], float32."""
        return F.linear(F.linear(x.float(), self.down), self.up)


class AttentionLayer(nn.Module):
    """One layer of the model: its part of a pass and of the cache."""

    def __init__(
        self, config: MoSARConfig, *, index: int, num_heads: int, num_kv_heads: int, head_dim: int
    ):
        super().__init__()
        self.config, self.index = config, index
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.window: int | None = None
        """The largest distance in the last pass, None: all keys; every pass sets it."""
        self.routing = "dense"
        self.cache: Any = None
        self.waiting = False
        """Whether the module is in a pass and has not called attention yet."""

    def route(self, q: Tensor, k: Tensor) -> LayerRouting:
        """What each query of q [B, H, T, D] and each key of k [B, K, S, D] chooses."""
        raise NotImplementedError

    def attend(self, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> Tensor:
        """[B, H, T, D], without a cache; options: those of the operators."""
        raise NotImplementedError

    def begin_pass(self, module: Any, args: tuple, kwargs: dict[str, Any]) -> None:
        """Before the module attends: finds the layer's own part of the cache."""
        # GPT-NeoX has a name of its own for it.
        cache = kwargs.get("past_key_values", kwargs.get("layer_past"))
        self.waiting = module.config._attn_implementation == NAME
        self.cache = None
        if cache is not None and self.routing != "dense":
            self.cache = cache.layers[self.index]

    def check_attended(self, module: nn.Module, args: tuple, output: Any) -> None:
        """After the module: refuses one that did not call attention."""
        if self.waiting:
            raise ModelError(
                f"{type(module).__name__} does not call transformers' attention function, so that "
                "its routers would have no effect; this model cannot be retrofitted"
            )

    def _sizes(self) -> dict[str, int]:
        return {
            "index": self.index,
            "num_heads": self.num_heads,
            "num_kv_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
        }


class LocalLayer(AttentionLayer):
    """A layer whose own window is short already: it keeps the window and gets no routers."""

    def route(self, q: Tensor, k: Tensor) -> LayerRouting:
        """All of them the global regime: only the window limits what is read."""
        return LayerRouting(self._all_global(q), self._all_global(k))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> Tensor:
        return distance_attention(q, k, v, **options)  # pyright: ignore[reportReturnType]

    def _all_global(self, x: Tensor) -> RouterOutput:
        """Of x [B, heads, T, D], [B, T, R]."""
        one_hot = x.new_zeros(x.shape[0], x.shape[2], self.config.num_regimes, dtype=torch.float32)
        one_hot[..., -1] = 1
        return RouterOutput(one_hot * SATURATED, one_hot)

    def __deepcopy__(self, memo: dict[int, Any]) -> LocalLayer:
        copy = LocalLayer(self.config, **self._sizes())
        copy.routing, copy.window = self.routing, self.window
        memo[id(self)] = copy
        return copy


class RoutedLayer(AttentionLayer):
    """A layer with a query and a key router."""

    def __init__(
        self,
        config: MoSARConfig,
        *,
        index: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        project: Callable[[Tensor], Tensor] | None = None,
        lora: int = 0,
        projections: Mapping[str, tuple[int, int]] | None = None,
    ):
        """project: the heads' outputs [..., H * D] to what is added to the residual stream.

        lora: the rank of the changes of `projections`, by name: (inputs, outputs).
        """
        if num_kv_heads % config.routing_groups:
            raise ValueError(
                f"routing_groups must divide the {num_kv_heads} key/value heads of layer {index}, "
                f"got {config.routing_groups}"
            )
        super().__init__(
            config, index=index, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim
        )
        self.query_router = PostPositionRouter(num_heads * head_dim, config)
        self.key_router = PostPositionRouter(num_kv_heads * head_dim, config)
        self.project = project
        self._projections = dict(projections or {}) if lora else {}
        generator = torch.Generator().manual_seed(index)
        self.lora = nn.ModuleDict(
            {name: LowRank(*size, lora, generator) for name, size in self._projections.items()}
        )
        self.residual: Tensor | None = None
        """The residual stream that the layer reads, [B, T, hidden], while an observer looks on."""
        self.observer: Observer | None = None
        self.labelling: Labelling | None = None
        """Training only: labels that are drawn, and probabilities that learn from them."""
        self.make_global(torch.Generator().manual_seed(index))

    @property
    def routers(self) -> tuple[PostPositionRouter, PostPositionRouter]:
        return self.query_router, self.key_router

    @torch.no_grad()
    def make_global(self, generator: torch.Generator) -> None:
        """Every token global, exactly: the last regime's probability is 1 in float32."""
        for router in self.routers:
            router.weight1.normal_(std=0.02, generator=generator)
            router.bias1.zero_()
            router.weight2.zero_()
            router.bias2.zero_()
            router.bias2[:, -1] = SATURATED

    def route(self, q: Tensor, k: Tensor) -> LayerRouting:
        if self.query_router.weight1.device != q.device:
            self.to(q.device)
        return LayerRouting(
            self.query_router(q.transpose(1, 2)), self.key_router(k.transpose(1, 2))
        )

    @property
    def rank(self) -> int:
        """Of the low-rank changes; 0: there are none."""
        return next((len(part.down) for part in self.lora.values()), 0)  # pyright: ignore

    def adapt(self, name: str, module: nn.Module, args: tuple, output: Tensor) -> Tensor | None:
        """After a projection: adds its low-rank change, unless the routing is "dense"."""
        if self.routing == "dense":
            return None
        change = self.lora[name]
        if change.down.device != output.device:
            self.to(output.device)
        return output + change(args[0]).to(output.dtype)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> Tensor:
        if self.observer is not None:
            self.observer(self, q, k, v, options)
        if self.routing == "dense":
            return distance_attention(q, k, v, **options)  # pyright: ignore[reportReturnType]
        return attend(q, k, v, self.bias(q, k), **options)

    def bias(self, q: Tensor, k: Tensor) -> LabelBias | MixtureBias:
        """What the operators add to the scores."""
        if self.labelling is None:
            return self.route(q, k).bias(self.config, self.routing)
        # The choices of this layer learn from its own output alone, not through its inputs.
        return self.labelling(self, self.route(q.detach(), k.detach()))

    def keep_residual(self, block: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        """Before a block: keeps the residual stream, while an observer looks on."""
        if self.observer is not None:
            self.residual = args[0] if args else kwargs["hidden_states"]

    def __deepcopy__(self, memo: dict[int, Any]) -> RoutedLayer:
        # A copy shares neither the cache of the last pass nor the observer.
        copy = RoutedLayer(
            self.config,
            **self._sizes(),
            project=deepcopy(self.project, memo),
            lora=self.rank,
            projections=self._projections,
        )
        copy.to(self.query_router.weight1.device).load_state_dict(self.state_dict())
        copy.routing, copy.window = self.routing, self.window
        memo[id(self)] = copy
        return copy
