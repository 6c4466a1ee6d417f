"""The worth field: how much a pair (i, j) counts before its similarity is known.

    W_ij = pi_Q(i)^T G(i - j) pi_K(j) in [floor e^-B, 1]      bias_ij = log max(W_ij, epsilon)

W is a mixture of gates, not of biases, and is not normalised over keys. All heads of a group share
it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mosar.core.config import MoSARConfig
from mosar.core.inputs import without_autocast
from mosar.core.outputs import WorthFieldOutput
from mosar.core.regimes import RegimeKernel


class WorthField(nn.Module):
    """The worth and bias of every pair, from the routing of both ends and their distance."""

    def __init__(self, config: MoSARConfig):
        super().__init__()
        self.config = config
        self.kernel = RegimeKernel(config)

    def forward(self, pi_q: Tensor, pi_k: Tensor, distances: Tensor) -> WorthFieldOutput:
        """pi_q [..., T, R], pi_k [..., S, R], distances [T, S] or [..., T, S] -> [..., T, S].

        Leading dimensions broadcast; the contraction runs in the wider dtype of the two routings,
        at least float32.
        """
        regimes, sizes = self.config.num_regimes, (pi_q.shape[-2:-1], pi_k.shape[-2:-1])
        if pi_q.shape[-1:] != (regimes,) or pi_k.shape[-1:] != (regimes,):
            raise ValueError(
                f"pi_q and pi_k must end in {regimes} regimes, "
                f"got {list(pi_q.shape)} and {list(pi_k.shape)}"
            )
        if distances.shape[-2:] != torch.Size([*sizes[0], *sizes[1]]):
            raise ValueError(
                f"distances must end in [T, S] = {[*sizes[0], *sizes[1]]}, "
                f"got {list(distances.shape)}"
            )
        dtype = torch.promote_types(torch.promote_types(pi_q.dtype, pi_k.dtype), torch.float32)
        with without_autocast(pi_q):
            gate_TSRR = self.kernel(distances, dtype)
            worth = torch.einsum(
                "...tm,...tsmn,...sn->...ts", pi_q.to(dtype), gate_TSRR, pi_k.to(dtype)
            )
            return WorthFieldOutput(worth, worth.clamp_min(self.config.epsilon).log())
