"""The cells of an experiment: variants x seeds x the values of an axis.

seed k sets train.seed and data.seed: variants of one seed start alike and see the same data
an axis is a dotted key with values; variants that do not read the key run once, without it
with several axes, each cell changes one key, and every variant also runs unchanged
a change for every cell may have the key of an axis: then the unchanged variant has its value
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from mosar.data.manifest import Manifest
from mosar.data.stream import TokenStream
from mosar.data.tasks import TASKS
from mosar.errors import ModelError
from mosar.evaluation.choices import parse_lengths
from mosar.evaluation.retrieval import check_questions
from mosar.evaluation.validation_text import check_blocks, default_tokens
from mosar.geometries import MATCHED_VARIANTS, VARIANTS
from mosar.records import Cell
from mosar.schema import check_name
from mosar.training.batches import data_fingerprint
from mosar.training.config import (
    PRESETS,
    RunConfig,
    parse_changes,
    resolve_config,
)

LENGTHS = ("1x", "2x", "4x")
# Keys that the experiment sets itself, with their options.
_TAKEN = {"train.seed": "--seeds", "data.seed": "--seeds", "data.folder": "--data"}


@dataclass(frozen=True, kw_only=True)
class Axis:
    """One key and the values it takes."""

    key: str
    values: tuple[str, ...]
    """As written after `=` in a change."""

    @classmethod
    def parse(cls, text: str) -> Axis:
        """ "attention.barrier=4,6,8"; commas inside brackets belong to a value."""
        key, equals, values = text.partition("=")
        parts = tuple(part.strip() for part in _split(values))
        if not equals or not all(parts):
            raise ValueError(f"a grid is written dotted.key=value,value, got {text!r}")
        if len(set(parts)) < len(parts):
            raise ValueError(f"a grid names each value once, got {text!r}")
        # Check key and values like changes: an error suggests the nearest key.
        parse_changes([f"{key.strip()}={part}" for part in parts])
        return cls(key=key.strip(), values=parts)

    def is_read_by(self, variant: str) -> bool:
        section, _, name = self.key.partition(".")
        return section != "attention" or VARIANTS[variant].reads(name)


def _split(text: str) -> list[str]:
    """Splits at commas outside brackets and braces."""
    parts, depth = [""], 0
    for character in text:
        depth += (character in "[{") - (character in "]}")
        if character == "," and not depth:
            parts.append("")
        else:
            parts[-1] += character
    return parts


@dataclass(frozen=True, kw_only=True)
class ExperimentSettings:
    """Which cells there are, and how each is trained and evaluated."""

    preset: str
    variants: tuple[str, ...] = MATCHED_VARIANTS
    seeds: int = 1
    """Number of seeds, starting from 0."""
    data: Path
    grid: tuple[Axis, ...] = ()
    changes: tuple[str, ...] = ()
    """Like "train.steps=60", for every cell."""
    lengths: tuple[str, ...] = LENGTHS
    eval_tokens: int | None = None
    """Tokens to predict at each length; None: as many as 64 training steps see."""
    milestones: tuple[int, ...] | None = None
    """Steps that are evaluated besides the last; None: all that `train.keep_every` keeps."""

    def __post_init__(self) -> None:
        check_name("preset", self.preset, PRESETS)
        if not self.variants:
            raise ValueError(f"at least one variant is needed, of {', '.join(VARIANTS)}")
        for variant in self.variants:
            check_name("variant", variant, VARIANTS)
        if len(set(self.variants)) < len(self.variants):
            raise ValueError(f"variants must be named once, got {', '.join(self.variants)}")
        if self.seeds < 1:
            raise ValueError(f"seeds must be at least 1, got {self.seeds}")
        given = {change.partition("=")[0].strip() for change in self.changes}
        keys = [axis.key for axis in self.grid]
        if len(set(keys)) < len(keys):
            raise ValueError(f"each --grid must have a key of its own, got {', '.join(keys)}")
        for key in keys:
            if key in _TAKEN:
                raise ValueError(f"{key} is set by {_TAKEN[key]}, it cannot be an axis")
        for key in sorted(given & set(_TAKEN)):
            raise ValueError(f"{key} is set by {_TAKEN[key]}, not by --set")
        for axis in self.grid:
            if not any(map(axis.is_read_by, self.variants)):
                raise ValueError(
                    f"none of the variants {', '.join(self.variants)} reads {axis.key}"
                )
        object.__setattr__(self, "data", Path(self.data).absolute())

    def cells(self) -> list[Cell]:
        """Seed by seed, so that every variant has a result early."""
        return [
            Cell(variant=variant, preset=self.preset, seed=seed, grid=grid)
            for seed in range(self.seeds)
            for variant in self.variants
            for grid in self._points(variant)
        ]

    def _points(self, variant: str) -> list[dict[str, Any]]:
        read = [axis for axis in self.grid if axis.is_read_by(variant)]
        unchanged = [{}] if len(self.grid) > 1 or not read else []
        return unchanged + [{axis.key: value} for axis in read for value in axis.values]

    def config(self, cell: Cell, *, vocab_size: int | None = None) -> RunConfig:
        """The configuration of a cell; of one that learns text, the data must be there.

        `vocab_size`: taken for that of the data, which then need not be there.
        """
        changes = [f"{key}={value}" for key, value in cell.grid.items()]
        changes += [f"train.seed={cell.seed}", f"data.seed={cell.seed}"]
        return resolve_config(
            variant=cell.variant,
            preset=cell.preset,
            data=self.data,
            changes=[*self.changes, *changes],
            vocab_size=vocab_size,
        )

    @property
    def reads_text(self) -> bool:
        """Whether some cell learns text; tasks need no data."""
        return any(self.config(cell, vocab_size=1).data.task == "text" for cell in self.cells())

    def data_fingerprint(self) -> str | None:
        """A hash of the data's contents; None if no cell reads it."""
        return data_fingerprint(Manifest.read(self.data)) if self.reads_text else None

    def evaluated_steps(self, config: RunConfig) -> tuple[int, ...]:
        """The milestones of a run, then its last step."""
        chosen = _kept_steps(config) if self.milestones is None else self.milestones
        return (*chosen, config.train.steps)

    def check_cells(self) -> None:
        """A ValueError, before the first cell, for settings that no cell could run with."""
        for cell in self.cells():
            config = self.config(cell)
            self._check_evaluation(config)
            for step in self.milestones or ():
                if step not in _kept_steps(config):
                    raise ValueError(
                        f"milestones must be steps before the last ({config.train.steps}) at which "
                        f"train.keep_every={config.train.keep_every} keeps a checkpoint, got {step}"
                    )

    def _check_evaluation(self, config: RunConfig) -> None:
        """Finds errors that would otherwise appear after hours of training."""
        length = config.model.max_length
        sizes = parse_lengths(self.lengths, length)
        tokens = default_tokens(config) if self.eval_tokens is None else self.eval_tokens
        if config.data.task != "text":
            check_questions(TASKS[config.data.task](length), length, sizes, tokens, "eval_tokens")
            return
        try:
            valid = TokenStream(self.data, "valid", verify=False)
            check_blocks(valid, sizes, tokens, "eval_tokens")
        except ModelError as error:
            raise ValueError(str(error)) from None

    def shared(self) -> dict[str, Any]:
        """The settings that all cells of one folder must share."""
        kept = asdict(replace(self, grid=()))
        shared = ("preset", "changes", "lengths", "eval_tokens", "milestones")
        return {key: kept[key] for key in shared}


def _kept_steps(config: RunConfig) -> range:
    """Steps before the last whose checkpoints are kept."""
    every = config.train.keep_every
    return range(every, config.train.steps, every) if every else range(0)
