"""Which rows of another tool a conversion began with; they may change before it goes on."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path

from pipeline.at_once import answers
from pipeline.formats.stores import RowStore

_EDGE = 4096
"""Bytes of both ends: headers, and the checksums of what is zipped (.pt, .ckpt) or packed."""
_THREADS = 16


def identity_of(folder: Path, store: RowStore, indices: Iterable[int]) -> str:
    """sha256 over the row files' names, sizes, times of change and ends; their states are not read."""
    files = sorted({Path(str(store.locate(index))) for index in indices})
    digest = hashlib.sha256()
    for file, found in zip(files, answers(_look_of, files, _THREADS), strict=True):
        digest.update(f"{file.relative_to(folder).as_posix()}\0{found}\n".encode())
    return digest.hexdigest()


def _look_of(file: Path) -> str:
    # A format may find a packed file under the name of the plain one.
    with (file if file.exists() else file.with_name(file.name + ".gz")).open("rb") as handle:
        found = os.fstat(handle.fileno())
        ends = handle.read(_EDGE)
        handle.seek(max(0, found.st_size - _EDGE))
        ends += handle.read(_EDGE)
    return f"{found.st_size} {found.st_mtime_ns} {hashlib.sha256(ends).hexdigest()}"
