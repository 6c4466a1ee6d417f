"""What can go wrong for reasons that a user can act on; the text of each is what they read.

The command line turns every `MosarError` into one line and its exit code; a plain ValueError means
that a caller gave a wrong value.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager


class MosarError(RuntimeError):
    """Something failed for a reason that its text names, with what to do about it."""

    exit_code = 1
    reported_by_peer = False
    """Whether another process of the same job says it."""


class DamagedFile(MosarError, ValueError):
    """A file that is not what was written."""


class DataError(MosarError, ValueError):
    """Text, a tokenizer or a dataset cannot be used."""


class ModelError(MosarError):
    """A trained model cannot be loaded, evaluated, exported or retrofitted."""


@contextmanager
def needing(module: str, message: str) -> Iterator[None]:
    """While something is imported: without `module`, a ModelError that says the message."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != module:
            raise
        raise ModelError(message) from None


class PlanError(MosarError):
    """What a plan is asked for does not fit together."""


class ReportError(MosarError):
    """A folder cannot be reported on."""


class TrainingError(MosarError):
    """A run or an experiment cannot start or go on."""


class NonFiniteError(TrainingError):
    """The loss or the gradient is not a number; the parameters were not touched."""


class LostProcessError(TrainingError):
    """Another process of the job does not answer."""


class TrainingInterrupted(TrainingError):
    """Somebody asked the run to stop, and it is saved."""

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
