"""What `specshim extract --status` prints."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from pipeline.places import holder
from pipeline.row_set import Survey


def lines_of(found: Survey, folder: Path) -> Iterable[str]:
    """The survey in lines: counts, the rows behind them, and who is writing."""
    of = found.done + len(found.missing) + len(found.damaged) + len(found.bad)
    yield f"{found.done} of {of} rows done, {len(found.missing)} missing, {len(found.damaged)} damaged, " + (
        f"{len(found.bad)} left out as bad"
    )
    if found.missing:
        yield f"missing: {ranges(found.missing)}"
    for index, damage in sorted(found.damaged.items()):
        yield f"damaged: row {index}: {damage}"
    if found.bad:
        yield f"bad: {ranges(found.bad)}"
    writer = holder(folder)
    if writer:
        yield f"being written by process {writer}"


def ranges(numbers: Iterable[int]) -> str:
    """Ascending numbers in short, e.g. ``0-3, 7``."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ", ".join(f"{first}" if first == last else f"{first}-{last}" for first, last in spans)
