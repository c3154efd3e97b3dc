"""Will it fit? Asked before the model loads, and again before every batch."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from shims.errors import SpecshimError, UsageError
from shims.explained import FULL

GIB = 1 << 30
_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3": 1}
_HEADER_BYTES = 2048
"""Header of a row's file, and what the file system or the tar adds."""


@dataclass(frozen=True)
class RowSize:
    """What decides the bytes of a row."""

    num_layers: int
    hidden_size: int
    store_dtype: str

    def of(self, tokens: int) -> int:
        """Bytes of a row of that many tokens, states, ids, mask and header."""
        return self.numbers(tokens) + _HEADER_BYTES

    def numbers(self, tokens: int) -> int:
        """The same without the header."""
        states = tokens * self.num_layers * self.hidden_size * _ITEM_BYTES[self.store_dtype]
        scales = 4 * tokens * self.num_layers if self.store_dtype == "float8_e4m3" else 0
        return states + scales + 16 * tokens

    def total(self, lengths: Iterable[int]) -> int:
        """Bytes of rows of these lengths."""
        return sum(map(self.of, lengths))


class DiskFull(SpecshimError):
    """The space ended; everything written before is whole and durable."""


def is_full(error: BaseException) -> bool:
    """Whether an error says that there is no space (or no quota) left."""
    return isinstance(error, OSError) and error.errno in FULL


def free_bytes(folder: Path) -> int:
    """Bytes that this user may still write where ``folder`` is, or will be."""
    place = folder.absolute()
    while not place.exists():
        place = place.parent
    return shutil.disk_usage(place).free


def free_inodes(folder: Path) -> int | None:
    """Files that can still be made there; None where the file system has no such limit."""
    place = folder.absolute()
    while not place.exists():
        place = place.parent
    found = os.statvfs(place)
    return found.f_favail if found.f_files else None


def refuse_what_does_not_fit(folder: Path, needed: int, files: int, reserve: int, flag: str) -> None:
    """Stop before anything loads.

    Args:
        needed: bytes that are still to be written.
        files: files that are still to be made.
        reserve: bytes that shall stay free.
        flag: the option that overrides this.

    Raises:
        UsageError: they do not fit.
    """
    free = free_bytes(folder)
    if needed + reserve > free:
        raise UsageError(
            where=f"--output-dir {folder}",
            wanted=f"space for {human(needed)}, and {human(reserve)} left free",
            found=f"{human(free)} free",
            next_step="make room, choose another disk, --store-dtype float8_e4m3 (half of bfloat16) or --shard; "
            f"{flag} begins all the same and stops before the disk is full",
        )
    inodes = free_inodes(folder)
    if inodes is not None and files > inodes:
        raise UsageError(
            where=f"--output-dir {folder}",
            wanted=f"room for {files} files",
            found=f"{inodes} inodes free",
            next_step="use --format sharded, which holds many rows a file",
        )


class Space:
    """The disk while rows are written to it."""

    def __init__(self, folder: Path, remaining: int, reserve: int) -> None:
        """Watch the disk of ``folder``.

        Args:
            remaining: bytes that are still to be written.
            reserve: bytes that shall stay free.
        """
        self.folder, self.remaining, self._reserve = folder, remaining, reserve

    def taken(self, size: int) -> None:
        """So much has been written."""
        self.remaining -= size

    def stop_at_low_water(self, next_bytes: int) -> None:
        """Stop while everything written is whole, rather than when the disk is full.

        Args:
            next_bytes: of what is written next.

        Raises:
            DiskFull: it would leave less than the reserve.
        """
        free = free_bytes(self.folder)
        if self.remaining and free - next_bytes < self._reserve:
            raise DiskFull(
                where=str(self.folder),
                wanted=f"{human(next_bytes)} for the next rows, and {human(self._reserve)} left free (--min-free-gib)",
                found=f"{human(free)} free",
                next_step=_go_on(self.remaining),
            )

    def full(self, error: OSError) -> DiskFull:
        """The refusal in place of an ``OSError`` for which :func:`is_full` holds."""
        return DiskFull(
            where=str(error.filename or self.folder),
            wanted="space on the disk",
            found=f"{error.strerror or errno.errorcode[error.errno or errno.ENOSPC]}; "
            f"{human(free_bytes(self.folder))} free",
            next_step=_go_on(self.remaining),
        )


def _go_on(remaining: int) -> str:
    return (
        f"make room for the {human(remaining)} still missing, then run the same command again: what is finished is kept"
    )


def human(size: float) -> str:
    """Bytes for a person, e.g. ``11.7 TB``; powers of 1000, as disks are sold."""
    units = ["B", "kB", "MB", "GB", "TB"]
    while abs(size) >= 1000 and len(units) > 1:
        size /= 1000
        units.pop(0)
    return f"{size:.0f} {units[0]}" if units[0] == "B" or size >= 100 else f"{size:.3g} {units[0]}"
