"""One writer per output folder."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from shims.errors import UsageError


@contextlib.contextmanager
def exclusive(folder: Path) -> Iterator[None]:
    """Hold ``folder`` for this process; a second writer is refused, not queued.

    The lock belongs to the open file, so a killed process leaves none behind.

    Raises:
        UsageError: another process is writing there, or this one cannot.
    """
    with _open_lock(folder) as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            handle.seek(0)
            owner = handle.read().strip() or "unknown"
            raise UsageError(
                where=f"--output-dir {folder}",
                wanted="a folder that no other run is writing to",
                found=f"process {owner} holds its lock",
                next_step="wait for that run to end, or choose another folder",
            ) from error
        handle.truncate(0)
        handle.write(str(os.getpid()))
        handle.flush()
        try:
            yield
        except BaseException:
            _remove_if_untouched(folder)
            raise


def _open_lock(folder: Path) -> IO[str]:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return (folder / ".lock").open("a+", encoding="utf-8")
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise
        raise UsageError(
            where=f"--output-dir {folder}",
            wanted="a folder that can be made and written to",
            found=f"{error.strerror}: {error.filename}",
            next_step="choose another folder, or change its permissions",
        ) from error


def _remove_if_untouched(folder: Path) -> None:
    """A refused run leaves no empty folder behind."""
    with contextlib.suppress(OSError):
        if [entry.name for entry in folder.iterdir()] == [".lock"]:
            (folder / ".lock").unlink()
            folder.rmdir()
