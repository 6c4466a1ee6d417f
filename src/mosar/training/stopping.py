"""Turns Ctrl-C and SIGTERM into a request that is checked where it is safe to stop."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """The signal that asked to stop, or None."""

    signal_number: int | None = None

    def __bool__(self) -> bool:
        return self.signal_number is not None


@contextmanager
def stop_requests(*, patient: bool = False) -> Iterator[StopRequest]:
    """Turns the first signal into a request; a second one ends the process as usual.

    With `patient`, more signals are ignored: a launcher passes on a signal that every process of
    the job gets anyway.
    """
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        # Python delivers signals to the main thread only, and this is not the main thread.
        yield request
        return
    before = {number: signal.getsignal(number) for number in _SIGNALS}

    def ask(number: int, frame: object) -> None:
        request.signal_number = number
        if patient:
            return
        for each, handler in before.items():
            signal.signal(each, handler)

    for number in _SIGNALS:
        signal.signal(number, ask)
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
