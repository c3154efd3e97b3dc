"""In vLLM's worker: finished rows go straight to the folder of `extract`, in its format."""

from __future__ import annotations

import threading
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pipeline.formats import StateRow
from pipeline.formats.hs_safetensors import write_row
from pipeline.formats.registry import get_format
from pipeline.places import store_at
from pipeline.prepared import PreparedFile
from pipeline.row_storage import Storage
from shims.errors import SinkError, SpecshimError, UsageError

REFERENCE = f"{__name__}:RowSink"
PROBE = "probe-"


def probe_path(folder: str, row_id: str) -> Path:
    """Where a probe is written."""
    return Path(folder) / f"{row_id}.safetensors"


@dataclass(frozen=True)
class RowSinkSettings:
    """What a worker has to know to write rows; plain values, since it travels to another process."""

    folder: str
    format: str
    rows_per_file: int
    prepared_data: str
    """The tokenized_data.jsonl, for the loss masks."""
    row_limit: int
    """Tokens kept per row."""
    dtype: str
    """The states', as in ``float32``."""
    store_dtype: str
    """What they are stored in."""
    last_state: str
    """``residual``, or ``normed`` where the format wants the last state so."""
    model: str
    """Folder of the model, for its final norm."""
    trust_remote_code: bool
    header: dict[str, str]
    """Goes into each row's header, beside its number."""
    prepared_sha256: str | None = None
    """What `prepared_data` has to be, still: a worker opens it after the model has loaded."""
    probes: str = ""
    """Folder for rows called ``probe-…``, which are written as computed, for the parent to look at."""

    @property
    def reference(self) -> str:
        """`module:callable` of the sink that takes these settings."""
        return REFERENCE

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class RowSink:
    """See :class:`shims.direct.stream.Sink`; row ids are the indices of the prepared rows."""

    def __init__(self, **settings: Any) -> None:
        self._settings = RowSinkSettings(**settings)
        form = get_format(self._settings.format)
        self._store = store_at(self._settings.folder, form, self._settings.rows_per_file)
        s = self._settings
        self._storage = Storage.of(s.store_dtype, s.last_state, s.model, s.trust_remote_code)
        self._lock = threading.Lock() if form.many_rows_per_file else None
        self._data = PreparedFile(Path(s.prepared_data), vocab_size=None, checked=True, sha256=s.prepared_sha256)

    def write(self, row_id: str, token_ids: Any, states: Any) -> None:
        """Write one row durably.

        Raises:
            SpecshimError: states of another dtype than was asked for.
        """
        dtype = str(states.dtype).removeprefix("torch.")
        if dtype != self._settings.dtype:
            raise SpecshimError(
                f"row {row_id}",
                f"states in {self._settings.dtype}",
                dtype,
                "report this: the engine chose another dtype",
            )
        if row_id.startswith(PROBE):
            write_row(probe_path(self._settings.probes, row_id), StateRow(states, token_ids), {})
            return
        index = int(row_id)
        prepared = self._data[index]
        mask = prepared.loss_mask[: self._settings.row_limit]
        row = self._storage.row(states, token_ids, mask, prepared.row_id)
        header = {"row": str(index), **self._settings.header}
        if self._lock is None:
            try:
                self._store.write(index, row, header)
            except UsageError as error:  # of an object store; what is no SinkError would be taken for wrong states
                raise SinkError(error.where, error.wanted, error.found, error.next_step) from error
            return
        with self._lock:
            self._store.write(index, row, header)
            self._store.sync()
