"""One look a thing, in every figure: the colours of variants, regimes and lengths.

Hues follow Okabe and Ito, who chose them to be told apart with any colour vision; each has a shade
for white and one for dark ground, and variants differ in marker and dash too.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Look:
    """How a series is drawn."""

    label: str
    light: str
    dark: str
    marker: str = "circle"
    dash: str = ""
    """Lengths of dash and gap in units of the line, as SVG has them."""


VARIANTS = {
    "mosar": Look("MoSAR", "#d55e00", "#ff8a3d", "circle"),
    "mosar-cost": Look("MoSAR-Cost", "#c98a00", "#ffc24d", "diamond", "7 3"),
    "fixed-s": Look("Fixed-S", "#2e9bd6", "#6cc6f5", "down", "6 3"),
    "fixed-m": Look("Fixed-M", "#009e73", "#35cda0", "up", "6 3"),
    "rope-m-mask": Look("RoPE-M-mask", "#858b95", "#9aa3b2", "cross", "2 3"),
    "rope": Look("RoPE", "#1f2430", "#e8eaf0", "square"),
    "alibi": Look("ALiBi", "#3552b5", "#8fa4ff", "plus"),
    "p-rope": Look("p-RoPE", "#c2609a", "#ee9ccb", "star", "9 3 2 3"),
}
# For variants that are not ours, in the order of their names.
_OTHERS = (
    ("#7a5230", "#c99b6f", "circle", "3 2"),
    ("#7b4fd6", "#b79bff", "square", "3 2"),
    ("#6f7d00", "#c3d142", "up", "3 2"),
    ("#a3242b", "#ff7b80", "down", "3 2"),
)
_REGIMES = (("#e0457b", "#f4769f"), ("#b39d00", "#dcc835"), ("#5b3fa8", "#a48ff0"))
_SEQUENCE = (
    ("#7fb2dd", "#5f87ad"),
    ("#3f7fbf", "#86b4e0"),
    ("#1b4f86", "#b9d8f6"),
    ("#0b2b4d", "#ecf5ff"),
)
MARKERS = ("circle", "square", "diamond", "up", "down", "cross", "plus", "star")


def in_order(names: Iterable[str]) -> list[str]:
    """Variants as figures list them: the known ones first, others by name."""
    found = set(names)
    return [*(name for name in VARIANTS if name in found), *sorted(found - set(VARIANTS))]


def variant_looks(names: Iterable[str]) -> dict[str, Look]:
    """The look of each variant; one that is not known gets the next free."""
    looks, free = {}, 0
    for name in in_order(names):
        if name in VARIANTS:
            looks[name] = VARIANTS[name]
        else:
            light, dark, marker, dash = _OTHERS[free % len(_OTHERS)]
            looks[name], free = Look(name, light, dark, marker, dash), free + 1
    return looks


def regime_looks(names: Iterable[str]) -> dict[str, Look]:
    """From the shortest reach to the global one."""
    return _spread(list(names), _REGIMES)


def sequence_looks(labels: Iterable[str]) -> dict[str, Look]:
    """Things with an order, such as lengths: from pale to strong."""
    return _spread(list(labels), _SEQUENCE)


def _spread(names: list[str], shades: tuple[tuple[str, str], ...]) -> dict[str, Look]:
    last = max(len(names) - 1, 1)
    looks = {}
    for index, name in enumerate(names):
        place = index * (len(shades) - 1) / last
        low = min(int(place), len(shades) - 2)
        light, dark = (
            _mix(a, b, place - low) for a, b in zip(shades[low], shades[low + 1], strict=True)
        )
        looks[name] = Look(name, light, dark, MARKERS[index % len(MARKERS)])
    return looks


def lightened(colour: str) -> str:
    """A shade for dark ground."""
    return _mix(colour, "#ffffff", 0.35)


def _mix(a: str, b: str, amount: float) -> str:
    channels = [
        round(int(a[i : i + 2], 16) * (1 - amount) + int(b[i : i + 2], 16) * amount)
        for i in (1, 3, 5)
    ]
    return "#" + "".join(f"{channel:02x}" for channel in channels)
