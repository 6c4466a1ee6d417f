"""Switch attention: each query chooses full attention or a window; keys have no say.

    a MoSAR of two regimes, M and G, whose keys are all G and whose pair has the smaller reach

After Zhao et al., "Switch Attention" (2026). There training is hard from the start; here it is soft
like MoSAR's (hard with `hard_from`), and the price is the expected reach.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from mosar.core.config import Regime
from mosar.core.outputs import RouterOutput
from mosar.geometries.config import AttentionConfig
from mosar.geometries.geometry import HeadShape, LayerRouting, ParameterPart
from mosar.geometries.mosar import MoSAR

# A logit so low that its probability is 0 in float64.
_NEVER = -1e4


class Switch(MoSAR):
    """A window of N/4 or all of the past, chosen by the query's router."""

    learns = "a router of queries"
    decay = "no"
    source, checked = "Zhao et al. 2026 (Switch Attention)", "its law; mosar_attention"
    settings = MoSAR.settings - {"composition", "exponent", "ladder", "ladder_plateau"}

    def __init__(self, attention: AttentionConfig, shape: HeadShape):
        super().__init__(attention, shape)
        if self.config.composition != "min":
            raise ValueError(
                "composition must be min where geometry is 'switch' (the query decides), "
                f"got {self.config.composition!r}"
            )
        del self.key_router

    @classmethod
    def default_regimes(cls, max_length: int) -> tuple[Regime, ...] | None:
        return Regime("M", max_length / 4, 1.0), Regime("G", max_length, 1.0)

    def route(self, q: Tensor, k: Tensor) -> LayerRouting:
        query = self.query_router(q.transpose(1, 2))
        shape = (*query.logits.shape[:-2], k.shape[2])
        labels = torch.full(shape, self.config.global_index, device=k.device)
        one_hot = F.one_hot(labels, self.config.num_regimes).to(query.probabilities.dtype)
        return LayerRouting(query, RouterOutput((1 - one_hot) * _NEVER, one_hot))

    def parameter_parts(self) -> list[ParameterPart]:
        router = self.query_router
        first, second = router.weight1.numel(), router.weight2.numel()
        biases = router.bias1.numel() + router.bias2.numel()
        return [
            ParameterPart("query routers' first layer", first, first, "heads"),
            ParameterPart("routers' second layer", second + biases, second, "whole"),
        ]
