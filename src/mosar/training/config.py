"""The configuration of a run: a preset, a variant, and changes `dotted.key=value`.

    RunConfig = model + attention + data + train + distributed, all frozen; saved with the run

A variant gives the keys under `attention.`, a preset the others and, where there is a cost, the
length of its warm-up; changes come last. The vocabulary is that of the data unless the preset or
a change sets it.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from difflib import get_close_matches
from numbers import Integral, Real
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeGuard, Union, get_args, get_origin, get_type_hints

from mosar.data.config import DataConfig
from mosar.data.tasks import TASKS
from mosar.files import parse_json
from mosar.geometries import VARIANTS, AttentionConfig
from mosar.model.config import ModelConfig
from mosar.training.precision import automatic_precision
from mosar.training.presets import PRESETS

Precision = Literal["fp32", "bf16", "auto"]
PRECISIONS = get_args(Precision)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How the parameters are learnt, and what is kept on the way."""

    steps: int
    """Updates of the parameters."""
    micro_batch: int = 1
    """Windows of the data in one pass through the model."""
    accumulation: int = 1
    """Passes in one update; a step sees micro_batch x accumulation windows."""
    learning_rate: float = 3e-4
    """The peak, reached at the end of the warm-up."""
    min_learning_rate: float = 3e-5
    """Where the cosine ends."""
    warmup_steps: int = 100
    """Steps of linear growth up to the peak."""
    decay_steps: int | None = None
    """The step at which the cosine ends, the minimum from there on; None: `steps`."""
    weight_decay: float = 0.1
    """AdamW's, on matrices only."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's."""
    grad_clip: float | None = 1.0
    """The largest norm of the gradient; None: not clipped."""
    seed: int = 0
    """Of the initial parameters."""
    precision: Precision = "fp32"
    """"bf16": matrix products in bfloat16; parameters and optimizer stay in float32. "auto" becomes
    "bf16" on a GPU that has it, "fp32" elsewhere."""
    device: str = "cpu"
    """Where torch computes."""
    loss_chunk: int = 0
    """Tokens whose logits exist at one time; 0: as many as is quick."""
    checkpoint_activations: bool = False
    """Compute a layer's activations again in the backward pass instead of keeping them."""
    eval_every: int = 100
    """Steps between evaluations; the first step and the last one are always evaluated."""
    eval_batches: int = 8
    """Windows of the validation split in one evaluation, in steps' worth; always the same ones."""
    checkpoint_every: int = 100
    """Steps between checkpoints; the last step is always saved."""
    keep_last: int = 2
    """The newest checkpoints that are kept."""
    keep_every: int = 0
    """Checkpoints at multiples of this are kept for ever; 0: none."""
    log_every: int = 1
    """Steps between the lines of the metrics."""
    tensorboard: bool = False
    """Write the metrics for TensorBoard too."""

    def __post_init__(self) -> None:
        for name, minimum in _COUNTS.items():
            value = getattr(self, name)
            if not _is_count(value, minimum):
                raise ValueError(f"{name} must be an integer >= {minimum}, got {value!r}")
        decay_steps = self.steps if self.decay_steps is None else self.decay_steps
        if not _is_count(decay_steps, 1):
            raise ValueError(f"decay_steps must be an integer >= 1, got {decay_steps!r}")
        # Said in full, so that a longer run of the same schedule is seen to be one.
        object.__setattr__(self, "decay_steps", decay_steps)
        for name, most in (("learning_rate", math.inf), ("min_learning_rate", self.learning_rate)):
            value = getattr(self, name)
            if not _is_real(value) or not 0 <= value <= most:
                bound = ">= 0" if most == math.inf else f"in [0, learning_rate = {most!r}]"
                raise ValueError(f"{name} must be a finite number {bound}, got {value!r}")
        if not _is_real(self.weight_decay) or self.weight_decay < 0:
            raise ValueError(f"weight_decay must be a number >= 0, got {self.weight_decay!r}")
        if self.grad_clip is not None and (not _is_real(self.grad_clip) or self.grad_clip <= 0):
            raise ValueError(f"grad_clip must be none or a number > 0, got {self.grad_clip!r}")
        betas = self.betas
        if len(betas) != 2 or not all(_is_real(beta) and 0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas must be two numbers in [0, 1), got {betas!r}")
        if self.precision not in PRECISIONS:
            raise ValueError(f"precision must be one of {PRECISIONS}, got {self.precision!r}")
        if self.precision == "auto":
            # Decided once and saved, so that a run goes on in the precision it began with.
            object.__setattr__(self, "precision", automatic_precision(self.device))

    @property
    def windows_per_step(self) -> int:
        return self.micro_batch * self.accumulation


@dataclass(frozen=True, kw_only=True)
class DistributedConfig:
    """How the processes that a launcher started divide the work: data x shard x tensor of them."""

    data: int | None = None
    """Copies of the model, each fed a part of the batch; None: as many as the rest leaves."""
    shard: int = 1
    """Processes that feed on parts of the batch too, and divide parameters and optimizer."""
    tensor: int = 1
    """Processes that divide heads and feed-forward of every layer."""
    timeout: float = 600.0
    """Seconds to wait for the other processes before the job is given up."""

    def __post_init__(self) -> None:
        for name in ("data", "shard", "tensor"):
            value = getattr(self, name)
            if not _is_count(value, 1) and not (name == "data" and value is None):
                rule = "none or an integer >= 1" if name == "data" else "an integer >= 1"
                raise ValueError(f"{name} must be {rule}, got {value!r}")
        if not _is_real(self.timeout) or not 1 <= self.timeout <= 1e6:
            raise ValueError(f"timeout must be seconds in [1, 1e6], got {self.timeout!r}")


_COUNTS = {
    **dict.fromkeys(("steps", "micro_batch", "accumulation", "eval_every", "eval_batches"), 1),
    **dict.fromkeys(("checkpoint_every", "keep_last", "log_every"), 1),
    **dict.fromkeys(("warmup_steps", "seed", "loss_chunk", "keep_every"), 0),
}


def _is_count(value: object, minimum: int) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= minimum


def _is_real(value: object) -> TypeGuard[float]:
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Everything that a run follows from, together with the contents of its data."""

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
        # Regimes that do not fit together should be refused now, not by the first layer.
        self.attention.mosar_config(self.model.max_length)

    @property
    def tokens_per_step(self) -> int:
        return self.train.windows_per_step * self.model.max_length

    def to_dict(self) -> dict[str, Any]:
        """As JSON holds it: an object a section."""
        return json.loads(json.dumps(asdict(self), default=str))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> RunConfig:
        """The configuration that `to_dict` gave; a ValueError names an unknown or missing key."""
        unknown = sorted(set(values) - {*SECTIONS, *_LABELS})
        missing = sorted(set(SECTIONS) - set(values) - {"distributed"})
        if unknown or missing:
            raise ValueError(f"a run's configuration lacks {missing} and has unknown {unknown}")
        given: dict[str, Any] = {name: str(values.get(name, "")) for name in _LABELS}
        for name, kind in SECTIONS.items():
            section = values.get(name, {})
            if isinstance(section, dict):
                section = {**_ADDED.get(name, {}), **section}
            given[name] = _decode(kind, section, name)
        return cls(**given)

    def flat(self) -> dict[str, Any]:
        """Dotted key -> value, as JSON holds it; labels left out."""
        values = self.to_dict()
        return {
            f"{section}.{name}": value
            for section in SECTIONS
            for name, value in values[section].items()
        }

    def fingerprint(self) -> str:
        """A hash of the keys that decide the result, up to the order of sums and the last step."""
        excluded = {*NEUTRAL, *ROUNDING, "train.steps"}
        added = {f"{name}.{key}": v for name, keys in _ADDED.items() for key, v in keys.items()}
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
# Keys that older run folders lack, with what their absence means; there they change no fingerprint.
_ADDED: dict[str, dict[str, Any]] = {
    "data": {"task": "text"},
    "distributed": asdict(DistributedConfig()),
}
# Keys that change what is recorded and kept, never the parameters (data is known by its contents).
NEUTRAL = frozenset(
    {
        "data.folder",
        *("train.eval_every", "train.eval_batches", "train.log_every", "train.tensorboard"),
        *("train.checkpoint_every", "train.keep_last", "train.keep_every"),
        "distributed.timeout",
    }
)
# Keys that change the order of sums alone, as long as a step sees as many windows.
ROUNDING = frozenset(
    {
        *("train.micro_batch", "train.accumulation"),
        *("train.loss_chunk", "train.checkpoint_activations"),
        *("distributed.data", "distributed.shard", "distributed.tensor"),
    }
)


def known_keys() -> dict[str, Any]:
    """Dotted key -> type of its value."""
    return {
        f"{section}.{name}": annotation
        for section, kind in SECTIONS.items()
        for name, annotation in get_type_hints(kind).items()
        if name in {field.name for field in fields(kind)}
    }


def resolve_config(
    *,
    variant: str,
    preset: str,
    data: Path | str,
    changes: Iterable[str] = (),
    vocab_size: int | None = None,
) -> RunConfig:
    """The configuration of `variant` and `preset` with `changes` like "train.steps=60" on top.

    `vocab_size` is that of the data, for presets that do not set one; by default it is looked up.
    """
    check_name("variant", variant, VARIANTS)
    check_name("preset", preset, PRESETS)
    values: dict[str, Any] = {
        f"attention.{field.name}": getattr(VARIANTS[variant], field.name)
        for field in fields(VARIANTS[variant])
    }
    given = {**PRESETS[preset], "data.folder": str(data)}
    changed = parse_changes(changes)
    if not (values | changed)["attention.cost_weight"]:
        # Without a price its warm-up means nothing, and must not make a run another one.
        given.pop("attention.cost_warmup", None)
    values |= given | changed
    task = values.get("data.task", DataConfig().task)
    if task != "text":
        # A task needs no folder, and has a vocabulary of its own.
        vocab_size = TASKS[task](values["model.max_length"]).vocab_size
    if "model.vocab_size" not in values:
        values["model.vocab_size"] = vocab_size or _vocab_size(values["data.folder"])
    return _assemble(values, {"variant": variant, "preset": preset})


def changed_config(config: RunConfig, changes: Iterable[str]) -> RunConfig:
    """`config` with changes like "train.steps=60"."""
    kinds = known_keys()
    values = {key: _decode(kinds[key], value, key) for key, value in config.flat().items()}
    changed = parse_changes(changes)
    if changed.get("train.steps") and values["train.decay_steps"] == values["train.steps"]:
        # It was not set apart from the steps, so it follows them.
        values["train.decay_steps"] = None
    return _assemble(values | changed, {name: getattr(config, name) for name in _LABELS})


def _assemble(values: dict[str, Any], labels: dict[str, str]) -> RunConfig:
    sections: dict[str, Any] = {**labels}
    for section, kind in SECTIONS.items():
        prefix = f"{section}."
        given = {k.removeprefix(prefix): v for k, v in values.items() if k.startswith(prefix)}
        try:
            sections[section] = kind(**given)
        except ValueError as error:
            raise ValueError(f"{section}: {error}") from None
    return RunConfig(**sections)


def _vocab_size(folder: str) -> int:
    from mosar.data.manifest import Manifest

    return Manifest.read(folder).tokenizer.vocab_size


def check_name(what: str, name: str, known: Iterable[str]) -> None:
    known = list(known)
    if name not in known:
        raise ValueError(
            f"{what} must be one of {', '.join(known)}, got {name!r}{_nearest(name, known)}"
        )


def parse_changes(changes: Iterable[str]) -> dict[str, Any]:
    """ "train.steps=60" -> {"train.steps": 60}; a ValueError names the nearest known key."""
    kinds = known_keys()
    parsed = {}
    for change in changes:
        key, equals, text = change.partition("=")
        key = key.strip()
        if not equals:
            raise ValueError(f"a change is written dotted.key=value, got {change!r}")
        if key not in kinds:
            raise ValueError(f"there is no key {key!r}{_nearest(key, kinds)}")
        parsed[key] = _parse(kinds[key], text.strip(), key)
    return parsed


def _nearest(name: str, known: Iterable[str]) -> str:
    known = list(known)
    last = name.rpartition(".")[2]
    same_ending = [key for key in known if key.rpartition(".")[2] == last]
    found = same_ending or get_close_matches(name, known, n=1, cutoff=0.5)
    if not found:
        by_ending = {key.rpartition(".")[2]: key for key in known}
        found = [by_ending[key] for key in get_close_matches(last, by_ending, n=1, cutoff=0.5)]
    return f"; did you mean {' or '.join(map(repr, found))}?" if found else ""


def _parse(kind: Any, text: str, key: str) -> Any:
    """The value that `text` stands for: plain numbers and words, JSON for anything larger."""
    options = _options(kind)
    if NoneType in options and text.lower() in ("none", "null"):
        return None
    if bool in options and text.lower() in ("true", "false"):
        return text.lower() == "true"
    for number in (int, float):
        if number in options:
            try:
                return number(text)
            except ValueError:
                continue
    if str in options or Path in options:
        return text
    if any(get_origin(option) is Literal for option in options):
        return _decode(kind, text, key)
    if any(get_origin(option) is tuple or is_dataclass(option) for option in options):
        try:
            value = parse_json(text)
        except ValueError:
            pass
        else:
            return _decode(kind, value, key)
    raise ValueError(f"{key} must be {_name(kind)}, got {text!r}")


def _decode(kind: Any, value: Any, key: str) -> Any:
    """A value as JSON holds it, turned into `kind`."""
    for option in _options(kind):
        origin, arguments = get_origin(option), get_args(option)
        if option is NoneType and value is None:
            return None
        if is_dataclass(option) and isinstance(value, dict):
            return _decode_dataclass(option, value, key)
        if origin is Literal and value in arguments:
            return value
        if origin is tuple and isinstance(value, (list, tuple)):
            kinds = [arguments[0]] * len(value) if arguments[-1] is ... else list(arguments)
            if len(kinds) == len(value):
                return tuple(_decode(k, v, key) for k, v in zip(kinds, value, strict=True))
        if option is float and _is_real(value):
            return float(value)
        if option in (int, bool, str) and type(value) is option:
            return value
        if option is Path and isinstance(value, str):
            return Path(value)
    raise ValueError(f"{key} must be {_name(kind)}, got {value!r}")


def _decode_dataclass(kind: Any, values: dict[str, Any], key: str) -> Any:
    hints = get_type_hints(kind)
    known = [field.name for field in fields(kind)]
    unknown, missing = sorted(set(values) - set(known)), sorted(set(known) - set(values))
    if unknown or missing:
        raise ValueError(f"{key} lacks the keys {missing} and has unknown {unknown}")
    return kind(**{n: _decode(hints[n], v, f"{key}.{n}") for n, v in values.items()})


def _options(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)


def _name(kind: Any) -> str:
    """A type as an error message says it."""
    names = {int: "an integer", float: "a number", bool: "true or false", str: "a word"}
    names |= {NoneType: "none", Path: "a path"}

    def say(option: Any) -> str:
        if get_origin(option) is Literal:
            return f"one of {', '.join(get_args(option))}"
        if get_origin(option) is tuple:
            return "a list in JSON"
        return names.get(option, "an object in JSON")

    return " or ".join(say(option) for option in _options(kind))
