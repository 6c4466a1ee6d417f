"""Routers turn a token's post-positional heads into a distribution over regimes.

    pi = softmax((W2 GELU(W1 x + b1) + b2) / tau),   x = all heads of the token, concatenated

Queries and keys have separate routers; keys are read unexpanded (before any GQA repetition). With
Gr routing groups, each group of heads has its own MLP. Routers compute in float32 (in float64 for a
float64 module), whatever the dtype of the module or of autocast.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mosar.core.config import MoSARConfig, check_config
from mosar.core.inputs import without_autocast
from mosar.core.layout import is_traced
from mosar.core.outputs import RouterOutput


class PostPositionRouter(nn.Module):
    """One router (of queries or of keys) of one layer."""

    def __init__(self, input_dim: int, config: MoSARConfig):
        """`input_dim` is heads x head_dim; it must split evenly over the routing groups."""
        super().__init__()
        check_config(config)
        groups = config.routing_groups
        if not isinstance(input_dim, int) or input_dim < 1 or input_dim % groups:
            raise ValueError(
                f"input_dim must be a positive multiple of routing_groups={groups}, got {input_dim}"
            )
        self.input_dim = input_dim
        self.config = config
        hidden, regimes = config.router_hidden, config.num_regimes
        self.weight1 = nn.Parameter(torch.empty(groups, hidden, input_dim // groups))
        self.bias1 = nn.Parameter(torch.empty(groups, hidden))
        self.weight2 = nn.Parameter(torch.empty(groups, regimes, hidden))
        self.bias2 = nn.Parameter(torch.empty(groups, regimes))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """W1 std 0.02, W2 std 1e-3, biases 0: routing starts nearly uniform."""
        nn.init.normal_(self.weight1, std=0.02)
        nn.init.normal_(self.weight2, std=1e-3)
        nn.init.zeros_(self.bias1)
        nn.init.zeros_(self.bias2)

    def forward(self, x: Tensor) -> RouterOutput:
        """x [B, T, heads, D] or [B, T, heads * D] -> [B, T, R] (or [B, Gr, T, R] for Gr > 1)."""
        if not isinstance(x, Tensor) or not x.is_floating_point():
            kind = x.dtype if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(f"x must be a floating-point tensor, got {kind}")
        if x.dim() not in (3, 4) or x.shape[2:].numel() != self.input_dim:
            raise ValueError(
                f"x must be [B, T, heads, D] or [B, T, heads*D] with heads*D = {self.input_dim}, "
                f"got {list(x.shape)}"
            )
        groups = self.config.routing_groups
        if x.dim() == 4 and x.shape[2] % groups:
            raise ValueError(f"x has {x.shape[2]} heads, not a multiple of {groups} routing groups")
        parameters = (self.weight1, self.bias1, self.weight2, self.bias2)
        learns = torch.is_grad_enabled() and any(t.requires_grad for t in (x, *parameters))
        if not learns or is_traced():
            return self._decide(x, *parameters)
        # The backward pass recomputes the hidden layer instead of storing it.
        return checkpoint(
            self._decide, x, *parameters, use_reentrant=False, preserve_rng_state=False
        )  # pyright: ignore[reportReturnType]

    def _decide(
        self, x: Tensor, weight1: Tensor, bias1: Tensor, weight2: Tensor, bias2: Tensor
    ) -> RouterOutput:
        hidden_BGTH = router_projection(x, weight1)
        return router_decision(hidden_BGTH, bias1, weight2, bias2, self.config.temperature)

    def extra_repr(self) -> str:
        return (
            f"input_dim={self.input_dim}, hidden={self.config.router_hidden}, "
            f"regimes={self.config.num_regimes}, groups={self.config.routing_groups}"
        )


def router_projection(x: Tensor, weight1: Tensor) -> Tensor:
    """W1 x: [B, T, ...] and [Gr, H, I] -> [B, Gr, T, H]; linear in x, so partial sums add up."""
    with without_autocast(x):
        x_BTGI = x.reshape(*x.shape[:2], weight1.shape[0], -1).to(_wide(weight1))
        return torch.einsum("btgi,ghi->bgth", x_BTGI, weight1.to(x_BTGI.dtype))


def router_decision(
    hidden_BGTH: Tensor, bias1: Tensor, weight2: Tensor, bias2: Tensor, temperature: float
) -> RouterOutput:
    """The steps after W1 x: bias, GELU, the second layer, softmax."""
    dtype = hidden_BGTH.dtype
    with without_autocast(hidden_BGTH):
        hidden_BGTH = F.gelu(hidden_BGTH + bias1.to(dtype)[:, None])
        logits_BGTR = torch.einsum("bgth,grh->bgtr", hidden_BGTH, weight2.to(dtype))
        logits_BGTR = logits_BGTR + bias2.to(dtype)[:, None]
        logits = logits_BGTR.squeeze(1) if len(weight2) == 1 else logits_BGTR
        return RouterOutput(logits, torch.softmax(logits / temperature, dim=-1))


def _wide(weight: Tensor) -> torch.dtype:
    return torch.float64 if weight.dtype == torch.float64 else torch.float32


def top1_routing(probabilities: Tensor) -> Tensor:
    """One-hot top-1 routing of the same shape and dtype, lowest index on ties; no gradient."""
    given = probabilities.shape if isinstance(probabilities, Tensor) else probabilities
    if not isinstance(given, torch.Size) or not given or not given[-1]:
        raise ValueError(
            f"probabilities must be a tensor [..., R], or logits of that shape, got {given!r}"
        )
    labels = probabilities.detach().argmax(dim=-1)
    return F.one_hot(labels, probabilities.shape[-1]).to(probabilities.dtype)


def forced_routing(
    config: MoSARConfig,
    regime: str | int,
    batch: int,
    length: int,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> Tensor:
    """Every token in one regime (a name or an index): one-hot [B, T, R], as in Fixed-S/M/G."""
    check_config(config)
    index = config.regime_index(regime) if isinstance(regime, str) else regime
    if not isinstance(index, int) or isinstance(index, bool):
        raise ValueError(f"regime must be a name or an index, got {regime!r}")
    if batch < 0 or length < 0:
        raise ValueError(f"batch and length must not be negative, got {batch} and {length}")
    if not 0 <= index < config.num_regimes:
        raise ValueError(f"regime must be an index below {config.num_regimes}, got {regime!r}")
    routing = torch.zeros(batch, length, config.num_regimes, dtype=dtype, device=device)
    routing[..., index] = 1
    return routing
