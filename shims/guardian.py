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
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

_EVERY = 0.3  # seconds between two looks
_ROUNDS = 20
"""Looks at those that were ended: one that was being started in this moment is found at the next."""
_guarded: set[int] = set()
"""Processes that :func:`guard` has begun to look after, by pid."""


def guard() -> None:
    """Have a process look after this one from now on: all that are ever below it end with it."""
    if os.getpid() not in _guarded:  # a fork is another process
        _guarded.add(os.getpid())
        _begin(-1, ())


@contextmanager
def guarding() -> Iterator[None]:
    """What is started in this block ends with this process: in the middle of the block, and after it.

    Processes that were there before, or come later, are left alone, unless one that is started here starts them.
    """
    pid = os.getpid()
    before = below(pid)
    told, tell = os.pipe()
    _begin(told, before)
    os.close(told)
    try:
        yield
    finally:
        with contextlib.suppress(BrokenPipeError):  # nobody looks where there is no /proc
            os.write(tell, f"{' '.join(map(str, below(pid).keys() - before.keys()))}\n".encode())
        os.close(tell)


def _begin(told: int, spared: Collection[int]) -> None:
    pid = os.getpid()
    start = identity(pid)
    if start:
        # It forks away at once, so that it is nobody's child and is not ended with its owner. Where it does
        # not start, what a killed command leaves behind has to be ended by hand.
        command = [sys.executable, "-m", __name__, str(pid), start, str(told), *map(str, spared)]
        subprocess.run(command, check=False, stdin=subprocess.DEVNULL, pass_fds=[] if told < 0 else [told])


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


def watch(owner: int, start: str, told: int, spared: Collection[int]) -> None:
    """Wait for the end of a process, then end what was below it; or for the end of all that it has named.

    Args:
        told: descriptor on which the owner says, in a line of ids, what it has started that is to be ended; until
            then it is everything. -1: it never says.
        spared: processes that were below it before, and what is below those.
    """
    known: dict[int, str] = {}
    named: list[int] | None = None
    if told >= 0:
        os.set_blocking(told, False)
    while identity(owner) == start:
        if named is None and (named := _told(told)) is not None:
            known = {pid: identity(pid) for pid in named}
        if named is None:
            left_alone = {*spared, *(pid for parent in spared for pid in below(parent))}
            known |= {pid: begun for pid, begun in below(owner).items() if pid not in left_alone}
        else:
            for parent in known.copy():
                known |= below(parent)
            if not any(begun and identity(pid) == begun for pid, begun in known.items()):
                return
        time.sleep(_EVERY)
    if named is None and (named := _told(told)) is not None:  # written since the last look
        known |= {pid: identity(pid) for pid in named}
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


def _told(told: int) -> list[int] | None:
    """The line that the owner wrote, in one piece; None while there is none."""
    try:
        line = os.read(told, 1 << 16) if told >= 0 else b""
    except BlockingIOError:
        return None
    return [int(pid) for pid in line.split()] if line else None


def main() -> None:
    """`python -m shims.guardian PID START DESCRIPTOR [PID…]`"""
    if os.fork():
        return
    os.setsid()
    watch(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), [int(pid) for pid in sys.argv[4:]])


if __name__ == "__main__":
    main()
