"""A variant's settings: a geometry by name, and what it reads."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Integral
from typing import TYPE_CHECKING

import torch

from mosar.core.config import Composition, MoSARConfig, Regime

if TYPE_CHECKING:
    from mosar.geometries.geometry import Geometry, HeadShape

GEOMETRIES: dict[str, type[Geometry]] = {}
"""The known geometries by name; the package fills it, and so may anybody else."""


@dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    """A geometry by name and its settings; each geometry reads the settings that concern it."""

    geometry: str = "rope"
    """A name in `GEOMETRIES`."""
    rope_theta: float = 10000.0
    """Base of the rotation's wavelengths."""
    rope_fraction: float = 1.0
    """The share of frequencies that rotate, highest first; the others stay as they are."""
    regime: str | None = None
    """The one regime of "fixed" and "rope-mask", by name."""
    regimes: tuple[Regime, ...] | None = None
    """Reaches and plateaus; None: the default geometry scaled to the training length."""
    router_hidden: int = 64
    """d_r: hidden width of each router."""
    temperature: float = 1.0
    """tau: the routers end in softmax(z / tau)."""
    barrier: float = 6.0
    """B: the gate's floor is e^-B."""
    exponent: float = 2.0
    """p: how the decay sets in after the plateau."""
    epsilon: float = 1e-6
    """Guard of the logarithm of the worth."""
    composition: Composition = "mean"
    """How two reaches make a pair's reach: "mean", "min" or "max"."""
    routing_groups: int = 1
    """Gr: heads of a layer route in this many groups; a divisor of the key/value heads."""
    num_sinks: int = 0
    """The first keys of a row (of a segment) that every query may read with gate 1."""
    cost_weight: float = 0.0
    """lambda: weight of the normalized reach cost in the training loss."""
    cost_warmup: int = 500
    """Steps over which lambda rises linearly from 0."""

    def __post_init__(self) -> None:
        if self.geometry not in GEOMETRIES:
            raise ValueError(f"geometry must be one of {list(GEOMETRIES)}, got {self.geometry!r}")
        for name, low, high in (
            ("rope_theta", 1.0, math.inf),
            ("rope_fraction", 0.0, 1.0),
            ("cost_weight", 0.0, math.inf),
        ):
            value = getattr(self, name)
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not number or not math.isfinite(value) or not low <= value <= high:
                raise ValueError(f"{name} must be a number in [{low}, {high}], got {value!r}")
            object.__setattr__(self, name, float(value))
        warmup = self.cost_warmup
        if not isinstance(warmup, Integral) or isinstance(warmup, bool) or warmup < 0:
            raise ValueError(f"cost_warmup must be an integer >= 0, got {warmup!r}")
        # MoSARConfig checks its own fields; the length does not matter for that.
        config = self.mosar_config(MoSARConfig().max_length)
        if self.regimes is not None:
            object.__setattr__(self, "regimes", config.regimes)
        if self.regime is not None:
            config.regime_index(self.regime)

    @property
    def geometry_class(self) -> type[Geometry]:
        """Its class states the facts that hold whatever the settings are."""
        return GEOMETRIES[self.geometry]

    def build(self, shape: HeadShape) -> Geometry:
        """One without storage, to ask for the facts that depend on the settings."""
        with torch.device("meta"):
            return self.geometry_class(self, shape)

    def mosar_config(self, max_length: int) -> MoSARConfig:
        """The geometry of regimes for a training length N."""
        regimes = MoSARConfig.scaled(max_length).regimes if self.regimes is None else self.regimes
        return MoSARConfig(
            max_length=max_length,
            regimes=regimes,
            router_hidden=self.router_hidden,
            temperature=self.temperature,
            barrier=self.barrier,
            exponent=self.exponent,
            epsilon=self.epsilon,
            composition=self.composition,
            routing_groups=self.routing_groups,
            num_sinks=self.num_sinks,
        )
