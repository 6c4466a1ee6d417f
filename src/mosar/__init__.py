"""MoSAR: attention that learns how far each token needs to look.

Names are loaded on first use, so that `mosar --help` does not wait for torch.
"""

from typing import TYPE_CHECKING

from mosar.lazy import load_on_use
from mosar.version import __version__

if TYPE_CHECKING:
    from mosar.attention import distance_attention, mosar_attention
    from mosar.core.config import MoSARConfig, Regime
    from mosar.core.hard_domain import build_hard_domain
    from mosar.core.losses import normalized_reach_cost
    from mosar.core.reference_attention import MoSARReferenceAttention
    from mosar.core.regimes import RegimeKernel, pair_geometry
    from mosar.core.routers import PostPositionRouter, forced_routing, top1_routing
    from mosar.core.worth_field import WorthField
    from mosar.integrations.retrofit.entry import load_adapter, retrofit
    from mosar.microscope.look import look
    from mosar.model.cache.regime import RegimeCache, RegimeLayerCache

__all__ = [
    "MoSARConfig",
    "MoSARReferenceAttention",
    "PostPositionRouter",
    "Regime",
    "RegimeCache",
    "RegimeKernel",
    "RegimeLayerCache",
    "WorthField",
    "__version__",
    "build_hard_domain",
    "distance_attention",
    "forced_routing",
    "load_adapter",
    "look",
    "mosar_attention",
    "normalized_reach_cost",
    "pair_geometry",
    "retrofit",
    "top1_routing",
]

_MODULE_OF = {
    "MoSARConfig": "core.config",
    "MoSARReferenceAttention": "core.reference_attention",
    "PostPositionRouter": "core.routers",
    "Regime": "core.config",
    "RegimeCache": "model.cache.regime",
    "RegimeKernel": "core.regimes",
    "RegimeLayerCache": "model.cache.regime",
    "WorthField": "core.worth_field",
    "build_hard_domain": "core.hard_domain",
    "distance_attention": "attention",
    "forced_routing": "core.routers",
    "load_adapter": "integrations.retrofit.entry",
    "look": "microscope.look",
    "mosar_attention": "attention",
    "normalized_reach_cost": "core.losses",
    "pair_geometry": "core.regimes",
    "retrofit": "integrations.retrofit.entry",
    "top1_routing": "core.routers",
}

__getattr__ = load_on_use(globals(), _MODULE_OF)


def __dir__() -> list[str]:
    return sorted(__all__)
