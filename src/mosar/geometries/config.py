"""A variant's settings: a geometry by name, and what it reads."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal

import torch

from mosar.core.checks import check_counts, check_number, is_count
from mosar.core.config import MoSARConfig, RegimeSettings
from mosar.geometries.own_settings import OwnSettings, read_own

if TYPE_CHECKING:
    from mosar.geometries.geometry import Geometry, HeadShape

GEOMETRIES: dict[str, type[Geometry]] = {}
"""The known geometries by name; the package fills it, and so may anybody else."""


@dataclass(frozen=True, kw_only=True)
class AttentionConfig(RegimeSettings):
    """A geometry by name and its settings; each geometry reads the settings that concern it."""

    geometry: str = "rope"
    """A name in `GEOMETRIES`."""
    own: Any = field(default_factory=OwnSettings)
    """The settings of this geometry alone, its class's `Own`; given as that or as a mapping."""
    rope_theta: float = 10000.0
    """Base of the rotation's wavelengths."""
    rope_fraction: float = 1.0
    """The share of frequencies that rotate, highest first; the others stay as they are."""
    regime: str | None = None
    """The one regime of "fixed" and "rope-mask", by name."""
    cost_weight: float = 0.0
    """lambda: weight of the price in the training loss."""
    cost_warmup: int = 500
    """Steps over which lambda rises linearly from 0."""
    cost_of: Literal["reach", "pairs"] = "reach"
    """What has the price: the expected reach of a token, or the expected pairs of the support."""
    mass_weight: float = 0.0
    """mu: weight of the discarded mass in the loss of soft routing; it warms up like lambda."""
    hard_from: float | None = None
    """The share of the steps after which routing is hard; None: it stays soft, as in the paper."""
    router_queries: int | None = None
    """Hard routing takes the routers' gradient from this many queries of a window; None: all."""
    floor_from: float = 0.4
    """The share of the steps after which the floor's factor falls from 1, linearly, to `floor`."""
    floor_until: float = 0.85
    """The share of the steps after which the floor's factor is `floor`."""
    start_regimes: tuple[str, ...] = ()
    """The regime that each routing group starts in, in turn; []: routing starts uniform."""
    start_logit: float = 1.0
    """How far the logit of that regime is above the others at first."""
    position_range: float = 1.0
    """Training windows begin at random positions: routers meet positions up to this times N."""
    ladder: bool | int = False
    """Where no regimes are given: reaches r, r^2, r^3, ... below N, and N, instead of the paper's
    three; true: r = 4."""
    ladder_plateau: float = 0.25
    """The share of a ladder's local reach on which its gate is 1."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.geometry not in GEOMETRIES:
            raise ValueError(f"geometry must be one of {list(GEOMETRIES)}, got {self.geometry!r}")
        own = read_own(self.geometry_class.Own, self.own, self.geometry)
        object.__setattr__(self, "own", own)
        check_number(self, "rope_theta", least=1.0)
        check_number(self, "rope_fraction", least=0.0, most=1.0)
        check_number(self, "cost_weight", least=0.0)
        check_number(self, "mass_weight", least=0.0)
        if self.cost_of not in ("reach", "pairs"):
            raise ValueError(f"cost_of must be reach or pairs, got {self.cost_of!r}")
        if self.hard_from is not None:
            check_number(self, "hard_from", least=0.0, most=1.0)
        check_number(self, "floor_from", least=0.0, most=1.0)
        check_number(self, "floor_until", least=self.floor_from, most=1.0)
        if self.router_queries is not None:
            check_counts(self, {"router_queries": 1})
        check_number(self, "start_logit", least=0.0)
        check_number(self, "position_range", least=1.0, most=1e6)
        if not isinstance(self.ladder, bool) and not is_count(self.ladder, 2):
            raise ValueError(f"ladder must be true, false or an integer >= 2, got {self.ladder!r}")
        check_number(self, "ladder_plateau", least=0.0, most=1.0)
        starts = self.start_regimes
        if not isinstance(starts, (list, tuple)) or not all(isinstance(x, str) for x in starts):
            raise ValueError(f"start_regimes must be a list of names, got {starts!r}")
        check_counts(self, {"cost_warmup": 0})
        object.__setattr__(self, "start_regimes", tuple(self.start_regimes))
        regimes = self.mosar_config(MoSARConfig().max_length)
        # The paper's names are the same at any length; those of a ladder are not.
        for name in () if self.ladder else (*self.start_regimes, self.regime):
            if name is not None:
                regimes.regime_index(name)

    def to_dict(self) -> dict[str, Any]:
        """As JSON holds it: the geometry, its regimes, their cost."""
        values = asdict(self)
        own = {name: values.pop(name) for name in self.__annotations__ if name in values}
        training = list(own)[list(own).index("cost_weight") :]
        last = {name: own.pop(name) for name in training}
        return own | values | last

    @property
    def geometry_class(self) -> type[Geometry]:
        """Its class states the facts that hold whatever the settings are."""
        return GEOMETRIES[self.geometry]

    def reads(self, setting: str) -> bool:
        """Whether `setting`, like "barrier" or "own.buckets", changes this geometry."""
        own = {f"own.{item.name}" for item in fields(self.own)}
        return setting in self.geometry_class.settings | own | {"geometry"}

    def build(self, shape: HeadShape) -> Geometry:
        """One without storage, to ask for the facts that depend on the settings."""
        with torch.device("meta"):
            return self.geometry_class(self, shape)

    def mosar_config(self, max_length: int) -> MoSARConfig:
        """The geometry of regimes for a training length N."""
        given = {field.name: getattr(self, field.name) for field in fields(RegimeSettings)}
        if self.regimes is None:
            del given["regimes"]
            regimes = self.geometry_class.default_regimes(max_length)
            if regimes is not None:
                given["regimes"] = regimes
        if not self.ladder:
            return MoSARConfig.scaled(max_length, **given)
        ratio = 4 if self.ladder is True else self.ladder
        return MoSARConfig.ladder(max_length, ratio, self.ladder_plateau, **given)
