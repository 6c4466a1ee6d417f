"""MoSAR in Megatron-core: `pip install "mosar[megatron]"`, see docs/megatron.md.

Names are loaded on first use: routers and objective work where Megatron is not installed.
"""

from importlib import import_module
from typing import TYPE_CHECKING

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


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = import_module(f"{__name__}.{_MODULE_OF[name]}")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "megatron":
            raise
        raise ModuleNotFoundError(
            f'{name} needs megatron-core, which is not installed: pip install "mosar[megatron]"',
            name=error.name,
        ) from None
    value = globals()[name] = getattr(module, name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
