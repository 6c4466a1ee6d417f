"""The configuration of MoSAR: (N, delta, alpha, d_r, tau, B, p, epsilon), frozen and checked once.

A regime says how attention falls with distance: it has a reach delta, and the gate is flat on the
fraction alpha of this reach. The last regime is the global one: a pair of two global tokens never
decays, whatever its distance.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, fields
from itertools import count, pairwise, takewhile
from typing import Any, Literal, NamedTuple

from mosar.core.checks import check_counts, check_number, is_count

Composition = Literal["mean", "min", "max"]
COMPOSITIONS = ("mean", "min", "max")


# Below the smallest normal float32 number, a gate's floor would become 0, and its logarithm -inf.
_SMALLEST_EPSILON = 1.2e-38
# Gates with another floor are always in a table, which must fit into memory.
_LONGEST_WITH_FLOOR = 1 << 24


def check_config(config: object) -> None:
    """A ValueError if this is not a MoSARConfig, before any field of it is read."""
    if not isinstance(config, MoSARConfig):
        raise ValueError(f"config must be a MoSARConfig, got {type(config).__name__}")


@dataclass(frozen=True)
class Regime:
    """One regime of attention: how far it reaches and how much of that is plateau."""

    name: str
    """Short label, e.g. "S"; unique within a configuration."""
    reach: float
    """delta: the largest distance inside the support (inclusive, a real number)."""
    plateau: float
    """alpha in [0, 1]: the fraction of the reach where the gate is 1."""

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise ValueError(f"regime name must be a non-empty string, got {self.name!r}")
        try:
            check_number(self, "reach", above=0)
            check_number(self, "plateau", least=0, most=1)
        except ValueError as error:
            raise ValueError(f"regime {self.name!r}: {error}") from None


class Gate(NamedTuple):
    """How a gate falls after the plateau; kernels get it together with plateau and transition."""

    barrier: float
    """B: the gate's floor is e^-B."""
    exponent: float
    """p: how the decay begins."""


@dataclass(frozen=True, kw_only=True)
class RegimeSettings:
    """What defines regimes and routers at any training length; the defaults are the paper's."""

    regimes: tuple[Regime, ...] | None = None
    """Reaches and plateaus; None: the default geometry scaled to the training length."""
    router_hidden: int = 64
    """d_r: hidden width of each router MLP."""
    temperature: float = 1.0
    """tau: the routers end in softmax(z / tau)."""
    barrier: float = 6.0
    """B: the gate's floor is e^-B."""
    exponent: float = 2.0
    """p: how the decay begins after the plateau."""
    floor: float = 1.0
    """Beyond the reach the gate is this times e^-B; at 0, top-1 routing is sparse routing."""
    epsilon: float = 1e-6
    """Lower bound inside the logarithm; below e^-B, so that it never changes a valid worth."""
    composition: Composition = "mean"
    """How two reaches give a pair's reach: "mean" (the paper's), "min" or "max"."""
    routing_groups: int = 1
    """Gr: the number of groups of heads that route separately; it divides the key/value heads."""
    num_sinks: int = 0
    """How many first keys of a row (of a segment) every query may read with gate 1."""

    def __post_init__(self) -> None:
        if self.regimes is not None:
            object.__setattr__(self, "regimes", _as_regimes(self.regimes))
        check_counts(self, {"router_hidden": 1, "routing_groups": 1, "num_sinks": 0})
        for name in ("temperature", "barrier", "exponent", "epsilon"):
            check_number(self, name, above=0)
        check_number(self, "floor", least=0, most=1)
        if self.epsilon < _SMALLEST_EPSILON:
            raise ValueError(
                f"epsilon must be at least {_SMALLEST_EPSILON} (the smallest normal float32), "
                f"got {self.epsilon!r}"
            )
        if self.epsilon >= math.exp(-self.barrier):
            raise ValueError(
                f"epsilon must be smaller than e^-barrier = {math.exp(-self.barrier):.3g} "
                f"(it must not change a gate), got epsilon={self.epsilon!r} "
                f"with barrier={self.barrier!r}"
            )
        if self.composition not in COMPOSITIONS:
            raise ValueError(f"composition must be one of {COMPOSITIONS}, got {self.composition!r}")


