"""A chunk has one writing process, whatever has died meanwhile.

A replica that is killed may leave a process of its engine behind for a moment, which still writes. So the process
that writes holds a lock for each chunk: one byte of one file. These are POSIX record locks: they end with their
process, however it ends, and NFS has them.
https://man7.org/linux/man-pages/man2/fcntl_locking.2.html
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import time
from collections.abc import Callable
from pathlib import Path

from shims.errors import SpecshimError

_NAME = ".lock-rows"
_EVERY = 0.1  # seconds between two tries


def wait_for_writers(folder: Path) -> None:
    """Wait until no replica of an earlier run writes to ``folder``; a folder that had none is left as it is.

    Raises:
        SpecshimError: one still does after two minutes.
    """
    if (folder / _NAME).exists():
        with contextlib.closing(Leases(folder)) as leases:
            leases.wait_for_all()


class Leases:
    """The chunks of a folder; what this object takes is kept until the process ends.

    One object a process: closing the file anywhere in a process would end all its locks.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / _NAME
        self._file = self._path.open("a+b")

    def take(self, chunk: int, seconds: float = 120.0) -> None:
        """Become the one that writes ``chunk``; waits for the one that was.

        Raises:
            SpecshimError: it is still held after ``seconds``.
        """
        self._wait(lambda: self._lock(chunk, 1), f"chunk {chunk}", seconds)

    def free(self, chunk: int) -> bool:
        """Whether no other process holds ``chunk``."""
        if not self._lock(chunk, 1):
            return False
        fcntl.lockf(self._file, fcntl.LOCK_UN, 1, chunk)
        return True

    def wait_for_all(self, seconds: float = 120.0) -> None:
        """Wait until no other process holds any chunk.

        Raises:
            SpecshimError: one is still held after ``seconds``.
        """
        self._wait(lambda: self._lock(0, 0), "any row", seconds)
        fcntl.lockf(self._file, fcntl.LOCK_UN, 0, 0)

    def close(self) -> None:
        """Give everything back."""
        self._file.close()

    def _lock(self, start: int, length: int) -> bool:
        """Try to lock bytes; a length of 0 reaches to the end of all numbers."""
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, length, start)
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                error.filename = error.filename or str(self._path)
                raise
            return False
        return True

    def _wait(self, attempt: Callable[[], bool], what: str, seconds: float) -> None:
        ends = time.monotonic() + seconds
        while not attempt():
            if time.monotonic() > ends:
                raise SpecshimError(
                    str(self._path),
                    f"no other process to write {what}",
                    f"one that has held it for {seconds:.0f} s: an engine that an earlier run left behind, or a "
                    "machine that is gone and whose locks the file server has not given up yet",
                    "end that process (it has the name of a vLLM worker), or wait, then run the same command again",
                )
            time.sleep(_EVERY)
