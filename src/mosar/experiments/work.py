"""How much work a cell is, and a guess of how long it takes.

The unit of work is one token in a forward pass; training a token takes three.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import torch

from mosar.data.stream import TokenStream
from mosar.evaluation.choices import parse_lengths
from mosar.experiments.settings import ExperimentSettings
from mosar.model.decoder import Decoder
from mosar.records import Cell
from mosar.training.batches import open_batches
from mosar.training.config import RunConfig
from mosar.training.learner import Learner

_TRAINING = 3
# Steps of warm-up, timed steps, and the most seconds to spend. The fastest step counts, since other
# processes only slow steps down.
_WARM_UP, _TIMED, _SECONDS = 1, 8, 10.0
# Larger models are not built for a guess: their operations are counted instead.
_LARGE = 50_000_000
# The share of a large matrix product's speed that a large model's step reaches.
_EFFICIENCY = 0.5
# Evaluation during training, checkpoints, the report.
_OVERHEAD = 1.15


def training_work(config: RunConfig) -> int:
    return _TRAINING * config.train.steps * config.tokens_per_step


def evaluation_work(settings: ExperimentSettings, config: RunConfig) -> int:
    """Routed variants are evaluated three times, and the discarded mass is two passes more."""
    sizes = parse_lengths(settings.lengths, config.model.max_length)
    tokens = settings.eval_tokens or 64 * config.tokens_per_step
    if config.data.task == "text":
        # There is no more text than the validation split has.
        tokens = min(tokens, TokenStream(config.data.folder, "valid", verify=False).num_tokens)
    routed = config.attention.geometry_class.routed
    # Attention grows with the length, but at these sizes the rest of the model outweighs it.
    return len(settings.evaluated_steps(config)) * len(sizes) * tokens * (4 if routed else 1)


def guess_seconds(
    settings: ExperimentSettings, cells: list[Cell], steps_done: Callable[[Cell], int]
) -> float:
    """Seconds that the cells will take on this machine, from a few real steps of the first one."""
    per_unit = _seconds_per_unit(settings, cells)
    work = 0.0
    for cell in cells:
        config = settings.config(cell)
        left = 1 - min(steps_done(cell) / config.train.steps, 1)
        work += left * training_work(config) + evaluation_work(settings, config)
    return work * per_unit * _OVERHEAD


def _seconds_per_unit(settings: ExperimentSettings, cells: list[Cell]) -> float:
    """Measured on the first cell that runs; 0 if none does."""
    for cell in cells:
        config = settings.config(cell)
        try:
            with torch.device("meta"):
                decoder = Decoder(config.model, config.attention)
            parameters = sum(parameter.numel() for parameter in decoder.parameters())
            return _counted(parameters) if parameters > _LARGE else _measured(config)
        except (RuntimeError, MemoryError, ValueError):
            # The error is reported when this cell runs; try the next one.
            continue
    return 0.0


def _measured(config: RunConfig) -> float:
    """Seconds per unit, from real steps that are discarded."""
    learner = Learner.of(config, open_batches(config))
    begin, quickest = time.perf_counter(), math.inf
    for step in range(1, 1 + _WARM_UP + _TIMED):
        start = time.perf_counter()
        learner.update(step)
        if step > _WARM_UP:
            quickest = min(quickest, time.perf_counter() - start)
            if time.perf_counter() - begin > _SECONDS:
                break
    return quickest / (_TRAINING * config.tokens_per_step)


def _counted(parameters: int) -> float:
    """Seconds per unit: two operations per parameter, at the speed of a matrix product."""
    size = 1024
    a, b = torch.randn(2, size, size)
    torch.mm(a, b)
    start = time.perf_counter()
    torch.mm(a, b)
    rate = 2 * size**3 / max(time.perf_counter() - start, 1e-6)
    return 2 * parameters / (rate * _EFFICIENCY)


def count_cells(number: int) -> str:
    """ "1 cell", "3 cells"."""
    return f"{number} cell{'' if number == 1 else 's'}"


def duration_text(seconds: float) -> str:
    """ "about 12 minutes", for people."""
    for unit, size in (("day", 86400), ("hour", 3600), ("minute", 60)):
        number = seconds / size
        if number >= (1.5 if unit != "minute" else 1):
            rounded = math.ceil(number) if number >= 10 else round(number, 1 if number < 3 else 0)
            return f"about {rounded:g} {unit}{'s' if rounded != 1 else ''}"
    return "less than a minute"
