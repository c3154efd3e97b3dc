"""What a person reads last is why a command ended, not what Python cleans up after it.

Where a process was killed, `multiprocessing`'s resource tracker removes the semaphores and the shared memory that it
left, and warns of them: once this process is gone, behind all that it said. So the tracker is heard out before.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

_SECONDS = 5.0
_EVERY = 0.02


@contextlib.contextmanager
def ours(process_ends: bool) -> Iterator[None]:
    """Whatever is said of an error that leaves this block is said behind the tracker's warnings.

    Args:
        process_ends: with such an error; else nothing is done, as what the process shares with others has to stay.
    """
    try:
        yield
    except BaseException as error:
        if process_ends and not (isinstance(error, SystemExit) and not error.code):
            # In a thread: what would keep the exit waiting may not keep the message back.
            hearing = threading.Thread(target=_hear_tracker, name="specshim-hearing", daemon=True)
            hearing.start()
            hearing.join(2 * _SECONDS)
        raise


def _hear_tracker() -> None:
    """End the resource tracker, where one runs, and wait until it has said what it has to say."""
    util: Any = sys.modules.get("multiprocessing.util")
    tracker: Any = getattr(sys.modules.get("multiprocessing.resource_tracker"), "_resource_tracker", None)
    descriptor, pid = getattr(tracker, "_fd", None), getattr(tracker, "_pid", None)
    if util is None or descriptor is None or pid is None:
        return
    # The tracker is theirs, too: those that were told to end may take a moment.
    ends = time.monotonic() + _SECONDS
    while sys.modules["multiprocessing"].active_children():
        if time.monotonic() > ends:
            return
        time.sleep(_EVERY)
    # As at the exit, this process's own come first: the tracker would take them for left behind.
    util._run_finalizers()
    # What is released from here on, it has released.
    tracker._send = lambda *_message: None
    tracker._fd = tracker._pid = None
    with contextlib.suppress(OSError):
        os.close(descriptor)
        while os.waitpid(pid, os.WNOHANG)[0] == 0:
            time.sleep(_EVERY)
