"""What can be asked of an evaluation: lengths, routings; a ValueError names the choices."""

from __future__ import annotations

import re
from collections.abc import Iterable

from mosar.geometries import Geometry


def parse_lengths(lengths: Iterable[str | int], train_length: int) -> tuple[int, ...]:
    """ "2x" (times the training length N) and 2048 (tokens) -> tokens, ascending, each once."""
    return tuple(sorted({_length(length, train_length) for length in lengths}) or _none("lengths"))


def _length(length: str | int, train_length: int) -> int:
    text = str(length).strip()
    found = re.fullmatch(r"(\d+(?:\.\d+)?)x", text)
    tokens = float(found[1]) * train_length if found else float(text) if text.isdecimal() else 0
    if tokens < 2 or tokens != int(tokens):
        raise ValueError(
            f"a length is a multiple of the training length {train_length}, like 1x or 2x, or a "
            f"number of tokens >= 2, like {2 * train_length}; got {text!r}"
        )
    return int(tokens)


def check_routings(
    routings: Iterable[str] | None, geometry: Geometry, variant: str
) -> tuple[str, ...]:
    """The routings asked for, each once, in the geometry's order.

    None: all that routers allow; without routers the one that the model was trained with.
    """
    known, routed = geometry.routings, geometry.routed
    usual = known if routed else known[:1]
    asked = usual if routings is None else tuple(routings) or _none("routings")
    unknown = [routing for routing in asked if routing not in known]
    if unknown:
        why = "" if routed else f", since {variant} has no routers"
        raise ValueError(f"routing must be one of {', '.join(known)}{why}; got {unknown[0]!r}")
    return tuple(routing for routing in known if routing in asked)


def check_modes(modes: Iterable[str], geometry: Geometry, variant: str) -> tuple[str, ...]:
    """The modes asked for, each once, in the geometry's order."""
    asked, known = tuple(modes), geometry.modes
    unknown = [mode for mode in asked if mode not in known]
    if unknown:
        there = f"one of {', '.join(known)}" if known else f"none: {variant} has no other modes"
        raise ValueError(f"mode must be {there}; got {unknown[0]!r}")
    return tuple(mode for mode in known if mode in asked)


def _none(what: str) -> tuple[int, ...]:
    raise ValueError(f"{what} must name at least one")
