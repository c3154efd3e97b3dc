"""The row sink of a replica: it holds the lease of each chunk it writes, and ends with the replica it belongs to."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.engines.row_sink import PROBE, RowSink, RowSinkSettings
from pipeline.replicas.leases import Leases

_REFERENCE = f"{__name__}:LeasedSink"
_EVERY = 0.2  # seconds between two looks at the owner


@dataclass(frozen=True)
class LeasedSinkSettings(RowSinkSettings):
    """What a worker has to know to write rows beside other replicas."""

    rows_per_chunk: int = 1
    owner: tuple[int, str] | None = None
    """Process id and start of the replica, on the same machine; see :func:`identity`."""

    @property
    def reference(self) -> str:
        """See :class:`pipeline.engines.row_sink.RowSinkSettings`."""
        return _REFERENCE


class LeasedSink(RowSink):
    """See :class:`pipeline.engines.row_sink.RowSink`."""

    def __init__(self, **settings: Any) -> None:
        self._rows_per_chunk = int(settings.pop("rows_per_chunk"))
        owner = settings.pop("owner")
        super().__init__(**settings)
        self._leases = Leases(Path(settings["folder"]))
        self._mine: set[int] = set()
        self._taking = threading.Lock()
        if owner is not None:
            _end_with(int(owner[0]), str(owner[1]))

    def write(self, row_id: str, token_ids: Any, states: Any) -> None:
        """Write one row durably.

        Raises:
            SpecshimError: another process holds the row's chunk, or the states have another dtype.
        """
        if not row_id.startswith(PROBE):
            self._take(int(row_id) // self._rows_per_chunk)
        super().write(row_id, token_ids, states)

    def _take(self, chunk: int) -> None:
        with self._taking:
            if chunk not in self._mine:
                self._leases.take(chunk)
                self._mine.add(chunk)


def identity(pid: int) -> str:
    """When a process was started, in the kernel's ticks: its id may be another's later. "" where that is not known."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in ("Z", "X") else fields[19]


def _end_with(pid: int, start: str) -> None:
    """End this process at once when ``pid`` has: nobody would hear of its rows, and others wait for its leases."""
    if not start or pid == os.getpid():
        return

    def look() -> None:
        while identity(pid) == start:
            time.sleep(_EVERY)
        os._exit(1)

    threading.Thread(target=look, name="specshim-owner", daemon=True).start()
