"""The metrics for TensorBoard, where `train.tensorboard` asks for them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mosar.errors import TrainingError
from mosar.training.config import RunConfig

FOLDER = "tensorboard"
_ROLES = ("query", "key")


class Board:
    """Writes the scalars of lines; nothing without a writer."""

    def __init__(self, writer: Any = None, regimes: tuple[str, ...] = ()):
        self._writer = writer
        self._regimes = regimes

    def write(self, line: dict[str, Any]) -> None:
        if self._writer is None:
            return
        for name, value in self._scalars(line):
            self._writer.add_scalar(f"{line['split']}/{name}", value, line["step"])

    def _scalars(self, line: dict[str, Any]) -> Iterator[tuple[str, float]]:
        for name, value in line.items():
            if isinstance(value, float):
                yield name, value
        for role in _ROLES if line["regime_shares"] else ():
            for layer, shares in enumerate(line["regime_shares"][role]):
                for regime, share in zip(self._regimes, shares, strict=True):
                    yield f"share of {regime} ({role})/layer {layer}", share


@contextmanager
def tensorboard_writer(config: RunConfig, out: Path, start: int) -> Iterator[Board]:
    """A board that forgets what an earlier process wrote after step `start`."""
    if not config.train.tensorboard:
        yield Board()
        return
    check_tensorboard(config)
    from torch.utils.tensorboard import SummaryWriter

    geometry = config.attention.mosar_config(config.model.max_length)
    writer = SummaryWriter(str(out / FOLDER), purge_step=start + 1 if start else None)
    try:
        yield Board(writer, tuple(regime.name for regime in geometry.regimes))
    finally:
        writer.close()


def check_tensorboard(config: RunConfig) -> None:
    """A TrainingError where the package is asked for and missing."""
    if not config.train.tensorboard:
        return
    try:
        import torch.utils.tensorboard  # noqa: F401
    except ModuleNotFoundError as error:
        raise TrainingError(
            f"train.tensorboard needs the package tensorboard ({error}): "
            'pip install "mosar[tensorboard]", or set train.tensorboard=false'
        ) from None
