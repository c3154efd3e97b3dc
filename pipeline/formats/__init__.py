"""On-disk formats of hidden states, one module each; `registry` names them all.

A format knows how one row becomes bytes and back. Which rows exist, whose they are and
whether they may be used is the manifest's business.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class StateRow:
    """The states of one row.

    ``states`` is a tensor [T, L, H], L in ascending layer ids; ``token_ids`` and
    ``loss_mask`` are int64 [T].
    """

    states: Any
    token_ids: Any
    loss_mask: Any = None
    """None where the writer does not know it."""
    row_id: str = ""
    scale: Any = None
    """float32 [T, L], only where ``states`` are float8: the true states are ``states * scale``."""
    header: Mapping[str, str] = field(default_factory=dict)
    """What a file says of itself: whose row it is, which layers, computed by what. Filled by readers."""


@dataclass(frozen=True)
class Wanted:
    """What a stored row has to be; a field left at None (or empty) is not compared."""

    num_layers: int | None = None
    """L, the states per token."""
    hidden_size: int | None = None
    """H."""
    dtype: str | None = None
    """As stored, e.g. ``bfloat16`` or ``float8_e4m3``."""
    header: Mapping[str, str] = field(default_factory=dict)
    """Entries that the row's own header must have."""
    token_ids: Sequence[int] | None = None
    loss_mask: Sequence[int] | None = None
    content: bool = False
    """Read the states too, and compare them with the hash that the writer left."""


class DamagedRow(Exception):
    """A file is not the row it should be; the message says why."""
