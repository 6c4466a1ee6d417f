"""Errors that a user can act on; their text is what the user reads.

The command line turns every `MosarError` into one line and its exit code. A plain ValueError means
that the caller gave a wrong value.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager


class MosarError(RuntimeError):
    """A failure; the text says why it happened and what to do about it."""

    exit_code = 1
    reported_by_peer = False
    """Whether another process of the same job reports it."""


class DamagedFile(MosarError, ValueError):
    """A file was damaged or altered after it was written."""


class DataError(MosarError, ValueError):
    """Text, a tokenizer or a dataset cannot be used."""


class ModelError(MosarError):
    """A trained model cannot be loaded, evaluated, exported or retrofitted."""


@contextmanager
def needing(module: str, message: str) -> Iterator[None]:
    """Around an import: if `module` is missing, raises a ModelError with the message."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != module:
            raise
        raise ModelError(message) from None


class PlanError(MosarError):
    """The settings of a plan contradict each other."""


class ReportError(MosarError):
    """A report cannot be made from a folder."""


class TrainingError(MosarError):
    """A run or an experiment cannot start or continue."""


class NonFiniteError(TrainingError):
    """The loss or the gradient is not finite; the parameters were not changed."""


class LostProcessError(TrainingError):
    """Another process of the job does not respond."""


class TrainingInterrupted(TrainingError):
    """A signal stopped the run, and it is saved."""

    def __init__(self, message: str, signal_number: int):
        super().__init__(message)
        self.signal_number = signal_number

    @property
    def exit_code(self) -> int:
        """As shells report it: 130 for Ctrl-C, 143 for SIGTERM."""
        return 128 + self.signal_number

    @property
    def name(self) -> str:
        return signal.Signals(self.signal_number).name
