"""MoSAR: attention that learns how far each token needs to look.

Names are loaded on first use, so that `mosar --help` does not wait for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

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
    from mosar.integrations.retrofit.entry import retrofit

__all__ = [
    "MoSARConfig",
    "MoSARReferenceAttention",
    "PostPositionRouter",
    "Regime",
    "RegimeKernel",
    "WorthField",
    "__version__",
    "build_hard_domain",
    "distance_attention",
    "forced_routing",
    "mosar_attention",
    "normalized_reach_cost",
    "pair_geometry",
    "retrofit",
    "top1_routing",
]

_MODULE_OF = {
    "MoSARConfig": "mosar.core.config",
    "MoSARReferenceAttention": "mosar.core.reference_attention",
    "PostPositionRouter": "mosar.core.routers",
    "Regime": "mosar.core.config",
    "RegimeKernel": "mosar.core.regimes",
    "WorthField": "mosar.core.worth_field",
    "build_hard_domain": "mosar.core.hard_domain",
    "distance_attention": "mosar.attention",
    "forced_routing": "mosar.core.routers",
    "mosar_attention": "mosar.attention",
    "normalized_reach_cost": "mosar.core.losses",
    "pair_geometry": "mosar.core.regimes",
    "retrofit": "mosar.integrations.retrofit.entry",
    "top1_routing": "mosar.core.routers",
}


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_MODULE_OF[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
