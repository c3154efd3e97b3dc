"""The row sink of a replica: it holds the lease of each chunk it writes."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.engines.row_sink import PROBE, RowSink, RowSinkSettings
from pipeline.object_store.address import is_address
from pipeline.replicas.leases import Leases

_REFERENCE = f"{__name__}:LeasedSink"


@dataclass(frozen=True)
class LeasedSinkSettings(RowSinkSettings):
    """What a worker has to know to write rows beside other replicas."""

    rows_per_chunk: int = 1

    @property
    def reference(self) -> str:
        """See :class:`pipeline.engines.row_sink.RowSinkSettings`."""
        return _REFERENCE


class LeasedSink(RowSink):
    """See :class:`pipeline.engines.row_sink.RowSink`."""

    def __init__(self, **settings: Any) -> None:
        self._rows_per_chunk = int(settings.pop("rows_per_chunk"))
        super().__init__(**settings)
        # Objects appear whole: two processes that write one row leave one of two right ones.
        self._leases = None if is_address(settings["folder"]) else Leases(Path(settings["folder"]))
        self._mine: set[int] = set()
        self._taking = threading.Lock()

    def write(self, row_id: str, token_ids: Any, states: Any) -> None:
        """Write one row durably.

        Raises:
            SpecshimError: another process holds the row's chunk, or the states have another dtype.
        """
        if self._leases is not None and not row_id.startswith(PROBE):
            self._take(self._leases, int(row_id) // self._rows_per_chunk)
        super().write(row_id, token_ids, states)

    def _take(self, leases: Leases, chunk: int) -> None:
        with self._taking:
            if chunk not in self._mine:
                leases.take(chunk)
                self._mine.add(chunk)
