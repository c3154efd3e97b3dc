"""Rows whose states cannot be right: listed durably as they come, never stored, capped by ``--max-bad``."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from shims.errors import SpecshimError

PATTERN = "bad_rows*.jsonl"


@dataclass(frozen=True)
class BadRow:
    """One row that was left out, with its tokens, so that a format that lists all rows can list it."""

    row: int
    row_id: str
    fault: str
    input_ids: list[int]
    loss_mask: list[int]


class BadRows:
    """The list of a folder. Rows on it are not computed again; to have them computed, delete its files."""

    def __init__(self, folder: Path, suffix: str = "") -> None:
        """Read what all processes have listed so far.

        Args:
            suffix: makes the name of this process's own file, e.g. ``-1-of-4``.
        """
        self._own = folder / f"bad_rows{suffix}.jsonl"
        self.rows: dict[int, BadRow] = {}
        for file in sorted(folder.glob(PATTERN)):
            self.rows |= {bad.row: bad for bad in _read(file)}

    @property
    def indices(self) -> set[int]:
        """The rows on the list."""
        return set(self.rows)

    def add(self, bad: BadRow) -> None:
        """List a row; durable when this returns."""
        self.rows[bad.row] = bad
        with self._own.open("a+", encoding="utf-8") as handle:
            # A line that a kill cut off is ended first.
            handle.write("\n" * bool(handle.tell()) + json.dumps(asdict(bad)))
            handle.flush()
            os.fsync(handle.fileno())

    def summary(self) -> list[dict[str, object]]:
        """For the manifest: row, id and fault of each."""
        return [{"row": b.row, "id": b.row_id, "fault": b.fault} for _, b in sorted(self.rows.items())]


def _read(file: Path) -> list[BadRow]:
    rows = []
    for line in file.read_text(encoding="utf-8").split("\n"):
        try:
            rows.append(BadRow(**json.loads(line)))
        except (ValueError, TypeError):
            continue  # the line that a kill cut off, or the empty one at the end
    return rows


def refuse_too_many(bad: BadRows, limit: int, latest: BadRow) -> None:
    """Stop when more rows are bad than allowed.

    Raises:
        SpecshimError: there are more than ``limit``, ``latest`` counted.
    """
    count = len(bad.indices | {latest.row})
    if count > limit:
        raise SpecshimError(
            where=f"row {latest.row} (id {latest.row_id})",
            wanted="finite states, one for each token and layer"
            + (f", in all rows but {limit} (--max-bad)" if limit else ""),
            found=f"{latest.fault}; {count} bad rows so far" if limit else latest.fault,
            next_step="do not train on this; check the model and dtype, and report the versions in the manifest",
        )
