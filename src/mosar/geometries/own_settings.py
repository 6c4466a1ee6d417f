"""Settings that one geometry alone knows, stated beside the class that reads them.

    class T5(Geometry):
        @dataclass(frozen=True, kw_only=True)
        class Own(OwnSettings):
            buckets: int = setting(32, least=2)

`AttentionConfig.own` is then a checked `T5.Own`: in config.json, in the fingerprint, and set by
`--set attention.own.buckets=16`; the geometry reads `self.own.buckets`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from difflib import get_close_matches
from typing import Any, TypeVar

from mosar.core.checks import check_counts, check_number

Value = TypeVar("Value", bool, int, float, str, tuple[Any, ...])


def setting(
    default: Value,
    *,
    least: float | None = None,
    above: float | None = None,
    most: float = math.inf,
    among: tuple[str, ...] = (),
) -> Value:
    """A field of `Own`: values have the type of `default`, in this range, or are `among` the words.

    Numbers are >= `least` (integers: 0 unless said) or > `above`, and <= `most`; of a tuple, each
    of its items is.
    """
    rule = {"least": least, "above": above, "most": most, "among": among}
    return field(default=default, metadata=rule)


@dataclass(frozen=True, kw_only=True)
class OwnSettings:
    """The own settings of one geometry, each a field made by `setting`; here none."""

    def __post_init__(self) -> None:
        for item in fields(self):
            value, example = getattr(self, item.name), item.default
            if isinstance(example, tuple):
                if not isinstance(value, (list, tuple)):
                    raise ValueError(f"{item.name} must be a list, got {value!r}")
                one = example[0] if example else 0
                value = tuple(_checked(item.name, part, one, item.metadata) for part in value)
            else:
                value = _checked(item.name, value, example, item.metadata)
            object.__setattr__(self, item.name, value)


def _checked(name: str, value: Any, example: Any, rule: Mapping[str, Any]) -> Any:
    """The value as the plain type of `example`, or a ValueError that says what is allowed."""
    if isinstance(example, bool):
        if not isinstance(value, bool):
            raise ValueError(f"{name} must be true or false, got {value!r}")
        return value
    if isinstance(example, str):
        if not isinstance(value, str) or value not in (rule["among"] or (value,)):
            raise ValueError(f"{name} must be one of {', '.join(rule['among'])}, got {value!r}")
        return value
    holder = _Holder(name, value)
    least, above, most = rule["least"], rule["above"], rule["most"]
    if isinstance(example, int):
        check_counts(holder, {name: int(least or 0)})
        if getattr(holder, name) > most:
            raise ValueError(f"{name} must be an integer <= {most:g}, got {value!r}")
    else:
        check_number(
            holder, name, least=-math.inf if least is None else least, above=above, most=most
        )
    return getattr(holder, name)


class _Holder:
    """One named value, as the checks of configurations read and write it."""

    def __init__(self, name: str, value: Any):
        setattr(self, name, value)


Own = TypeVar("Own", bound=OwnSettings)


def read_own(kind: type[Own], given: OwnSettings | Mapping[str, Any], geometry: str) -> Own:
    """`kind` with the values given, the others at their defaults; errors name `own.key`."""
    values = asdict(given) if isinstance(given, OwnSettings) else dict(given)
    known = [item.name for item in fields(kind)]
    for name in values:
        if name not in known:
            near = get_close_matches(name, known, n=1)
            has = ", ".join(f"own.{key}" for key in known) or "none of its own"
            hint = f"; did you mean 'own.{near[0]}'?" if near else ""
            raise ValueError(
                f"geometry {geometry!r} has no setting 'own.{name}', it has {has}{hint}"
            )
    try:
        return kind(**values)
    except ValueError as error:
        raise ValueError(f"own.{error}") from None
