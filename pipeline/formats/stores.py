"""A folder of rows, whatever its format: what `extract`, `convert`, `verify` and `train` work with."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from pipeline.atomic import clear_leftovers, sync_folder, write_bytes
from pipeline.formats import StateRow, Wanted, float8


@dataclass(frozen=True)
class Claim:
    """Which rows a process may write; it holds the lock over them."""

    total: int
    """Rows of the whole data set."""
    owns: Callable[[int], bool] = lambda index: True
    absent: AbstractSet[int] = frozenset()
    """Rows that will never come, because their states were bad; may grow while rows are written."""


class Located(Protocol):
    """A path, or an address; its text names it whole."""

    @property
    def name(self) -> str:
        """Its last part."""
        ...


class RowStore(Protocol):
    """Rows by index, from 0. A row that was written stays whole, or absent, through any kill."""

    def locate(self, index: int) -> Located:
        """The file that holds the row, or would; for messages."""
        ...

    def check(self, index: int, wanted: Wanted) -> int:
        """Tokens of the row.

        Raises:
            DamagedRow: it is not what is wanted.
            FileNotFoundError: there is no such row.
        """
        ...

    def read(self, index: int) -> StateRow:
        """The row; float8 states come back as bfloat16. Raises like :meth:`check`."""
        ...

    def read_stored(self, index: int) -> StateRow:
        """The row, states as stored. Raises like :meth:`check`."""
        ...

    def tokens(self, index: int) -> tuple[list[int], list[int] | None]:
        """The row's token ids and its loss mask (None where it has none), without its states. Raises like check."""
        ...

    def indices(self) -> list[int]:
        """Indices of the rows that are there, damaged or not, ascending."""
        ...

    def begin(self, claim: Claim) -> None:
        """Make ready for writing the rows claimed: what a killed run left half done of them is removed."""
        ...

    def write(self, index: int, row: StateRow, header: Mapping[str, str]) -> int:
        """Write or replace a row; returns its bytes. It is durable after :meth:`sync`."""
        ...

    def sync(self) -> None:
        """Make everything written so far durable."""
        ...

    def close(self) -> None:
        """Make everything durable and let go of the files."""
        ...


@runtime_checkable
class Remote(Protocol):
    """A store that a row has to be fetched from: what takes long is asked for side by side, or before it is needed."""

    at_once: int
    """Rows to ask for side by side."""

    def glance(self, index: int, wanted: Wanted) -> int:
        """As :meth:`RowStore.check`, without fetching what a listing can tell."""
        ...

    def expect(self, indices: Sequence[int]) -> None:
        """Begin to fetch rows that will be read soon."""
        ...


@dataclass(frozen=True)
class Layout:
    """A format of one file a row: where the files lie and how they are read and written."""

    relative_path: Callable[[int], Path]
    pattern: str
    """Names of all row files, as a glob from the folder; the row's number is the last one in the stem."""
    encode: Callable[[StateRow, Mapping[str, str]], bytes]
    read: Callable[[Path], StateRow]
    """States as stored."""
    tokens: Callable[[Path], tuple[list[int], list[int] | None]]
    check: Callable[[Path, Wanted], int]
    write: Callable[[Path, StateRow, Mapping[str, str]], int] | None = None
    """Write a row's file in one step, where that can be done without `encode`'s copies."""
    safetensors: bool = False
    """Whether a row's file is one of safetensors, whose beginning holds all but the states."""


class FileStore:
    """One file a row."""

    def __init__(self, folder: Path, layout: Layout) -> None:
        self._folder, self._layout = folder, layout
        self._unsynced: set[Path] = set()

    @property
    def layout(self) -> Layout:
        """Where the files lie and what is in them."""
        return self._layout

    def locate(self, index: int) -> Path:
        """The file of the row."""
        return self._folder / self._layout.relative_path(index)

    def check(self, index: int, wanted: Wanted) -> int:
        """See :class:`RowStore`."""
        return self._layout.check(self._present(index), wanted)

    def read(self, index: int) -> StateRow:
        """See :class:`RowStore`."""
        return float8.dense(self.read_stored(index))

    def read_stored(self, index: int) -> StateRow:
        """See :class:`RowStore`."""
        return self._layout.read(self._present(index))

    def tokens(self, index: int) -> tuple[list[int], list[int] | None]:
        """See :class:`RowStore`."""
        return self._layout.tokens(self._present(index))

    def indices(self) -> list[int]:
        """See :class:`RowStore`."""
        numbers = (row_number(path.name) for path in self._folder.glob(self._layout.pattern))
        return sorted({number for number in numbers if number is not None})

    def begin(self, claim: Claim) -> None:
        """See :class:`RowStore`."""
        (self._folder / self._layout.relative_path(0)).parent.mkdir(parents=True, exist_ok=True)
        pattern = Path(self._layout.pattern).parent
        for folder in self._folder.glob(str(pattern)) if pattern.name else [self._folder]:
            clear_leftovers(
                folder, lambda name: claim.owns(number) if (number := row_number(name)) is not None else False
            )

    def write(self, index: int, row: StateRow, header: Mapping[str, str]) -> int:
        """See :class:`RowStore`."""
        path = self.locate(index)
        self._unsynced.add(path.parent)
        if self._layout.write is not None:
            return self._layout.write(path, row, header)
        content = self._layout.encode(row, header)
        write_bytes(path, content)
        return len(content)

    def sync(self) -> None:
        """See :class:`RowStore`."""
        for folder in self._unsynced:
            sync_folder(folder)
            sync_folder(folder.parent)
        self._unsynced.clear()

    def close(self) -> None:
        """See :class:`RowStore`."""
        self.sync()

    def _present(self, index: int) -> Path:
        path = self.locate(index)
        if not path.exists():
            packed = path.with_name(path.name + ".gz")
            return packed if packed.exists() else path
        return path


def row_number(name: str) -> int | None:
    """The row that a file name stands for: the last number in it that is not part of a suffix."""
    found = re.findall(r"_(\d+)\.", name)
    return int(found[-1]) if found else None
