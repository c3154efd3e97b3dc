"""An end to waiting: an index that sends a byte a second never runs into the time-out of one read."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any

from contract_tests.sources import SourceError

# Seconds that threads and processes which still read are waited for; then this process ends as it is.
_GRACE = 5.0
_CODE = 2


class _OutOfTime(BaseException):
    """Raised wherever the main thread is; not an `Exception`, so that no retry and no fallback takes it."""


@contextlib.contextmanager
def deadline(seconds: float, what: str) -> Iterator[None]:
    """Raise in the main thread when `seconds` are over; without effect in other threads.

    Raises:
        SourceError: the time is over.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    next_step = "try again, raise --timeout, or use another index; what was read is kept in the cache"
    error = SourceError(what, f"an end within {seconds:g} s", "still reading", next_step)
    passed = False

    def stop(number: int, frame: Any) -> None:
        nonlocal passed
        if passed:
            _end(error)
        passed = True
        raise _OutOfTime

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds, _GRACE)
    try:
        try:
            yield
        finally:
            # The time may be over in this very moment: what is raised then is an end like any other.
            signal.setitimer(signal.ITIMER_REAL, 0)
    except _OutOfTime:
        raise error from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _end(error: SourceError) -> None:
    for child in multiprocessing.active_children():
        child.kill()
    print(error, file=sys.stderr, flush=True)
    os._exit(_CODE)
