"""What every kind of record carries."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import Any, ClassVar

from mosar.records.machine import environment

SCHEMA_VERSION = 1


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


@dataclass(frozen=True, kw_only=True)
class Record:
    """What every kind of record carries."""

    kind: ClassVar[str]
    created: str = field(default_factory=_now)
    """When it was made: ISO 8601, UTC."""
    environment: dict[str, Any] = field(default_factory=environment)
    """From `environment()`."""

    def derived(self) -> dict[str, Any]:
        """Values derived from the fields."""
        return {}

    def to_dict(self) -> dict[str, Any]:
        head = {"schema": SCHEMA_VERSION, "kind": self.kind}
        return head | asdict(self) | {"derived": self.derived()}
