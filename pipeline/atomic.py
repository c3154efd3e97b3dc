"""Files that are either whole or absent, whatever happens meanwhile."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from shims.direct.rowfile import TEMP_MARK, temporary


@contextlib.contextmanager
def replacing(path: Path, mode: str = "w") -> Iterator[IO[str] | IO[bytes]]:
    """Write a file beside ``path`` and put it in place when the block ends well.

    The bytes reach the disk (fsync) before the name changes. When the block raises, what
    stood at ``path`` before is untouched and the temporary file is gone.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temp = temporary(path)
    encoding = None if "b" in mode else "utf-8"
    try:
        with temp.open(mode, encoding=encoding) as handle:
            yield handle
            handle.flush()
            os.fsync(handle.fileno())
        temp.replace(path)
    except OSError as error:
        if error.filename is None:  # a failing write does not say of which file
            error.filename = str(path)
        raise
    finally:
        temp.unlink(missing_ok=True)


def write_bytes(path: Path, content: bytes) -> None:
    """Replace ``path`` by ``content`` in one step."""
    with replacing(path, "wb") as handle:
        handle.write(content)  # type: ignore[arg-type]


def write_text(path: Path, content: str) -> None:
    """Replace ``path`` by ``content`` (UTF-8) in one step."""
    write_bytes(path, content.encode("utf-8"))


def sync_folder(folder: Path) -> None:
    """Make renames inside ``folder`` durable; a file system without that ability is fine."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def sync_content(folder: Path) -> None:
    """Make the files of a new folder durable, and their names in it: before it takes the place that others read."""
    for path in folder.iterdir():
        with path.open("rb") as handle:
            os.fsync(handle.fileno())
    sync_folder(folder)


def clear_leftovers(folder: Path, mine: Callable[[str], bool] = lambda name: True) -> int:
    """Remove temporary files that a killed run left in ``folder``; returns how many.

    Call it only while holding the lock over these files: another process's look the same.

    Args:
        mine: whether a file of that name (the one it was to get) is this process's to write.
    """
    leftovers = [
        entry
        for entry in folder.iterdir()
        if entry.name.startswith(".") and TEMP_MARK in entry.name and mine(entry.name[1:].rpartition(TEMP_MARK)[0])
    ]
    for entry in leftovers:
        entry.unlink(missing_ok=True)
    return len(leftovers)
