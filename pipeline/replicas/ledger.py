"""Which rows are whose: chunks of rows are handed out, taken back, settled.

A row's chunk follows from its place in the prepared data alone, whose hash the manifest keeps: neither the number
of replicas nor what is finished already moves a row to another chunk. Who computes a chunk is decided when it is
handed out, so that a slow replica takes fewer.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import takewhile

Chunks = dict[int, set[int]]
"""Chunk -> its rows that are not settled."""


class Ledger:
    """The rows of a run. A chunk is with one replica at most, until all its rows are settled or taken back."""

    def __init__(self, rows: Sequence[int], rows_per_chunk: int) -> None:
        """Everything is still to be handed out.

        Args:
            rows: to compute, ascending.
            rows_per_chunk: a multiple of the rows of a file.
        """
        self._rows, self._next = array("Q", rows), 0
        self._rows_per_chunk = rows_per_chunk
        self._returned: deque[tuple[int, set[int]]] = deque()
        self._held: dict[int, Chunks] = {}
        self.unsettled = len(rows)

    def chunk_of(self, row: int) -> int:
        """The chunk that a row belongs to."""
        return row // self._rows_per_chunk

    @property
    def waiting(self) -> bool:
        """Whether there is a chunk to hand out."""
        return bool(self._returned) or self._next < len(self._rows)

    @property
    def not_handed_out(self) -> int:
        """Rows that nobody has."""
        return len(self._rows) - self._next + sum(len(rows) for _, rows in self._returned)

    def take(self, replica: int) -> list[int]:
        """Hand the next chunk to a replica: its unsettled rows, ascending; none where nothing waits."""
        if self._returned:
            chunk, rows = self._returned.popleft()
        elif self._next < len(self._rows):
            chunk = self.chunk_of(self._rows[self._next])
            ahead = (self._rows[at] for at in range(self._next, len(self._rows)))
            rows = set(takewhile(lambda row: self.chunk_of(row) == chunk, ahead))
            self._next += len(rows)
        else:
            return []
        self._held.setdefault(replica, {})[chunk] = set(rows)
        return sorted(rows)

    def settle(self, replica: int, rows: Iterable[int]) -> None:
        """Rows that a replica is through with.

        Raises:
            KeyError: a row that it does not have.
        """
        held = self._held[replica]
        for row in rows:
            chunk = self.chunk_of(row)
            held[chunk].remove(row)
            if not held[chunk]:
                del held[chunk]
            self.unsettled -= 1

    def backlog(self, replica: int) -> int:
        """Rows that a replica has and has not settled."""
        return sum(map(len, self._held.get(replica, {}).values()))

    def take_back(self, replica: int) -> Chunks:
        """What a replica had that is gone. It is with nobody until :meth:`put_back`."""
        return self._held.pop(replica, {})

    def put_back(self, chunk: int, rows: Iterable[int], settled: int = 0) -> None:
        """Let a chunk be handed out again, before those that nobody had yet.

        Args:
            rows: still to be computed.
            settled: rows of it that were found finished.
        """
        left = set(rows)
        self.unsettled -= settled
        if left:
            self._returned.append((chunk, left))
