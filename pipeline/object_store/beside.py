"""The files beside the rows (manifest, bad rows, what trainers look for): copied here, published back.

They are small, and written by code that knows files. So they live in a folder of this machine, and are sent whenever
they have changed: the manifest last, so that whoever reads it finds what it speaks of.
"""

from __future__ import annotations

import contextlib
from fnmatch import fnmatchcase
from pathlib import Path

from pipeline.object_store.bucket import Bucket
from pipeline.object_store.keys import MANIFEST, is_beside

_TABLE = "data-*-of-*.arrow"


class Beside:
    """The files beside the rows of an address, as files in ``folder``."""

    def __init__(self, bucket: Bucket, folder: Path) -> None:
        self._bucket, self._folder = bucket, folder
        self._sent: dict[str, tuple[int, int, int]] = {}

    def fetch_state(self) -> None:
        """What a run goes on from: the manifest, and the lists of bad rows."""
        names = [found.name for found in self._bucket.list("bad_rows") if is_beside(found.name)]
        self._fetch([*names, MANIFEST])

    def fetch_all(self, names: list[str]) -> None:
        """Those of ``names`` that are ours."""
        self._fetch([name for name in names if is_beside(name)])

    def _fetch(self, names: list[str]) -> None:
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                self._bucket.download(name, self._folder / name)
                self._sent[name] = _state(self._folder / name)

    def publish(self) -> None:
        """Send what has changed since it was fetched or sent."""
        there = [path.relative_to(self._folder).as_posix() for path in self._folder.rglob("*") if path.is_file()]
        changed = [
            name
            for name in sorted(there, key=lambda name: (name == MANIFEST, name))
            if (name == MANIFEST or is_beside(name)) and self._sent.get(name) != _state(self._folder / name)
        ]
        for name in changed:
            if name == MANIFEST:
                self._remove_old_tables(there)
            state = _state(self._folder / name)
            self._bucket.upload_file(name, self._folder / name)
            self._sent[name] = state

    def _remove_old_tables(self, there: list[str]) -> None:
        """A table that is written anew may have fewer parts than the one before."""
        if any(fnmatchcase(name, _TABLE) for name in there):
            for found in list(self._bucket.list("data-")):
                if fnmatchcase(found.name, _TABLE) and found.name not in there:
                    self._bucket.delete(found.name)


def _state(path: Path) -> tuple[int, int, int]:
    """Changes whenever the file does: it is replaced, or longer."""
    found = path.stat()
    return found.st_ino, found.st_size, found.st_mtime_ns
