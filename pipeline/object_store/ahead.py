"""Rows as files on this machine, fetched before they are asked for and kept in a bounded folder.

Which rows are kept follows from their sizes alone: from row 0 on, as many as fit. A training reads every row once an
epoch, in another order each time; for that no rule of replacing them finds more rows than this one, and processes
that share the folder need not speak to each other.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from pipeline.formats.stores import Layout
from pipeline.object_store.bucket import Bucket

_AT_ONCE = 8
_WAITING = 256
"""Rows that may be under way or fetched and not yet asked for."""


@dataclass(frozen=True)
class Kept:
    """Where rows are kept, and how much of them."""

    folder: Path
    limit: int
    """Bytes."""


class FetchedRows:
    """Rows of an address.

    Args:
        sizes: bytes by row, of a listing.
    """

    def __init__(self, bucket: Bucket, layout: Layout, sizes: Mapping[int, int], kept: Kept | None) -> None:
        self._bucket, self._layout, self._sizes, self._kept = bucket, layout, sizes, kept
        self._last_kept = -1 if kept is None else _last_that_fits(sizes, kept.limit)
        self._under_way: dict[int, Future[Path | bytes]] = {}
        self._threads: tuple[int, ThreadPoolExecutor] | None = None

    def expect(self, indices: Sequence[int]) -> None:
        """Begin to fetch rows that will be asked for soon."""
        pool = self._pool()
        for index in indices:
            if len(self._under_way) < _WAITING and index not in self._under_way and self._here(index) is None:
                self._under_way[index] = pool.submit(self._fetch, index)

    @contextlib.contextmanager
    def file(self, index: int) -> Iterator[Path]:
        """The row as a file, for as long as the block lasts.

        Raises:
            FileNotFoundError: there is no such row.
        """
        self._pool()
        begun = self._under_way.pop(index, None)
        got = self._here(index) or (begun.result() if begun else self._fetch(index))
        if isinstance(got, Path):
            yield got
            return
        with tempfile.TemporaryDirectory(prefix="specshim-row-") as folder:
            path = Path(folder) / self._layout.relative_path(index).name
            path.write_bytes(got)
            yield path

    def _here(self, index: int) -> Path | None:
        """A kept row, if it is whole."""
        if self._kept is None or index > self._last_kept:
            return None
        path = self._kept.folder / self._layout.relative_path(index)
        with contextlib.suppress(FileNotFoundError):
            return path if path.stat().st_size == self._sizes.get(index) else None
        return None

    def _fetch(self, index: int) -> Path | bytes:
        name = self._layout.relative_path(index).as_posix()
        if self._kept is None or index > self._last_kept:
            return self._bucket.read(name)[0]
        path = self._kept.folder / name
        self._bucket.download(name, path)
        return path

    def _pool(self) -> ThreadPoolExecutor:
        """Threads of this process: after a fork there are none, whatever was begun."""
        if self._threads is None or self._threads[0] != os.getpid():
            self._under_way = {}
            self._threads = os.getpid(), ThreadPoolExecutor(_AT_ONCE, "specshim-fetch")
        return self._threads[1]


def _last_that_fits(sizes: Mapping[int, int], limit: int) -> int:
    last, total = -1, 0
    for index in sorted(sizes):
        total += sizes[index]
        if total > limit:
            break
        last = index
    return last
