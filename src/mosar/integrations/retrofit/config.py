"""The configuration of a retrofit: frozen, checked once, saved with the result."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from mosar.core.checks import check_counts, check_number
from mosar.core.config import MoSARConfig
from mosar.integrations.retrofit.base_model import BaseIdentity
from mosar.schema import decode, field_types, parse_changes

KIND = "retrofit"


@dataclass(frozen=True, kw_only=True)
class RetrofitSettings:
    """How the routers of a frozen model are trained."""

    length: int = 4096
    """Tokens of a window."""
    steps: int = 20
    """Windows of the first phase; each trains every layer on its own."""
    tune_steps: int = 0
    """Windows of the second phase, which trains all layers on the whole model's predictions."""
    updates: int = 3
    """Updates of a layer's routers per window, each on its own queries."""
    queries: int = 96
    """Queries of an update; their attention over all keys is computed."""
    target_density: float = 0.25
    """The share of the causal pairs that sparse routing should read, at `length` tokens."""
    cost_weight: float = 8e-4
    """lambda at the beginning, where reading everything is still cheap; then it is steered."""
    steering: float = 0.25
    """How fast: log lambda moves by this times the relative miss, each step."""
    entropy_weight: float = 0.5
    """beta at the beginning, times lambda: tokens try all regimes before they settle."""
    entropy_share: float = 0.6
    """The share of the steps after which that weight has fallen to 0."""
    global_bias: float = 1.5
    """How much more likely than others the global regime is when training begins."""
    learning_rate: float = 3e-3
    """Peak of AdamW's; warmed up over the first updates, then a cosine."""
    tune_rate: float = 2e-3
    """The same of the second phase."""
    tune_cost: float = 0.2
    """What all pairs cost in the second phase, in nats per token; then it is steered."""
    lora: int = 0
    """The rank of changes to the projections of q, k and the output; the second phase trains it."""
    lora_rate: float = 1e-3
    """Their learning rate, in the place of `tune_rate`."""
    weight_decay: float = 0.01
    position_range: float = 1.0
    """Windows lie within this multiple of the model's context, at random. Above 1, the routers also
    see positions that only longer texts have; attention itself depends on distances alone."""
    seed: int = 0
    valid_windows: int = 2
    """Windows held out for validation."""
    checkpoint_every: int = 10
    """Steps between checkpoints, and between evaluations."""

    def __post_init__(self) -> None:
        check_counts(self, {"length": 64, "seed": 0, "steps": 0, "tune_steps": 0, "lora": 0})
        counts = ("updates", "queries", "valid_windows", "checkpoint_every")
        check_counts(self, dict.fromkeys(counts, 1))
        for name, low, high in (
            ("target_density", 1e-4, 1.0),
            ("cost_weight", 1e-7, 1e2),
            ("steering", 0.0, 10.0),
            ("entropy_weight", 0.0, 10.0),
            ("entropy_share", 0.0, 1.0),
            ("global_bias", -20.0, 20.0),
            ("learning_rate", 1e-9, 1.0),
            ("tune_rate", 1e-9, 1.0),
            ("tune_cost", 1e-7, 1e2),
            ("lora_rate", 1e-9, 1.0),
            ("weight_decay", 0.0, 1.0),
            ("position_range", 1.0, 1024.0),
        ):
            check_number(self, name, least=low, most=high)
        if self.queries > self.length:
            raise ValueError(f"queries must not exceed length={self.length}, got {self.queries}")
        if self.lora and not self.tune_steps:
            raise ValueError(
                f"lora must be 0 without a second phase, which trains it, got {self.lora}; give "
                "tune_steps (--set tune_steps=16)"
            )

    @property
    def total_steps(self) -> int:
        return self.steps + self.tune_steps

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> RetrofitSettings:
        """Those that `to_dict` gave; what is missing is the default."""
        return decode(cls, {**asdict(cls()), **values}, "settings")


@dataclass(frozen=True, kw_only=True)
class RetrofitConfig:
    """Everything that a retrofit follows from, together with the contents of its data."""

    start: str | None
    """The checksum of the routers it began with; None: of none."""
    base: BaseIdentity
    geometry: MoSARConfig
    settings: RetrofitSettings
    dtype: str = "float32"
    """Of the base model's weights while the routers are trained."""

    def to_dict(self) -> dict[str, Any]:
        return {
            "kind": KIND,
            "start": self.start,
            "base": self.base.to_dict(),
            "geometry": self.geometry.to_dict(),
            "settings": self.settings.to_dict(),
            "dtype": self.dtype,
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> RetrofitConfig:
        if values.get("kind") != KIND:
            raise ValueError("it is of another kind of run")
        return cls(
            start=values["start"],
            base=decode(BaseIdentity, values["base"], "base"),
            geometry=MoSARConfig.from_dict(values["geometry"]),
            settings=RetrofitSettings.from_dict(values["settings"]),
            dtype=values.get("dtype", "float32"),
        )

    def fingerprint(self) -> str:
        values = self.to_dict()
        # Older runs lack these; their defaults do not change a fingerprint.
        for holder, name, default in (
            (values, "dtype", "float32"),
            (values["settings"], "position_range", 1.0),
        ):
            if holder[name] == default:
                del holder[name]
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def changed_settings(named: Mapping[str, Any], changes: Iterable[str]) -> dict[str, Any]:
    """The named settings with changes like "updates=4"; a ValueError says what is wrong."""
    values = {**named, **parse_changes(changes, field_types(RetrofitSettings))}
    RetrofitSettings(**values)
    return values
