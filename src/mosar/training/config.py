"""The configuration of a run: a preset, a variant, and changes `dotted.key=value`.

    RunConfig = model + attention + data + train + distributed, all frozen; saved with the run

A variant gives the keys under `attention.`, a preset the others and, where there is a cost, the
length of its warm-up; changes come last. The vocabulary is that of the data unless the preset or
a change sets it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args

from mosar import schema
from mosar.core.checks import check_counts, check_number, is_real
from mosar.core.config import MoSARConfig
from mosar.data.config import DataConfig
from mosar.data.tasks import TASKS
from mosar.geometries import GEOMETRIES, VARIANTS, AttentionConfig
from mosar.model.config import ModelConfig
from mosar.schema import check_name
from mosar.training.precision import automatic_precision
from mosar.training.presets import PRESETS

Precision = Literal["fp32", "bf16", "auto"]
PRECISIONS = get_args(Precision)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How the parameters are trained, and what is saved meanwhile."""

    steps: int
    """Updates of the parameters."""
    micro_batch: int = 1
    """Windows of the data in one pass through the model."""
    accumulation: int = 1
    """Passes in one update; a step sees micro_batch x accumulation windows."""
    learning_rate: float = 3e-4
    """The peak, reached at the end of the warm-up."""
    min_learning_rate: float = 3e-5
    """The rate at the end of the cosine."""
    warmup_steps: int = 100
    """Steps of linear growth up to the peak."""
    decay_steps: int | None = None
    """The step at which the cosine reaches the minimum; None: `steps`."""
    weight_decay: float = 0.1
    """AdamW's weight decay, on matrices only."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's betas."""
    grad_clip: float | None = 1.0
    """The largest norm of the gradient; None: not clipped."""
    seed: int = 0
    """Seed of the initial parameters."""
    precision: Precision = "fp32"
    """"bf16": matrix products in bfloat16; parameters and optimizer stay in float32. "auto" becomes
    "bf16" on a GPU that has it, "fp32" elsewhere."""
    device: str = "cpu"
    """Where torch computes."""
    loss_chunk: int = 0
    """Tokens whose logits are in memory at the same time; 0: a fast number."""
    checkpoint_activations: bool = False
    """Recompute a layer's activations in the backward pass instead of keeping them."""
    eval_every: int = 100
    """Steps between evaluations; the first step and the last one are always evaluated."""
    eval_batches: int = 8
    """Batches of validation windows per evaluation, each of a step's size; always the same."""
    checkpoint_every: int = 100
    """Steps between checkpoints; the last step is always saved."""
    keep_last: int = 2
    """How many of the newest checkpoints are kept."""
    keep_every: int = 0
    """Checkpoints at multiples of this step are never removed; 0: none."""
    log_every: int = 1
    """Steps between the lines of the metrics."""
    tensorboard: bool = False
    """Write the metrics for TensorBoard too."""

    def __post_init__(self) -> None:
        if self.decay_steps is None:
            # Stored, so that a longer run with the same schedule is recognised as such.
            object.__setattr__(self, "decay_steps", self.steps)
        check_counts(self, _COUNTS)
        check_number(self, "learning_rate", least=0, keep_integers=True)
        most = self.learning_rate
        check_number(self, "min_learning_rate", least=0, most=most, keep_integers=True)
        check_number(self, "weight_decay", least=0, keep_integers=True)
        check_number(self, "grad_clip", above=0, optional=True, keep_integers=True)
        betas = self.betas
        if len(betas) != 2 or not all(is_real(beta) and 0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas must be two numbers in [0, 1), got {betas!r}")
        if self.precision not in PRECISIONS:
            raise ValueError(f"precision must be one of {PRECISIONS}, got {self.precision!r}")
        if self.precision == "auto":
            # Decided once and saved, so that a resumed run keeps its precision.
            object.__setattr__(self, "precision", automatic_precision(self.device))

    @property
    def windows_per_step(self) -> int:
        return self.micro_batch * self.accumulation


@dataclass(frozen=True, kw_only=True)
class DistributedConfig:
    """How data x shard x tensor processes of a launcher divide the work."""

    data: int | None = None
    """Copies of the model, each with a part of the batch; None: all processes that are left."""
    shard: int = 1
    """Processes that divide the batch, the parameters and the optimizer."""
    tensor: int = 1
    """Processes that divide the heads and the feed-forward of every layer."""
    timeout: float = 600.0
    """Seconds to wait for the other processes before the job fails."""

    def __post_init__(self) -> None:
        given = ("shard", "tensor") if self.data is None else ("data", "shard", "tensor")
        check_counts(self, dict.fromkeys(given, 1))
        check_number(self, "timeout", least=1, most=1e6, keep_integers=True)


_COUNTS = {
    **dict.fromkeys(("steps", "decay_steps", "micro_batch", "accumulation"), 1),
    **dict.fromkeys(("eval_every", "eval_batches"), 1),
    **dict.fromkeys(("checkpoint_every", "keep_last", "log_every"), 1),
    **dict.fromkeys(("warmup_steps", "seed", "loss_chunk", "keep_every"), 0),
}


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Everything that determines a run, besides the contents of its data."""

    model: ModelConfig
    attention: AttentionConfig
    data: DataConfig
    train: TrainConfig
    distributed: DistributedConfig = field(default_factory=DistributedConfig)
    variant: str = ""
    """A label: the variant it started from."""
    preset: str = ""
    """A label: the preset it started from."""

    def __post_init__(self) -> None:
        # Refuse wrong regimes now, not in the first layer.
        regimes = self.regimes
        for name in self.attention.start_regimes:
            regimes.regime_index(name)

    @property
    def regimes(self) -> MoSARConfig:
        """The regimes and routers at the sizes of the model."""
        return self.attention.mosar_config(self.model.max_length)

    @property
    def tokens_per_step(self) -> int:
        return self.train.windows_per_step * self.model.max_length

    def to_dict(self) -> dict[str, Any]:
        """JSON values: one object per section."""
        values = asdict(self) | {"attention": self.attention.to_dict()}
        return json.loads(json.dumps(values, default=str))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> RunConfig:
        """The configuration from `to_dict`; a ValueError names an unknown or missing key."""
        given = {**dict.fromkeys(_LABELS, ""), "distributed": {}, **values}
        for name, added in _ADDED.items():
            if isinstance(given.get(name), dict):
                known = {k: v for k, v in given[name].items() if (name, k, v) not in _REMOVED}
                given[name] = added | known
        return schema.decode(cls, given, "run")

    def flat(self) -> dict[str, Any]:
        """Dotted key -> JSON value, without labels."""
        values = self.to_dict()
        own = values["attention"].pop("own")
        flat = {
            f"{section}.{name}": value
            for section in SECTIONS
            for name, value in values[section].items()
        }
        return flat | {f"{_OWN}{name}": value for name, value in own.items()}

    def fingerprint(self) -> str:
        """A hash of the keys that change the result, except rounding and the last step."""
        excluded = {*NEUTRAL, *ROUNDING, "train.steps"}
        # JSON values, like the values they are compared with.
        sections = json.loads(json.dumps(_ADDED))
        added = {f"{name}.{key}": v for name, keys in sections.items() for key, v in keys.items()}
        # Likewise a geometry may gain a setting of its own.
        own = json.loads(json.dumps(asdict(self.attention.geometry_class.Own())))
        added |= {f"{_OWN}{name}": value for name, value in own.items()}
        decisive = {
            key: value
            for key, value in self.flat().items()
            if key not in excluded and not (key in added and added[key] == value)
        }
        decisive["windows_per_step"] = self.train.windows_per_step
        return hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()


SECTIONS: dict[str, type] = {
    "model": ModelConfig,
    "attention": AttentionConfig,
    "data": DataConfig,
    "train": TrainConfig,
    "distributed": DistributedConfig,
}
_LABELS = ("variant", "preset")
_OWN = "attention.own."
# Keys that older run folders lack, with the values they imply, which do not change a fingerprint.
_ADDED: dict[str, dict[str, Any]] = {
    "attention": {
        name: getattr(AttentionConfig(), name)
        for name in (
            *("cost_of", "hard_from", "router_queries", "start_regimes", "start_logit"),
            *("ladder", "ladder_plateau", "mass_weight", "position_range"),
            *("floor", "floor_from", "floor_until"),
        )
    }
    | {"own": {}},
    "data": {"task": "text"},
    "distributed": asdict(DistributedConfig()),
}
# Keys that older run folders have, with the only values that can still be run.
_REMOVED = [("attention", "per_head", False)]
# Keys that change what is recorded and kept but not the parameters; data has its own fingerprint.
NEUTRAL = frozenset(
    {
        "data.folder",
        *("train.eval_every", "train.eval_batches", "train.log_every", "train.tensorboard"),
        *("train.checkpoint_every", "train.keep_last", "train.keep_every"),
        "distributed.timeout",
    }
)
# Keys that only change the order of sums, as long as a step has the same number of windows.
ROUNDING = frozenset(
    {
        *("train.micro_batch", "train.accumulation"),
        *("train.loss_chunk", "train.checkpoint_activations"),
        *("distributed.data", "distributed.shard", "distributed.tensor"),
    }
)


def known_keys(*geometries: str) -> dict[str, Any]:
    """Dotted key -> type of its value, with the own settings of these geometries."""
    keys = {
        f"{section}.{name}": annotation
        for section, kind in SECTIONS.items()
        for name, annotation in schema.field_types(kind).items()
    }
    del keys["attention.own"]
    for geometry in geometries:
        for name, annotation in schema.field_types(GEOMETRIES[geometry].Own).items():
            key = f"{_OWN}{name}"
            keys[key] = keys.get(key, annotation) | annotation
    return keys


def resolve_config(
    *,
    variant: str,
    preset: str,
    data: Path | str,
    changes: Iterable[str] = (),
    vocab_size: int | None = None,
) -> RunConfig:
    """The configuration of `variant` and `preset` with `changes` like "train.steps=60" on top.

    vocab_size: the vocabulary of the data, for presets that do not set it; by default it is read
    from the data.
    """
    check_name("variant", variant, VARIANTS)
    check_name("preset", preset, PRESETS)
    values: dict[str, Any] = {
        f"attention.{field.name}": getattr(VARIANTS[variant], field.name)
        for field in fields(VARIANTS[variant])
    }
    own = asdict(values.pop("attention.own"))
    given = {**PRESETS[preset], "data.folder": str(data)}
    changed = _changes_of(changes, VARIANTS[variant].geometry)
    if "attention.geometry" not in changed:
        values |= {f"{_OWN}{name}": value for name, value in own.items()}
    weights = ("attention.cost_weight", "attention.mass_weight")
    if not any((values | changed)[weight] for weight in weights):
        # Without a price its warm-up has no effect, and must not make two runs differ.
        given.pop("attention.cost_warmup", None)
    values |= given | changed
    task = values.get("data.task", DataConfig().task)
    if task != "text":
        # A task needs no folder and has its own vocabulary.
        vocab_size = TASKS[task](values["model.max_length"]).vocab_size
    if "model.vocab_size" not in values:
        values["model.vocab_size"] = vocab_size or _vocab_size(values["data.folder"])
    return _assemble(values, {"variant": variant, "preset": preset})


def changed_config(config: RunConfig, changes: Iterable[str]) -> RunConfig:
    """`config` with changes like "train.steps=60"."""
    kinds = known_keys(config.attention.geometry)
    values = {
        key: schema.decode_value(kinds[key], value, key) for key, value in config.flat().items()
    }
    changed = _changes_of(changes, config.attention.geometry)
    if "attention.geometry" in changed:
        values = {key: value for key, value in values.items() if not key.startswith(_OWN)}
    if changed.get("train.steps") and values["train.decay_steps"] == values["train.steps"]:
        # It was not set separately, so it follows the steps.
        values["train.decay_steps"] = None
    return _assemble(values | changed, {name: getattr(config, name) for name in _LABELS})


def _assemble(values: dict[str, Any], labels: dict[str, str]) -> RunConfig:
    sections: dict[str, Any] = {**labels}
    for section, kind in SECTIONS.items():
        prefix = f"{section}."
        given = {k.removeprefix(prefix): v for k, v in values.items() if k.startswith(prefix)}
        own = {k: given.pop(k) for k in list(given) if f"{prefix}{k}".startswith(_OWN)}
        if own:
            given["own"] = {k.removeprefix("own."): v for k, v in own.items()}
        try:
            sections[section] = kind(**given)
        except ValueError as error:
            raise ValueError(f"{section}: {error}") from None
    return RunConfig(**sections)


def _vocab_size(folder: str) -> int:
    from mosar.data.manifest import Manifest

    return Manifest.read(folder).tokenizer.vocab_size


def parse_changes(changes: Iterable[str]) -> dict[str, Any]:
    """ "train.steps=60" -> {"train.steps": 60}; a ValueError names the nearest known key."""
    return schema.parse_changes(changes, known_keys(*GEOMETRIES))


def _changes_of(changes: Iterable[str], geometry: str) -> dict[str, Any]:
    """The changes to a configuration of `geometry`, which a change may replace."""
    changes = list(changes)
    changed = parse_changes(changes)
    geometry = changed.get("attention.geometry", geometry)
    known = known_keys(*GEOMETRIES) | (known_keys(geometry) if geometry in GEOMETRIES else {})
    # Several geometries may have the same key; parse its value as this geometry does.
    return schema.parse_changes(changes, known)
