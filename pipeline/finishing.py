"""What is written once all rows are there: the files that a trainer looks for beside them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pipeline import run_history
from pipeline.atomic import clear_leftovers
from pipeline.formats.registry import Format
from pipeline.formats.sidecars import Summary
from pipeline.formats.stores import row_number
from pipeline.vocab import load_mapping

Tokens = Callable[[], Iterator[tuple[list[int], list[int]]]]


def vocabulary_of(folder: Path | None, fingerprint: str) -> tuple[Any, Any] | None:
    """The mapping of a `specshim vocab` folder, made from the same model's data.

    Raises:
        UsageError: it cannot be read, or is another model's.
    """
    return None if folder is None else load_mapping(folder, fingerprint=fingerprint)


def finish_formats(
    form: Format,
    folder: Path,
    tokens: Tokens,
    absent: set[int],
    description: Mapping[str, Any],
    mapping: tuple[Any, Any] | None,
) -> None:
    """Write the sidecars of ``form``.

    Args:
        tokens: (token ids, loss mask) of every row, absent ones included.
        absent: rows that have no states.
        description: the manifest.
    """
    if form.finish is None:
        return
    lengths: dict[int, int] = {}
    frequency: Counter[int] = Counter()
    for index, (ids, mask) in enumerate(tokens()):
        if index not in absent:
            lengths[index] = len(ids)
        frequency.update(token for token, bit in zip(ids, mask, strict=True) if bit)
    with run_history.changing(folder):
        for place in (folder, *(path for path in folder.iterdir() if path.is_dir())):
            clear_leftovers(place, lambda name: row_number(name) is None)
        form.finish(folder, Summary(lengths, tokens, description, mapping, frequency))
