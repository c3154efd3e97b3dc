"""Rows on their way from the worker to the parent: files in a folder of the parent's, in memory where possible."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

from shims.direct.rowfile import write_tensors


class Spool:
    """In the worker: a sink that writes `<row id>.safetensors` into a folder."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)

    def write(self, row_id: str, token_ids: Any, states: Any) -> None:
        """See `stream.Sink`."""
        write_tensors(spooled(self._folder, row_id), {"token_ids": token_ids, "states": states})


def spooled(folder: Path, row_id: str) -> Path:
    """The file of a row."""
    return folder / f"{row_id}.safetensors"


def take(folder: Path, row_id: str) -> tuple[Any, Any]:
    """Read a row and remove its file: (token ids int64 [T], states [T, L, H])."""
    from safetensors.torch import load

    path = spooled(folder, row_id)
    # Read, not mapped: the file is gone when this returns.
    tensors = load(path.read_bytes())
    path.unlink()
    return tensors["token_ids"], tensors["states"]


def folder(needed: int) -> tempfile.TemporaryDirectory[str]:
    """A folder for the spool, in memory where that has room for `needed` bytes."""
    memory = Path("/dev/shm")
    if memory.is_dir() and os.access(memory, os.W_OK):
        state = os.statvfs(memory)
        if state.f_bavail * state.f_frsize > needed:
            return tempfile.TemporaryDirectory(prefix="specshim-", dir=memory)
    return tempfile.TemporaryDirectory(prefix="specshim-")
