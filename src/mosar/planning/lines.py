"""One line of a plan: a number, its unit, and how it is known."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Unit = Literal["", "B", "FLOP", "%"]
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
    unit: Unit
    basis: Basis
    how: str
    """The rule, or where it was measured, in a few words."""


_SCALES = {
    "B": (1024.0, ("B", "KiB", "MiB", "GiB", "TiB", "PiB")),
    "FLOP": (1000.0, ("FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP", "EFLOP")),
}


def say(value: float, unit: str) -> str:
    """A readable number: 12.34 GiB, 4.56 GFLOP, 800,138,240."""
    if unit == "%":
        return f"{value:.2f} %"
    if unit in _SCALES:
        number, scaled = _scaled(value, unit)
        return f"{number:,.0f} {scaled}" if scaled == unit else f"{number:,.2f} {scaled}"
    return f"{value:,.0f}" if value == int(value) else f"{value:,.1f}"


def brief(value: float, unit: str) -> str:
    """The same in three digits: 12.3 GiB."""
    number, unit = _scaled(value, unit) if unit in _SCALES else (value, unit)
    decimals = 0 if number >= 100 or unit in _SCALES else 1 if number >= 10 else 2
    return f"{number:,.{decimals}f} {unit}"


def _scaled(value: float, unit: str) -> tuple[float, str]:
    base, units = _SCALES[unit]
    power = 0
    while abs(value) >= base and power + 1 < len(units):
        value, power = value / base, power + 1
    return value, units[power]
