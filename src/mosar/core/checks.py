"""Range checks of configurations: an error names the wrong field and its rule.

Fields that pass become plain Python numbers, so that a configuration made from numpy numbers can be
written as JSON.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any, TypeGuard


def is_count(value: object, least: int) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= least


def is_real(value: object) -> TypeGuard[float]:
    """Whether the value is a finite number."""
    if not isinstance(value, Real) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def check_counts(config: Any, least: Mapping[str, int]) -> None:
    """A ValueError for a field that is not an integer, or below its minimum."""
    for name, minimum in least.items():
        value = getattr(config, name)
        if not is_count(value, minimum):
            raise ValueError(f"{name} must be an integer >= {minimum}, got {value!r}")
        object.__setattr__(config, name, int(value))


def check_number(
    config: Any,
    name: str,
    *,
    above: float | None = None,
    least: float = -math.inf,
    most: float = math.inf,
    optional: bool = False,
    keep_integers: bool = False,
) -> None:
    """A ValueError for a field that is not a finite number in [least, most] or (above, most].

    optional: None is allowed. keep_integers: an integer stays an integer instead of becoming a
    float.
    """
    value = getattr(config, name)
    if optional and value is None:
        return
    enough = is_real(value) and (value >= least if above is None else value > above)
    if not enough or value > most:
        if most == math.inf:
            rule = "a finite number " + (f">= {least:g}" if above is None else f"> {above:g}")
        else:
            rule = "a number in " + (f"[{least}, " if above is None else f"({above}, ") + f"{most}]"
        none = "none or " if optional else ""
        raise ValueError(f"{name} must be {none}{rule}, got {value!r}")
    whole = keep_integers and isinstance(value, Integral)
    object.__setattr__(config, name, int(value) if whole else float(value))
