"""The objective: L_LM + lambda(t) price + mu(t) mass, and its gradient without all logits at once.

    L_LM      mean cross-entropy of the next token (in a task: of the answer tokens)
    price     the geometry's price (MoSAR: the expected reach, or expected pairs), or none
    mass      the attention that sparse execution would drop, if `attention.mass_weight` is set
    lambda(t) grows linearly to `attention.cost_weight` over `attention.cost_warmup` steps; mu(t)
              grows to `attention.mass_weight` in the same way

Shapes: B windows, T tokens each, N = B·T, C hidden size, V vocabulary, L layers, R regimes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mosar.core.losses import warmed_up
from mosar.core.outputs import RoutingWithMass, regime_shares
from mosar.geometries import MoSAR
from mosar.kernels.elementwise import cross_entropy_
from mosar.model.decoder import Decoder
from mosar.training.config import RunConfig


@dataclass(frozen=True)
class Terms:
    """The results of a pass; means over its tokens."""

    loss: Tensor
    """The objective, to differentiate."""
    lm_loss: Tensor
    expected_reach: Tensor | None
    """The expected reach of all tokens; without routers, the geometry's price, if it has one."""
    shares: Tensor | None
    """[2, L, R]: mean probability of each regime, of queries and of keys; None without routers."""


class Objective:
    """The objective of a run, the same for every variant."""

    def __init__(self, config: RunConfig):
        self.steps = config.train.decay_steps or config.train.steps
        self.cost_weight_end = config.attention.cost_weight
        self.mass_weight_end = config.attention.mass_weight
        self.cost_warmup = config.attention.cost_warmup
        self.softcap = config.model.final_softcap
        self.loss_chunk = config.train.loss_chunk
        self.checkpoint_activations = config.train.checkpoint_activations
        self.merge_basis: Callable[[Tensor], Tensor] | None = None
        """Averages price bases over the processes that have different heads, if there are any."""

    def cost_weight(self, step: int) -> float:
        """lambda in update number `step` >= 1; it has its full value from `cost_warmup` on."""
        return warmed_up(self.cost_weight_end, self.cost_warmup, step)

    def __call__(
        self,
        decoder: Decoder,
        tokens: Tensor,
        segment_ids: Tensor | None,
        scored: Tensor | None = None,
        *,
        step: int,
    ) -> Terms:
        """The terms of tokens [B, T + 1], segment_ids [B, T] or None.

        scored [B, T] bool: which targets count in the loss; None: all of them.
        """
        decoder.begin_step(step, self.steps)
        checkpoint = self.checkpoint_activations and torch.is_grad_enabled()
        output = decoder(tokens[:, :-1], segment_ids=segment_ids, checkpoint_activations=checkpoint)
        hidden, targets = output.hidden.flatten(0, 1), tokens[:, 1:].flatten()
        if scored is not None:
            chosen = scored.flatten().nonzero()[:, 0]
            hidden, targets = hidden[chosen], targets[chosen]
        lm_loss = linear_cross_entropy(
            hidden,
            decoder.embedding.weight,
            targets,
            softcap=self.softcap,
            chunk=self.loss_chunk,
        )
        weight = self.cost_weight(step)
        geometry = decoder.geometries[0]
        with torch.set_grad_enabled(torch.is_grad_enabled() and weight != 0):
            basis = geometry.price_basis(output.routings or output.prices, segment_ids)
            if basis is None:
                return Terms(lm_loss, lm_loss.detach(), None, None)
            basis = self._merged(basis)
            price = geometry.price(basis)
        # With a weight of 0, the loss is that of the language model, bit for bit.
        loss = lm_loss + weight * price if weight else lm_loss
        masses = [r.discarded for r in output.routings if isinstance(r, RoutingWithMass)]
        if masses:
            mass_weight = warmed_up(self.mass_weight_end, self.cost_warmup, step)
            loss = loss + mass_weight * torch.stack(masses).mean()
        if not geometry.routed:
            return Terms(loss, lm_loss.detach(), price.detach(), None)
        if geometry.attention.cost_of == "reach":
            # The price is the expected reach, which was computed from the shares.
            return Terms(loss, lm_loss.detach(), price.detach(), basis.detach())
        with torch.no_grad():
            shares = self._merged(regime_shares(output.routings))
            reach = cast(MoSAR, geometry).expected_reach(shares)
        return Terms(loss, lm_loss.detach(), reach, shares)

    def _merged(self, basis: Tensor) -> Tensor:
        return basis if self.merge_basis is None else self.merge_basis(basis)


# A chunk of logits should fit into the cache, but each chunk reads and writes the whole head.
_CHUNK_LOGITS, _MIN_CHUNK = 1 << 21, 256


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, softcap: float | None, chunk: int = 0
) -> Tensor:
    """Mean cross-entropy of cap(hidden @ weight.T) [N, V] against targets [N], in float32 or wider.

    hidden [N, C], weight [V, C]. At most `chunk` rows of the logits exist at a time (0: a number
    that is fast). The gradient is computed together with the value, chunk by chunk.
    """
    rows = chunk or max(_MIN_CHUNK, _CHUNK_LOGITS // len(weight))
    return _LinearCrossEntropy.apply(hidden, weight, targets, softcap, rows)  # pyright: ignore[reportReturnType]


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        hidden_NC: Tensor,
        weight_VC: Tensor,
        targets_N: Tensor,
        softcap: float | None,
        rows: int,
    ) -> Tensor:
        device = hidden_NC.device.type
        narrow = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        with torch.autocast(device, enabled=False):
            weight = weight_VC if narrow is None else weight_VC.to(narrow)
            dhidden_NC = torch.empty_like(hidden_NC) if ctx.needs_input_grad[0] else None
            dweight_VC = torch.zeros_like(weight_VC) if ctx.needs_input_grad[1] else None
            wide = torch.promote_types(hidden_NC.dtype, torch.float32)
            total = torch.zeros((), dtype=wide, device=hidden_NC.device)
            for start in range(0, len(hidden_NC), rows):
                chunk = slice(start, start + rows)
                hidden = hidden_NC[chunk].to(weight.dtype)
                # Divide the few hidden numbers instead of the many logits.
                scaled = hidden if softcap is None else hidden / softcap
                scores_nV = scaled @ weight.T
                total += cross_entropy_(scores_nV, targets_N[chunk], softcap, 1 / len(hidden_NC))
                # The scores are gradients now.
                if dhidden_NC is not None:
                    dhidden_NC[chunk] = scores_nV @ weight
                if dweight_VC is not None and narrow is None:
                    dweight_VC.addmm_(scores_nV.T, hidden)
                elif dweight_VC is not None:
                    dweight_VC += scores_nV.T @ hidden
        ctx.save_for_backward(dhidden_NC, dweight_VC)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx, dloss: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        # In place, because nothing else uses these two tensors.
        gradients = (None if d is None else d.mul_(dloss) for d in ctx.saved_tensors)
        return *gradients, None, None, None
