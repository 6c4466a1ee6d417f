"""What every kind of record carries."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any, ClassVar, Self, get_args, get_origin, get_type_hints

from mosar.records.machine import environment

SCHEMA_VERSION = 1


class Fields:
    """A dataclass that can be made of the fields of a JSON object, and so can those inside it."""

    @classmethod
    def from_fields(cls, values: dict[str, Any]) -> Self:
        """What these fields describe; a ValueError names one that is unknown or missing."""
        check_fields(cls, values)
        hints = _hints(cls)
        return cls(**{name: _read(hints[name], value) for name, value in values.items()})


@lru_cache(maxsize=64)
def _hints(cls: type) -> dict[str, Any]:
    return get_type_hints(cls)


def _read(hint: Any, value: Any) -> Any:
    """A value of JSON as its field's type has it."""
    if isinstance(hint, type) and issubclass(hint, Fields):
        return hint.from_fields(value)
    if get_origin(hint) is dict and get_args(hint)[1] is not Any:
        if not isinstance(value, dict):
            raise ValueError(f"a field must be a JSON object, got {value!r:.60}")
        return {key: _read(get_args(hint)[1], entry) for key, entry in value.items()}
    return tuple(value) if get_origin(hint) is tuple else value


def check_fields(cls: type, values: object) -> None:
    """A ValueError where `values` is not an object with every field of the dataclass `cls`."""
    if not isinstance(values, dict):
        raise ValueError(f"{cls.__name__} must be a JSON object, got {values!r:.60}")
    known = {item.name for item in fields(cls)}
    unknown, missing = sorted(set(values) - known), sorted(known - set(values))
    if unknown or missing:
        raise ValueError(f"{cls.__name__} lacks the fields {missing} and has unknown {unknown}")


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


@dataclass(frozen=True, kw_only=True)
class Record(Fields):
    """What every kind of record carries."""

    kind: ClassVar[str]
    created: str = field(default_factory=_now)
    """When, ISO 8601, UTC."""
    environment: dict[str, Any] = field(default_factory=environment)
    """As `environment()` gives it."""

    def derived(self) -> dict[str, Any]:
        """What follows from the fields."""
        return {}

    def to_dict(self) -> dict[str, Any]:
        head = {"schema": SCHEMA_VERSION, "kind": self.kind}
        return head | asdict(self) | {"derived": self.derived()}
