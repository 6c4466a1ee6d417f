"""Ctrl-C and SIGTERM, asked about where it is safe to stop."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """Which signal asked to stop; None: none did."""

    signal_number: int | None = None

    def __bool__(self) -> bool:
        return self.signal_number is not None


@contextmanager
def stop_requests(*, patient: bool = False) -> Iterator[StopRequest]:
    """Turns the first signal into a request; a second one ends the process as it usually would.

    With `patient` it does not: a launcher passes on what its queue tells every process anyway.
    """
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        # Python delivers signals to the main thread; whoever owns it decides what they mean.
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
