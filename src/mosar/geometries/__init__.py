"""Geometries: what a variant of attention changes, and nothing else.

A geometry is one small class with two hooks and its facts (geometry.py), entered in `GEOMETRIES` by
name; a variant is a named setting of it in `VARIANTS`. docs/geometries.md shows how to add one.
"""

from typing import Any

from mosar.geometries.alibi import Alibi
from mosar.geometries.block_selection import BigBird, MoBA
from mosar.geometries.config import GEOMETRIES, AttentionConfig
from mosar.geometries.dsa import DSA
from mosar.geometries.fox import Forgetting
from mosar.geometries.geometry import (
    UNROUTED,
    Attended,
    Geometry,
    HeadShape,
    LayerRouting,
    ParameterPart,
    operator_routing,
)
from mosar.geometries.hyperbolic import Hyperbolic
from mosar.geometries.layer_window import Gemma3, Longformer
from mosar.geometries.learned_distance import Kerple, T5Bias
from mosar.geometries.linformer import Linformer
from mosar.geometries.mode import MODES, Mode
from mosar.geometries.mosar import MoSAR
from mosar.geometries.mosar_forget import ForgettingMoSAR
from mosar.geometries.nsa import NSA
from mosar.geometries.one_regime import Fixed, RopeMask
from mosar.geometries.own_settings import OwnSettings, setting
from mosar.geometries.prefill_modes import FlexPrefill, MInference
from mosar.geometries.reformer import Reformer
from mosar.geometries.rope import HighFrequencyRope, Rope
from mosar.geometries.rotation_modes import NTK, DynamicNTK, PositionInterpolation, YaRN
from mosar.geometries.score_bias import CoPE, Inkling, Selective
from mosar.geometries.spans import AdaptiveSpan, DynamicSpan
from mosar.geometries.switch import Switch
from mosar.geometries.window_modes import AdaptivePruning, BlockwiseCausal, Streaming
from mosar.geometries.xpos import XPos

__all__ = [
    "GEOMETRIES",
    "MATCHED_VARIANTS",
    "MODES",
    "PAPER_VARIANTS",
    "UNROUTED",
    "VARIANTS",
    "Alibi",
    "Attended",
    "AttentionConfig",
    "Fixed",
    "Geometry",
    "HeadShape",
    "LayerRouting",
    "MoSAR",
    "Mode",
    "OwnSettings",
    "ParameterPart",
    "Rope",
    "RopeMask",
    "operator_routing",
    "setting",
]

GEOMETRIES.update(
    {
        "rope": Rope,
        "p-rope": Rope,
        "alibi": Alibi,
        "fixed": Fixed,
        "rope-mask": RopeMask,
        "mosar": MoSAR,
        "mosar-forget": ForgettingMoSAR,
    }
)

_PAPER = {
    "rope": AttentionConfig(geometry="rope"),
    "alibi": AttentionConfig(geometry="alibi"),
    "p-rope": AttentionConfig(geometry="p-rope", rope_fraction=0.75),
    "fixed-s": AttentionConfig(geometry="fixed", regime="S"),
    "fixed-m": AttentionConfig(geometry="fixed", regime="M"),
    "rope-m-mask": AttentionConfig(geometry="rope-mask", regime="M"),
    "mosar": AttentionConfig(geometry="mosar"),
    "mosar-cost": AttentionConfig(geometry="mosar", cost_weight=0.01, cost_warmup=500),
}
PAPER_VARIANTS = tuple(_PAPER)
"""The matched set of the paper."""
# Trained on what is executed, with a price on its pairs.
_HARD: dict[str, Any] = {
    "hard_from": 0.0,
    "router_queries": 128,
    "cost_of": "pairs",
    "cost_weight": 0.2,
}
_BEYOND = {
    # Routers see rotated q and k, so its windows begin at random positions up to four times N.
    "mosar-hard": AttentionConfig(
        geometry="mosar", start_regimes=("S",), position_range=4.0, **_HARD
    ),
    "mosar-plus": AttentionConfig(
        geometry="mosar-forget", ladder=True, rope_fraction=0.0, start_regimes=("G",), **_HARD
    ),
}
MATCHED_VARIANTS = (*PAPER_VARIANTS, *_BEYOND)
"""The paper's eight and our two: what `mosar reproduce` runs unless told otherwise."""
# Systems of other authors: geometry and variant share a name; the second entry has its settings.
_OTHERS: dict[str, tuple[type[Geometry], dict[str, Any]]] = {
    "nope": (Geometry, {}),
    "xpos": (XPos, {}),
    "hope-high": (HighFrequencyRope, {}),
    "t5": (T5Bias, {}),
    "kerple": (Kerple, {}),
    "fox": (Forgetting, {}),
    "adaptive-span": (AdaptiveSpan, {"cost_weight": 0.006}),
    "dynamic-span": (DynamicSpan, {"cost_weight": 0.003}),
    "switch": (Switch, {"composition": "min", "cost_weight": 0.01}),
    "dsa": (DSA, {"cost_weight": 1.0}),
    "gemma3": (Gemma3, {}),
    "longformer": (Longformer, {}),
    "bigbird": (BigBird, {}),
    "moba": (MoBA, {}),
    "nsa": (NSA, {}),
    "linformer": (Linformer, {}),
    "reformer": (Reformer, {}),
    "selective": (Selective, {}),
    "cope": (CoPE, {}),
    "inkling": (Inkling, {}),
    "hope-hyperbolic": (Hyperbolic, {}),
}
GEOMETRIES.update({name: kind for name, (kind, _) in _OTHERS.items()})
VARIANTS: dict[str, AttentionConfig] = {
    **_PAPER,
    **_BEYOND,
    **{name: AttentionConfig(geometry=name, **given) for name, (_, given) in _OTHERS.items()},
}
"""Every model that can be compared, by name."""

_MODES: tuple[type[Mode], ...] = (
    *(PositionInterpolation, NTK, YaRN, DynamicNTK),
    *(Streaming, BlockwiseCausal, AdaptivePruning),
    *(MInference, FlexPrefill),
)
MODES.update({mode.name: mode for mode in _MODES})
