"""One line of a plan: a number, its unit, and how far it can be trusted."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

Basis = Literal["exact", "measured", "modelled"]
BASES: dict[Basis, str] = {
    "exact": "follows from the configuration alone; tests compare it with the real model",
    "measured": "counted on a trained model with this geometry, at this context",
    "modelled": "an estimate by a stated rule",
}


@dataclass(frozen=True)
class Line:
    section: str
    name: str
    value: float
    unit: Literal["", "B", "FLOP", "%", "pairs"]
    basis: Basis
    how: str
    """In a few words: the rule, or where it was measured."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def say(value: float, unit: str) -> str:
    """A number as people read it: 12.3 GiB, 4.56 GFLOP, 800,138,240."""
    if unit == "%":
        return f"{value:.2f} %"
    if unit == "B":
        return _scaled(value, 1024.0, ("B", "KiB", "MiB", "GiB", "TiB", "PiB"))
    if unit == "FLOP":
        return _scaled(
            value, 1000.0, ("FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP", "EFLOP")
        )
    return f"{value:,.0f}" if value == int(value) else f"{value:,.1f}"


def _scaled(value: float, base: float, units: tuple[str, ...]) -> str:
    power = 0
    while abs(value) >= base and power + 1 < len(units):
        value, power = value / base, power + 1
    return f"{value:,.0f} {units[power]}" if not power else f"{value:,.2f} {units[power]}"
