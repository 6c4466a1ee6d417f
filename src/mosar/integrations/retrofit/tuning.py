"""The second phase: routers learn from what the whole model predicts, under hard routing.

    loss = mean_t KL(dense model's next-token distribution || the routed model's) + mu · density

Labels are drawn from the routers' probabilities, only the pairs of their support are computed, and
the routers get what each other choice would have changed (mosar.core.choice_gradient). Drawing
matters: a token that reads a pair does not see, to first order, what losing it would cost, and one
that does not read it sees twice the gain. Where both choices are drawn, the two average to the
truth. The weights of the model stay frozen.

Shapes: G routing groups, T tokens, R regimes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mosar.core.bias import LabelBias
from mosar.core.outputs import LayerRouting
from mosar.core.routers import top1_routing
from mosar.integrations.retrofit.attach import DENSE, Retrofit
from mosar.integrations.retrofit.evaluate import next_token_logits
from mosar.integrations.retrofit.layer import RoutedLayer
from mosar.integrations.retrofit.objective import by_group, causal_pairs, expected_pairs

# Queries of a window whose other choices are weighed, and positions whose prediction is compared.
_QUERIES, _POSITIONS, _CHUNK = 512, 1024, 256


class TuningMeasure(NamedTuple):
    """What one window says of the whole model."""

    kl: float
    """In nats per token, of labels that were drawn."""
    density: Tensor
    """Of top-1 choices, per layer and group [L, G]."""


def tune(
    attached: Retrofit, window: Tensor, positions: Tensor, price: float, seed: int
) -> TuningMeasure:
    """Adds the gradient of one window [T] to the routers; `positions` [T] are its tokens'."""
    model: Any = attached.model
    window, positions = window.to(model.device)[None], positions.to(model.device)[None]
    generator = torch.Generator().manual_seed(seed)
    inputs = {"input_ids": window, "position_ids": positions, "use_cache": False}
    attached.set_routing(DENSE)
    with torch.no_grad():
        dense = model.base_model(**inputs).last_hidden_state[0]
    attached.set_routing("sparse")
    drawn = _Drawn(generator)
    with drawn.by(attached), torch.enable_grad():
        hidden = model.base_model(**inputs).last_hidden_state[0]
        kl, gradient = _divergence(model, hidden.detach(), dense, generator)
        cost = price * torch.stack(drawn.expected).mean()
        torch.autograd.backward([hidden, cost], [gradient, None])
    return TuningMeasure(kl, torch.stack(drawn.density))


def _divergence(
    model: Any, hidden: Tensor, dense: Tensor, generator: torch.Generator
) -> tuple[float, Tensor]:
    """KL per token at a sample of the positions, and its gradient with respect to `hidden`."""
    chosen = torch.randperm(len(hidden), generator=generator)[:_POSITIONS].to(hidden.device)
    given = hidden[chosen].requires_grad_()
    total = 0.0
    for some, exact in zip(given.split(_CHUNK), dense[chosen].split(_CHUNK), strict=True):
        with torch.no_grad():
            target = F.log_softmax(next_token_logits(model, exact), dim=-1)
        found = F.log_softmax(next_token_logits(model, some), dim=-1)
        kl = F.kl_div(found, target, reduction="sum", log_target=True) / len(chosen)
        kl.backward()
        total += float(kl.detach())
    assert given.grad is not None
    return total, torch.zeros_like(hidden).index_copy_(0, chosen, given.grad)


@dataclass
class _Drawn:
    """Draws every token's label, and keeps what the layers would read."""

    generator: torch.Generator
    expected: list[Tensor] = field(default_factory=list)
    density: list[Tensor] = field(default_factory=list)

    @contextmanager
    def by(self, attached: Retrofit) -> Iterator[None]:
        """While the layers of `attached` take these labels."""
        for layer in attached:
            layer.labelling = self.bias
        try:
            yield
        finally:
            for layer in attached:
                layer.labelling = None

    def bias(self, layer: RoutedLayer, routed: LayerRouting) -> LabelBias:
        pi_q, pi_k = (by_group(x.probabilities) for x in routed)
        queries = torch.arange(pi_q.shape[1], device=pi_q.device)
        support = {"queries": queries, "config": layer.config, "window": layer.window}
        causal = causal_pairs(queries, layer.window).float().mean()
        self.expected.append(expected_pairs(pi_q, pi_k, **support).mean() / causal)
        with torch.no_grad():
            hard_q, hard_k = (top1_routing(by_group(x.logits)) for x in routed)
            self.density.append(expected_pairs(hard_q, hard_k, **support).mean(dim=1) / causal)
        number = min(_QUERIES, len(queries))
        order = torch.randperm(len(queries), generator=self.generator)[:number]
        bias = routed.learned_bias(layer.config, order.sort().values.to(pi_q.device))
        return replace(
            bias,
            query=self._draw(routed.query.logits, layer).view_as(bias.query),
            key=self._draw(routed.key.logits, layer).view_as(bias.key),
        )

    def _draw(self, logits: Tensor, layer: RoutedLayer) -> Tensor:
        """Labels with the probabilities softmax(logits / temperature)."""
        noise = torch.empty(logits.shape).exponential_(generator=self.generator).log()
        scaled = logits.detach() / layer.config.temperature
        return (scaled - noise.to(logits.device)).argmax(dim=-1)
