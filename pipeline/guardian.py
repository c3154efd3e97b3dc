"""Ends what a process leaves behind when it is gone, however it went: the processes of its engine.

They would keep the GPU's memory and the leases of rows, and go on writing rows beside the next run. Nobody tells a
process that its grandparent was killed, so a process beside the owner looks. Linux only (it reads /proc); elsewhere
what is left behind has to be ended by hand.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Collection
from pathlib import Path

_EVERY = 0.3  # seconds between two looks
_ROUNDS = 20
"""Looks at those that were ended: one that was being started in this moment is found at the next."""


def guard(only: Collection[int] | None = None) -> None:
    """Have a process look after this one from now on.

    Args:
        only: the processes to end, with those below them; None: all that are ever below this one.
    """
    pid = os.getpid()
    start = identity(pid)
    if start and (only is None or only):
        # It forks away at once, so that it is nobody's child and is not ended with its owner.
        command = [sys.executable, "-m", __name__, str(pid), start, *map(str, only or ())]
        subprocess.run(command, check=True, stdin=subprocess.DEVNULL)


def identity(pid: int) -> str:
    """When a process was started, in the kernel's ticks: its id may be another's later. "" where there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in ("Z", "X") else fields[19]


def below(pid: int) -> dict[int, str]:
    """The processes below one, each with its :func:`identity`."""
    found: dict[int, str] = {}
    parents = [pid]
    for parent in parents:
        for task in Path(f"/proc/{parent}/task").glob("*/children"):
            with contextlib.suppress(OSError):
                parents += [int(child) for child in task.read_text().split()]
    for child in parents[1:]:
        found[child] = identity(child)
    return found


def watch(owner: int, start: str, only: Collection[int] = ()) -> None:
    """Wait for the end of a process, then end everything that was below it, or what is named."""
    known = {pid: identity(pid) for pid in only}
    while identity(owner) == start:
        for parent in known.copy() if only else (owner,):
            known |= below(parent)
        time.sleep(_EVERY)
    for _ in range(_ROUNDS):
        for pid in list(known):
            known |= below(pid)
        # The first look may find this process, before it has forked away.
        left = [pid for pid, begun in known.items() if begun and identity(pid) == begun and pid != os.getpid()]
        if not left:
            return
        for pid in left:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_EVERY)


def main() -> None:
    """`python -m pipeline.guardian PID START [PID…]`"""
    if os.fork():
        return
    os.setsid()
    watch(int(sys.argv[1]), sys.argv[2], [int(pid) for pid in sys.argv[3:]])


if __name__ == "__main__":
    main()
