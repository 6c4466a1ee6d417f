"""L = L_LM + lambda(t) L_cost in Megatron, where no place sees the loss and all layers at once.

A layer adds the gradient of its share of lambda L_cost where its output passes in the backward
pass; so recomputed activations and pipeline stages need nothing special. How much a unit of the
loss weighs (microbatches, fp16 loss scaling) is read off where the backward pass begins.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mosar.core.losses import warmed_up


class MoSARObjectiveState:
    """The weight of the reach cost over training, and the cost of the last forward pass."""

    def __init__(
        self,
        cost_weight: float = 0.0,
        cost_warmup: int = 500,
        cost_of: Literal["reach", "pairs"] = "reach",
    ):
        """lambda grows linearly to `cost_weight` over `cost_warmup` steps.

        cost_of: what has the price, the expected reach of a token or the expected pairs of the
        support.
        """
        if cost_of not in ("reach", "pairs"):
            raise ValueError(f"cost_of must be reach or pairs, got {cost_of!r}")
        self.cost_of = cost_of
        for name, value in (("cost_weight", cost_weight), ("cost_warmup", cost_warmup)):
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0:
                raise ValueError(f"{name} must be a number >= 0, got {value!r}")
        self.final_cost_weight, self.cost_warmup = float(cost_weight), int(cost_warmup)
        self.step = 1
        """The update that is being made, from 1; the training loop sets it."""
        self.gradient_scale: float | Tensor | None = None
        """d(what is differentiated) / d(mean loss): set by `objective` in each backward pass. A
        pipeline stage without the loss sets it itself: grad scale / number of microbatches."""
        self._costs: dict[int, Tensor] = {}
        self._num_layers = 0

    @property
    def cost_weight(self) -> float:
        """lambda in update number `step`; it is whole from step `cost_warmup` on."""
        return warmed_up(self.final_cost_weight, self.cost_warmup, self.step)

    def attach(self, model: torch.nn.Module | Iterable[torch.nn.Module]) -> None:
        """Collects the costs of all MoSAR layers of a model (or of its chunks) from now on."""
        chunks = [model] if isinstance(model, torch.nn.Module) else list(model)
        layers: list[Any] = [
            module
            for chunk in chunks
            for module in chunk.modules()
            if getattr(module, "has_reach_cost", False)
        ]
        if not layers:
            raise ValueError(
                "the model has no MoSAR layer: build it with the spec that mosar_layer_spec gives"
            )
        self._num_layers = layers[0].config.num_layers
        self._costs.clear()
        for layer in layers:
            layer.objective = self

    def collect(self, output: Tensor, cost: Tensor, layer_number: int) -> Tensor:
        """`output` as it is; its backward pass brings the gradient of the cost along."""
        self._costs[layer_number] = cost.detach()
        weight = self.cost_weight / max(self._num_layers, 1)
        if not weight or not cost.requires_grad:
            # A weight of 0 leaves the routers to the language model's loss alone, bit for bit.
            return output
        return _BringCost.apply(output, cost, self, weight)  # pyright: ignore[reportReturnType]

    @property
    def cost(self) -> Tensor:
        """L_cost of the last forward pass, without gradient: the mean over this stage's layers."""
        if not self._costs:
            raise ValueError("no forward pass yet: attach the state to the model, and run it")
        return torch.stack(list(self._costs.values())).mean()

    def objective(self, lm_loss: Tensor, *, count: float | Tensor = 1.0) -> Tensor:
        """lm_loss + lambda L_cost, to differentiate instead of `lm_loss`.

        `lm_loss` is a mean over tokens, or with `count` the sum of so many tokens' losses.
        """
        if not self.cost_weight or not self._costs:
            return lm_loss
        cost = self.cost.to(lm_loss.device, torch.float32)
        return _Objective.apply(lm_loss, self.cost_weight * cost * count, self, count)  # pyright: ignore[reportReturnType]


class _Objective(torch.autograd.Function):
    @staticmethod
    def forward(ctx, lm_loss, cost, state, count):  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.state, ctx.count = state, count
        return lm_loss + cost

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.state.gradient_scale = gradient * ctx.count
        return gradient, None, None, None


class _BringCost(torch.autograd.Function):
    @staticmethod
    def forward(ctx, output, cost, state, weight):  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.state, ctx.weight = state, weight
        ctx.like = torch.empty_like(cost)
        return output.view_as(output)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Any):  # pyright: ignore[reportIncompatibleMethodOverride]
        scale = ctx.state.gradient_scale
        if scale is None:
            raise RuntimeError(
                "the weight of the loss is unknown: differentiate state.objective(lm_loss), or on "
                "a pipeline stage without the loss set state.gradient_scale"
            )
        return gradient, torch.ones_like(ctx.like) * scale * ctx.weight, None, None
