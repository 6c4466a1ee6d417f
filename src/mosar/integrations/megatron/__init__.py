"""MoSAR in Megatron-core; it needs the extra `megatron`. See docs/megatron.md.

Names are loaded on first use: routers and objective work where Megatron is not installed.
"""

from typing import TYPE_CHECKING

from mosar.lazy import load_on_use

if TYPE_CHECKING:
    from mosar.integrations.megatron.core_attention import MoSARCoreAttention
    from mosar.integrations.megatron.layer_spec import mosar_layer_spec
    from mosar.integrations.megatron.objective import MoSARObjectiveState
    from mosar.integrations.megatron.parallel_router import ParallelRouter

__all__ = ["MoSARCoreAttention", "MoSARObjectiveState", "ParallelRouter", "mosar_layer_spec"]

_MODULE_OF = {
    "MoSARCoreAttention": "core_attention",
    "MoSARObjectiveState": "objective",
    "ParallelRouter": "parallel_router",
    "mosar_layer_spec": "layer_spec",
}

__getattr__ = load_on_use(globals(), _MODULE_OF, extra="megatron", needs="megatron-core")


def __dir__() -> list[str]:
    return sorted(__all__)
