"""An object as a file that is read in ranges: the beginning of a row holds all but its states."""

from __future__ import annotations

import io

from pipeline.object_store.bucket import Bucket

BEGINNING = 64 << 10
"""Bytes of the first request: header, token ids and mask of a row of some two thousand tokens."""


class RangedFile(io.RawIOBase):
    """Reading and seeking in one object.

    Raises:
        FileNotFoundError: there is no such object.
    """

    def __init__(self, bucket: Bucket, name: str) -> None:
        super().__init__()
        self._bucket, self._name, self._at = bucket, name, 0
        self._beginning, found = bucket.read(name, 0, BEGINNING)
        self.size = found.size

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self.size}[whence]
        self._at = max(0, base + offset)
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, size: int | None = -1) -> bytes:
        """Bytes from here; what the first request brought is not asked for again."""
        end = self.size if size is None or size < 0 else min(self.size, self._at + size)
        start, self._at = self._at, max(self._at, end)
        if start >= end:
            return b""
        if end <= len(self._beginning):
            return self._beginning[start:end]
        content, _ = self._bucket.read(self._name, start, end - start)
        return content
