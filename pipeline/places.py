"""Where a set of rows lies: a folder, or an address of an object store. What the stages need of both.

`Target` is where `extract` writes, `View` is what the others read. For a folder both do nothing; for an address they
are those of `pipeline.object_store`, which is imported then.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pipeline import disk, lock
from pipeline.formats.registry import Format, open_rows, recognised
from pipeline.formats.stores import RowStore
from pipeline.object_store.address import is_address, parse


class Target:
    """A folder that rows are written to."""

    address = ""
    """The rows' address, where they do not lie in the folder."""

    def open_store(self, form: Format, folder: Path, rows_per_file: int) -> RowStore:
        """Its rows."""
        return form.open(folder, rows_per_file)

    def strange(self, folder: Path) -> str:
        """The name of something that is no manifest's, in a folder without one; "" where there is nothing."""
        found = recognised(folder)
        return f"row files ({found[0].name})" if found else ""

    def publish(self) -> None:
        """Let others see the files beside the rows as they are now."""

    def describe_room(self, folder: Path) -> str:
        """What is said behind the bytes that are needed."""
        return f" of {disk.human(disk.free_bytes(folder))} free"

    def refuse_what_does_not_fit(self, folder: Path, needed: int, files: int, reserve: int) -> None:
        """See :func:`pipeline.disk.refuse_what_does_not_fit`."""
        disk.refuse_what_does_not_fit(folder, needed, files, reserve, "--ignore-space")

    def space(self, folder: Path, remaining: int, reserve: int) -> disk.Space:
        """What watches over the writing."""
        return disk.Space(folder, remaining, reserve)


class View:
    """A folder whose rows are read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        """The files beside the rows are here."""

    def open_rows(self, record: Mapping[str, Any]) -> RowStore:
        """See :func:`pipeline.formats.registry.open_rows`."""
        return open_rows(self.folder, record)

    def fetch_beside(self, store: RowStore) -> list[str]:
        """Have all files beside the rows in the folder.

        Args:
            store: of :meth:`open_rows`.

        Returns:
            Names of what is neither, where that is not seen in the folder.
        """
        return []

    def says(self, text: str) -> str:
        """A text about files of the folder, as the user knows them."""
        return text


@contextlib.contextmanager
def viewed(place: Path, flag: str) -> Iterator[View]:
    """Look at a set of rows; errors name it as it was given.

    Raises:
        UsageError: it is an address that cannot be used.
    """
    if not is_address(place):
        yield View(place)
        return
    from pipeline.object_store.view import opened

    with opened(parse(place, flag), flag) as view:
        yield view


def open_data(place: Path, record: Mapping[str, Any], flag: str, kept: Callable[[], Any] | None = None) -> RowStore:
    """The rows of a set whose manifest is known.

    Args:
        kept: says where rows that are fetched stay, see `pipeline.object_store.ahead`; None: nowhere.
    """
    if not is_address(place):
        return open_rows(place, record)
    from pipeline.object_store.view import rows_of

    return rows_of(parse(place, flag), record, flag, kept() if kept else None)


def store_at(place: str, form: Format, rows_per_file: int) -> RowStore:
    """The rows that a worker writes, each durable when `write` returns.

    Args:
        place: a folder, or an address.
    """
    if not is_address(place):
        return form.open(Path(place), rows_per_file)
    from pipeline.object_store.rows import rows_at

    return rows_at(parse(place, "--output-dir"), form, "--format", sending=0)


def signature(place: str) -> str:
    """Names the run that is writing to a place, or was last; "" where none is known."""
    if not is_address(place):
        return lock.signature(Path(place))
    from pipeline.object_store import target

    return target.signature(parse(place, "--output-dir"))


def holder(place: Path) -> str | None:
    """Who is writing to a place now; None when nobody is. Changes nothing."""
    if not is_address(place):
        return lock.holder(place)
    from pipeline.object_store import target

    return target.holder(parse(place, "--output-dir"))
