"""On-disk formats of hidden states, one module each.

A format knows how one row becomes a file and back. Which rows exist, whose they are and
whether they may be used is the manifest's business.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class StateRow:
    """The states of one row.

    ``states`` is a tensor [T, L, H], L in ascending layer ids; ``token_ids`` and
    ``loss_mask`` are int64 [T].
    """

    states: Any
    token_ids: Any
    loss_mask: Any
    row_id: str


class DamagedRow(Exception):
    """A file is not the row it should be; the message says why."""
