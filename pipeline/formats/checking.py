"""Is what a file holds the row it should be? One answer for all formats."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from pipeline.formats import DamagedRow, StateRow, Wanted
from pipeline.formats.content import check_content


@dataclass(frozen=True)
class Outline:
    """A stored row without its states."""

    shape: Sequence[int]
    """[T, L, H]."""
    dtype: str
    header: Mapping[str, str]
    token_ids: Callable[[], list[int]]
    loss_mask: Callable[[], list[int] | None]
    """None in a row without a mask."""
    whole: Callable[[], StateRow]
    """Reads the row with its states, as stored."""


def check_outline(outline: Outline, wanted: Wanted) -> int:
    """Compare a stored row with what it should be.

    Returns:
        T, the row's tokens.

    Raises:
        DamagedRow: the first difference.
    """
    for key, value in wanted.header.items():
        if outline.header.get(key) != value:
            raise DamagedRow(f"metadata {key} is {outline.header.get(key)!r}, not {value!r}")
    shape = list(outline.shape)
    limits = [None, wanted.num_layers, wanted.hidden_size]
    if len(shape) != 3 or shape[0] < 1 or any(n not in (None, m) for n, m in zip(limits, shape, strict=True)):
        raise DamagedRow(f"hidden_states {shape}, not [T, {wanted.num_layers or 'L'}, {wanted.hidden_size or 'H'}]")
    if wanted.dtype is not None and outline.dtype != wanted.dtype:
        raise DamagedRow(f"hidden_states {outline.dtype}, not {wanted.dtype}")
    if wanted.token_ids is not None and outline.token_ids() != list(wanted.token_ids):
        raise DamagedRow("other token ids than the prepared row")
    if wanted.loss_mask is not None and outline.loss_mask() != list(wanted.loss_mask):
        raise DamagedRow("another loss mask than the prepared row")
    if wanted.content:
        check_content(outline.whole())
    return int(shape[0])