@dataclass(frozen=True, kw_only=True)
class MoSARConfig(RegimeSettings):
    """Everything that defines MoSAR's geometry and routers; the defaults are the paper's."""

    max_length: int = 2048
    """N: the training length, which normalises the reach cost."""
    regimes: tuple[Regime, ...] = (
        Regime("S", 128, 0.75),
        Regime("M", 512, 0.5),
        Regime("G", 2048, 1.0),
    )
    """At least two, by increasing reach; the last one is global."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "regimes", _as_regimes(self.regimes))
        check_counts(self, {"max_length": 1})
        super().__post_init__()
        longest = max(regime.reach for regime in self.regimes)
        if self.floor != 1 and longest > _LONGEST_WITH_FLOOR:
            raise ValueError(
                f"floor must be 1 where a reach is longer than {_LONGEST_WITH_FLOOR}, "
                f"got floor={self.floor!r} with a reach of {longest:g}"
            )

    @classmethod
    def scaled(cls, max_length: int, **changes: Any) -> MoSARConfig:
        """The default geometry for another training length N: reaches N/16, N/4 and N."""
        if not is_count(max_length, 1):
            raise ValueError(f"max_length must be an integer >= 1, got {max_length!r}")
        regimes = (
            Regime("S", max_length / 16, 0.75),
            Regime("M", max_length / 4, 0.5),
            Regime("G", max_length, 1.0),
        )
        return cls(max_length=max_length, **{"regimes": regimes, **changes})

    @classmethod
    def ladder(
        cls, max_length: int, ratio: int = 4, plateau: float = 0.25, **changes: Any
    ) -> MoSARConfig:
        """Finer regimes for a training length N: reaches 4, 16, 64, ... below N, and N.

        A regime's name is its reach, and the last one is G. ratio: of one reach to the one before.
        plateau: the share of a reach after which decay begins.
        """
        if not is_count(max_length, 2):
            raise ValueError(f"max_length must be an integer >= 2, got {max_length!r}")
        if not is_count(ratio, 2):
            raise ValueError(f"ratio must be an integer >= 2, got {ratio!r}")
        powers = takewhile(lambda reach: reach < max_length, (ratio**k for k in count(1)))
        reaches = list(powers) or [max_length // 2]
        local = tuple(Regime(str(reach), reach, plateau) for reach in reaches)
        regimes = (*local, Regime("G", max_length, 1.0))
        return cls(max_length=max_length, **{"regimes": regimes, **changes})

    @property
    def num_regimes(self) -> int:
        """R."""
        return len(self.regimes)

    @property
    def gate(self) -> Gate:
        """How its gates fall."""
        return Gate(self.barrier, self.exponent)

    @property
    def depth(self) -> float:
        """-log of the smallest worth that a pair can have."""
        least = max(self.floor * math.exp(-self.barrier), self.epsilon)
        return -math.log(least)

    @property
    def global_index(self) -> int:
        """The index of the global regime: the last one."""
        return len(self.regimes) - 1

    def regime_index(self, name: str) -> int:
        """The index of the regime called `name`."""
        names = [regime.name for regime in self.regimes]
        if name not in names:
            raise ValueError(f"regime must be one of {names}, got {name!r}")
        return names.index(name)

    def to_dict(self) -> dict[str, Any]:
        """All fields as values that JSON can hold."""
        regimes = [asdict(regime) for regime in self.regimes]
        return {"max_length": self.max_length} | asdict(self) | {"regimes": regimes}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> MoSARConfig:
        """The configuration from the result of `to_dict`; an unknown field is a ValueError."""
        if not isinstance(values, dict):
            raise ValueError(f"a MoSARConfig is made from a dict, got {type(values).__name__}")
        known = [field.name for field in fields(cls)]
        unknown = sorted(set(map(str, values)) - set(known))
        if unknown:
            raise ValueError(f"unknown fields of MoSARConfig: {unknown}; known fields: {known}")
        return cls(**values)

    def to_json(self) -> str:
        """`to_dict` as text."""
        return json.dumps(self.to_dict())

    @classmethod
    def from_json(cls, text: str) -> MoSARConfig:
        """The configuration from the result of `to_json`."""
        try:
            values = json.loads(text)
        except (json.JSONDecodeError, RecursionError, TypeError) as error:
            raise ValueError(f"a MoSARConfig must be valid JSON: {error}") from None
        if not isinstance(values, dict):
            raise ValueError(f"a MoSARConfig must be a JSON object, got {type(values).__name__}")
        return cls.from_dict(values)


def _as_regimes(value: object) -> tuple[Regime, ...]:
    """Checked regimes, from `Regime` objects or from dicts with name, reach and plateau."""
    if not isinstance(value, (list, tuple)):
        raise ValueError(f"regimes must be a sequence of Regime, got {value!r}")
    regimes = []
    for item in value:
        if isinstance(item, dict):
            if set(item) != {"name", "reach", "plateau"}:
                raise ValueError(f"a regime has the fields name, reach and plateau, got {item!r}")
            item = Regime(**item)
        if not isinstance(item, Regime):
            raise ValueError(f"regimes must be a sequence of Regime, got the item {item!r}")
        regimes.append(item)
    if len(regimes) < 2:
        raise ValueError(
            f"regimes must hold at least 2 regimes, the last one global, got {tuple(regimes)!r}"
        )
    names = [regime.name for regime in regimes]
    if len(set(names)) != len(names):
        raise ValueError(f"regimes must have distinct names, got {names}")
    reaches = [regime.reach for regime in regimes]
    if any(b <= a for a, b in pairwise(reaches)):
        raise ValueError(f"regimes must have increasing reaches, got {reaches}")
    return tuple(regimes)
