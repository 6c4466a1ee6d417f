"""What can stop a run; the text of each is what the user sees."""

from __future__ import annotations

import signal


class TrainingError(RuntimeError):
    """A run cannot start or go on."""

    reported_by_peer = False
    """Whether another process of the same job says it."""


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
