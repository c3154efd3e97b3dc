"""An end to waiting: an index that sends a byte a second never runs into the time-out of one read."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any

from contract_tests.sources import SourceError


@contextlib.contextmanager
def deadline(seconds: float, what: str) -> Iterator[None]:
    """Raise in the main thread when `seconds` are over; without effect in other threads.

    Raises:
        SourceError: the time is over.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: Any) -> None:
        next_step = "try again, raise --timeout, or use another index; what was read is kept in the cache"
        raise SourceError(what, f"an end within {seconds:g} s", "still reading", next_step)

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
