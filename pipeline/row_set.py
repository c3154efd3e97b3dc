"""The rows of an extraction as they lie on disk: which are there, whole, and whose they are.

The files are the truth; nothing here counts on what an earlier run said it did.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from pipeline.at_once import answers, threads_for
from pipeline.bad_rows import BadRows
from pipeline.formats import DamagedRow, Wanted
from pipeline.formats.stores import Remote, RowStore
from pipeline.prepared import PreparedFile


@dataclass
class Survey:
    """What lies on disk of the rows looked at."""

    rows: int = 0
    tokens: int = 0
    cut_rows: int = 0
    """Longer than the limit, stored with ids and mask cut the same way."""
    done: int = 0
    missing: list[int] = field(default_factory=list)
    damaged: dict[int, str] = field(default_factory=dict)
    """Row -> what is wrong with its file."""
    bad: list[int] = field(default_factory=list)
    """Left out for good, because their states cannot be right."""

    @property
    def to_compute(self) -> list[int]:
        """Rows without a good file, ascending."""
        return sorted([*self.missing, *self.damaged])


@dataclass(frozen=True)
class RowSet:
    """The prepared rows, and the store that holds their states."""

    data: PreparedFile
    row_limit: int
    """Tokens kept per row."""
    store: RowStore
    bad: BadRows
    wanted: Wanted
    """What all rows have in common."""
    header: Callable[[int], Mapping[str, str]]
    """What the header of a row has to say."""

    def row(self, index: int) -> tuple[str, list[int], list[int]]:
        """Id, token ids and loss mask of a row, cut to the limit."""
        row = self.data[index]
        return row.row_id, row.input_ids[: self.row_limit], row.loss_mask[: self.row_limit]

    def lengths(self, indices: Sequence[int]) -> list[int]:
        """Tokens of these rows, cut to the limit."""
        return [min(self.data.lengths[index], self.row_limit) for index in indices]

    def survey(self, owns: Callable[[int], bool] = lambda index: True, content: bool = False) -> Survey:
        """Check the rows that ``owns`` picks; the counts of rows and tokens are those of the whole data.

        Rows that would have to be fetched for it are judged by what a listing tells of them.

        Args:
            content: read the states and compare them with their hash, too.
        """
        found = Survey()
        mine = array("Q")
        for index, length in enumerate(self.data.lengths):
            found.rows += 1
            found.tokens += min(length, self.row_limit)
            found.cut_rows += length > self.row_limit
            if not owns(index):
                continue
            if index in self.bad.rows:
                found.bad.append(index)
                continue
            mine.append(index)
        if isinstance(self.store, Remote):
            self.store.indices()  # asks anew for the listing
        states = answers(lambda index: self._state(index, content), mine, threads_for(self.store, whole=content))
        for index, outcome in zip(mine, states, strict=True):
            if outcome is None:
                found.done += 1
            elif isinstance(outcome, FileNotFoundError):
                found.missing.append(index)
            else:
                found.damaged[index] = str(outcome)
        return found

    def _state(self, index: int, content: bool) -> DamagedRow | FileNotFoundError | None:
        """What is wrong with a row; None where nothing is."""
        try:
            check = self.store.glance if isinstance(self.store, Remote) else self.store.check
            check(index, self._wanted(index, content))
        except (DamagedRow, FileNotFoundError) as damage:
            return damage
        return None

    def check(self, index: int, content: bool = False) -> int:
        """Compare one stored row with the prepared one.

        Returns:
            Its tokens.

        Raises:
            DamagedRow: it is not that row.
            FileNotFoundError: there is no such row.
        """
        return self.store.check(index, self._wanted(index, content))

    def _wanted(self, index: int, content: bool) -> Wanted:
        _, ids, mask = self.row(index)
        return Wanted(
            self.wanted.num_layers, self.wanted.hidden_size, self.wanted.dtype, self.header(index), ids, mask, content
        )

    def all_there(self) -> bool:
        """Whether every row has a file or is on the list of bad ones; the files are not opened."""
        left_out = self.bad.indices
        there = sum(index < len(self.data) and index not in left_out for index in self.store.indices())
        return there + len(left_out) == len(self.data)

    def tokens(self) -> Iterator[tuple[list[int], list[int]]]:
        """(token ids, loss mask) of every row."""
        for index in range(len(self.data)):
            _, ids, mask = self.row(index)
            yield ids, mask
