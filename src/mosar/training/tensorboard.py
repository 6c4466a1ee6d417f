"""Writes the metrics for TensorBoard, if `train.tensorboard` is set."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mosar.errors import TrainingError
from mosar.lazy import install_line
from mosar.training.config import RunConfig

FOLDER = "tensorboard"
WriteLine = Callable[[dict[str, Any]], None]
"""Takes a line of the metrics."""


@contextmanager
def tensorboard_writer(config: RunConfig, out: Path, start: int) -> Iterator[WriteLine]:
    """Writes scalars; drops what an earlier process wrote after step `start`."""
    if not config.train.tensorboard:
        yield lambda line: None
        return
    from torch.utils.tensorboard import SummaryWriter

    geometry = config.regimes
    regimes = [regime.name for regime in geometry.regimes]
    with SummaryWriter(str(out / FOLDER), purge_step=start + 1 if start else None) as writer:

        def write(line: dict[str, Any]) -> None:
            for name, value in _scalars(line, regimes):
                writer.add_scalar(f"{line['split']}/{name}", value, line["step"])

        yield write


def _scalars(line: dict[str, Any], regimes: Sequence[str]) -> Iterator[tuple[str, float]]:
    for name, value in line.items():
        if isinstance(value, float):
            yield name, value
    for role, layers in (line["regime_shares"] or {}).items():
        for layer, shares in enumerate(layers):
            for regime, share in zip(regimes, shares, strict=True):
                yield f"share of {regime} ({role})/layer {layer}", share


def check_tensorboard(config: RunConfig) -> None:
    """A TrainingError if the package is needed and missing."""
    if not config.train.tensorboard:
        return
    try:
        import torch.utils.tensorboard  # noqa: F401
    except ModuleNotFoundError as error:
        raise TrainingError(
            f"train.tensorboard needs the package tensorboard ({error}): "
            f"{install_line('tensorboard')}, or set train.tensorboard=false"
        ) from None
