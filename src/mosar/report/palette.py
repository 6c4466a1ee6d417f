"""The same look for the same thing in every figure: colours of variants, regimes and lengths.

Hues follow Okabe and Ito, who chose them to be told apart with any colour vision; each has a shade
for white and one for dark ground, and variants differ in marker and dash too.
"""

from __future__ import annotations

from collections.abc import Iterable
from colorsys import hls_to_rgb
from dataclasses import dataclass

from mosar.geometries import VARIANTS as GEOMETRY_VARIANTS


@dataclass(frozen=True)
class Look:
    """How a series is drawn."""

    label: str
    light: str
    dark: str
    marker: str = "circle"
    dash: str = ""
    """Lengths of dash and gap in units of the line, as SVG has them."""


# Those of the paper and our own, chosen by hand.
VARIANTS = {
    "mosar": Look("MoSAR", "#d55e00", "#ff8a3d", "circle"),
    "mosar-cost": Look("MoSAR-Cost", "#c98a00", "#ffc24d", "diamond", "7 3"),
    "fixed-s": Look("Fixed-S", "#2e9bd6", "#6cc6f5", "down", "6 3"),
    "fixed-m": Look("Fixed-M", "#009e73", "#35cda0", "up", "6 3"),
    "rope-m-mask": Look("RoPE-M-mask", "#858b95", "#9aa3b2", "cross", "2 3"),
    "rope": Look("RoPE", "#1f2430", "#e8eaf0", "square"),
    "alibi": Look("ALiBi", "#3552b5", "#8fa4ff", "plus"),
    "mosar-hard": Look("MoSAR-Hard", "#a03000", "#ff6a4d", "diamond", "2 2"),
    "mosar-plus": Look("MoSAR-Plus", "#8a2be2", "#c08bff", "star"),
    "fox": Look("FoX", "#0b7285", "#4dd0e1", "circle", "5 2"),
    "p-rope": Look("p-RoPE", "#c2609a", "#ee9ccb", "star", "9 3 2 3"),
}
# Markers of other variants show what their attention depends on; hue and dash tell them apart.
_FAMILY_MARKERS = {"positions": "square", "distance": "plus", "window": "up", "routing": "circle"}
_DASHES = ("3 2", "1 2", "8 2", "5 2 1 2", "3 2 1 2 1 2")
_GOLDEN = 0.618034
# The light shades of the page; in the page each is the variable of its style sheet.
SURFACE, RAISED, INK = "#ffffff", "#f4f5f6", "#1b212d"
MUTED, GRID, EDGE = "#5b6473", "#e2e5e9", "#c9ced6"
THEME = {
    SURFACE: "var(--surface)",
    RAISED: "var(--raised)",
    INK: "var(--ink)",
    MUTED: "var(--muted)",
    GRID: "var(--line)",
    EDGE: "var(--strong)",
}
NEUTRAL = Look("", INK, "#e7eaf0")
ROUTER, ATTENTION = Look("router", "#d55e00", "#ff8a3d"), Look("attention", "#3f7fbf", "#86b4e0")
TINTS = {
    "router": Look("router", "#fdeadd", "#3b2718"),
    "attention": Look("attention", "#e4eef9", "#1c2d40"),
}
# The six pairs of three regimes, SS to GG; apart in hue and lightness.
_PAIRS = (
    *(("#e0457b", "#f4769f"), ("#f2913d", "#ffb877"), ("#b39d00", "#dcc835")),
    *(("#2f9e6e", "#5fd0a0"), ("#2f86c9", "#74b8ee"), ("#5b3fa8", "#a48ff0")),
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
    """The look of each variant; those without one of their own get the next free hue."""
    ordered = in_order(names)
    others = [name for name in ordered if name not in VARIANTS]
    return {
        name: VARIANTS[name] if name in VARIANTS else _other_look(name, others.index(name))
        for name in ordered
    }


def _other_look(name: str, place: int) -> Look:
    hue = (0.08 + place * _GOLDEN) % 1
    light, dark = (
        "#" + "".join(f"{round(255 * part):02x}" for part in hls_to_rgb(hue, lightness, 0.55))
        for lightness in (0.34, 0.72)
    )
    known = GEOMETRY_VARIANTS.get(name)
    marker = _FAMILY_MARKERS[known.geometry_class.family] if known else "diamond"
    return Look(name, light, dark, marker, _DASHES[place % len(_DASHES)])


def regime_looks(names: Iterable[str]) -> dict[str, Look]:
    """From the shortest reach to the global one."""
    return _spread(list(names), _REGIMES)


def pair_looks(labels: Iterable[str]) -> dict[str, Look]:
    """Pairs of regimes by their place among the pairs and not by their reach; or anything else."""
    return _spread(list(labels), _PAIRS)


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


def _mix(a: str, b: str, amount: float) -> str:
    channels = [
        round(int(a[i : i + 2], 16) * (1 - amount) + int(b[i : i + 2], 16) * amount)
        for i in (1, 3, 5)
    ]
    return "#" + "".join(f"{channel:02x}" for channel in channels)
