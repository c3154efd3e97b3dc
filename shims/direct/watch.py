"""Ends the wait for an engine whose process has died.

vLLM notices most deaths itself, but not all of them in each release: the caller may then wait for an
answer for ever. Linux only (it reads /proc); elsewhere vLLM's own checks are all there is.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from shims.errors import SpecshimError

_EVERY = 0.1  # seconds between two looks: of several that end, the first is the cause
_GRACE = 10.0  # seconds in which vLLM may say more about it than we can


class EngineDied(SpecshimError):
    """A process of the engine is gone."""


_GO_ON = "repeat the command: finished rows are kept, and it goes on from there"


def lost(names: Iterable[str], words: str = "", next_step: str = _GO_ON) -> EngineDied:
    """The error for processes that ended and left no failure of their own.

    Args:
        names: what they are.
        words: what others wrote about it.
        next_step: for the user.
    """
    return EngineDied(
        ", ".join(names),
        "to stay alive",
        "it ended without a word (killed from outside, or by the kernel for memory: see dmesg)"
        f"{words and chr(10)}{words}",
        next_step,
    )


def died(pids: Iterable[int]) -> list[int]:
    """Those of the processes that have ended (a child nobody waited for among them)."""
    return [pid for pid in pids if _state(pid) in ("Z", "X", "")]


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


@contextmanager
def watched(names: Mapping[int, str]) -> Iterator[list[int]]:
    """In this context (main thread), the death of one of the processes raises `EngineDied`.

    Args:
        names: what the engine's processes on this machine are, by pid.

    Yields:
        A list, empty as long as all of them live; then those that were found dead first. vLLM ends the others.
    """
    usable = (
        sys.platform == "linux" and threading.current_thread() is threading.main_thread() and not died([os.getpid()])
    )
    found: list[int] = []
    if not usable or os.getpid() in names:
        yield found
        return
    stop, main = threading.Event(), threading.main_thread().ident

    def interrupt(signum: int, frame: object) -> None:
        raise lost(names[pid] for pid in found)

    def look() -> None:
        while not stop.wait(_EVERY):
            found[:] = died(names)
            if found and not stop.wait(_GRACE) and main is not None:
                signal.pthread_kill(main, signal.SIGUSR1)
                return

    before = signal.signal(signal.SIGUSR1, interrupt)
    thread = threading.Thread(target=look, name="specshim-watch", daemon=True)
    thread.start()
    try:
        try:
            yield found
        finally:
            # The signal may come in this very moment, too: all the more has its handler to go.
            stop.set()
            thread.join()
    finally:
        signal.signal(signal.SIGUSR1, before)
