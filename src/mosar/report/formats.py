"""How numbers are written, the same in every table, chart and sentence."""

from __future__ import annotations

import hashlib
import math
import re

MINUS = "\u2212"
MISSING = "–"


def number(value: float, decimals: int, *, signed: bool = False) -> str:
    """Fixed decimals, a true minus sign; no sign before what rounds to zero."""
    text = f"{abs(value):.{decimals}f}"
    if float(text) == 0:
        return text
    return (MINUS if value < 0 else "+" if signed else "") + text


def perplexity(value: float) -> str:
    """About five digits: 12.345, 31.24, 210.5; powers of ten where a model has collapsed."""
    if value >= 1e5:
        return f"{value:.2g}"
    return number(value, 3 if value < 20 else 2 if value < 200 else 1 if value < 2000 else 0)


def percent(value: float, decimals: int = 1, *, signed: bool = True) -> str:
    """Writes a value that is already in percent."""
    return f"{number(value, decimals, signed=signed)} %"


def share(value: float, decimals: int = 3) -> str:
    """A number between 0 and 1; a small one keeps two digits."""
    if 0 < value < 10**-decimals:
        return f"{value:.1e}"
    return number(value, decimals)


def times(factor: float) -> str:
    """1×, 0.5×: a length over the training length, or a speed-up."""
    return f"{factor:.3g}×"


def count(value: float) -> str:
    """1,600 or 3.28 M."""
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if abs(value) >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:,.3g}"


def duration(seconds: float) -> str:
    """12 s, 3.4 min, 2.1 h."""
    if seconds < 90:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.3g} min" if seconds < 5400 else f"{seconds / 3600:.3g} h"


def slug(text: str) -> str:
    """A short name for a file or an anchor: small letters, digits, ".", "_" and "-".

    What is one already stays; of anything else the rest is replaced, and a checksum keeps two
    names apart.
    """
    if re.fullmatch(r"[a-z0-9][a-z0-9._-]{0,63}", text):
        return text
    kept = re.sub(r"[^a-z0-9_-]+", "-", text.lower()).strip("-")[:48] or "name"
    return f"{kept}-{hashlib.sha256(text.encode('utf-8', 'surrogatepass')).hexdigest()[:12]}"


def plural(number_of: int, thing: str) -> str:
    """1 seed, 3 seeds."""
    return f"{number_of:,} {thing}{'' if number_of == 1 else 's'}"


def listed(words: list[str]) -> str:
    """a, b and c."""
    if len(words) < 2:
        return "".join(words)
    return f"{', '.join(words[:-1])} and {words[-1]}"


def setting(value: object) -> str:
    """A value of a configuration as a person would write it."""
    if value is None:
        return MISSING
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float) and math.isfinite(value):
        return f"{value:g}"
    if isinstance(value, int) and abs(value) >= 10_000:
        return f"{value:,}"
    if isinstance(value, (list, tuple)):
        return ", ".join(setting(item) for item in value)
    if isinstance(value, dict) and set(value) == {"name", "reach", "plateau"}:
        return f"{value['name']} {setting(value['reach'])}"
    if isinstance(value, dict):
        return ", ".join(f"{key} {setting(item)}" for key, item in value.items())
    return str(value)
