"""The rows of an address: one object a row, under the names that the format gives to files.

An object appears whole or not at all, so a row needs no temporary name, no lock and no place on a disk: it is encoded
in memory and sent, and counts once the store has said that it has it.
"""

from __future__ import annotations

import contextlib
import io
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path

from pipeline.disk import RowSize
from pipeline.formats import DamagedRow, StateRow, Wanted, float8, safetensors_row
from pipeline.formats.registry import Format
from pipeline.formats.safetensors_view import View
from pipeline.formats.stores import Claim, FileStore, Layout, row_number
from pipeline.object_store.address import Address
from pipeline.object_store.ahead import FetchedRows, Kept
from pipeline.object_store.bucket import Bucket
from pipeline.object_store.keys import LOCK
from pipeline.object_store.ranged import RangedFile
from shims.errors import UsageError

_SENDING = 8
"""Rows of one process that are sent side by side, where it does not have threads of its own for them."""
_ASKING, _FETCHING = 32, 4
"""Rows that are asked for side by side: for the beginning of each, or for all of it."""
_OVERHEAD = 1 << 20
"""More than what a format adds to a row's numbers: header, names, alignment."""


class Named(str):
    """An object's address, where a path is expected for messages."""

    __slots__ = ()

    @property
    def name(self) -> str:
        """Its last part."""
        return self.rpartition("/")[2]


def layout_of(form: Format, flag: str) -> Layout:
    """How a format lays out one row a file.

    Raises:
        UsageError: it holds many in one, and a store cannot add to an object.
    """
    store = form.open(Path(), 1)
    if not isinstance(store, FileStore):
        raise UsageError(
            flag,
            "a format of one object a row: a store cannot add to an object, and does not mind how many there are",
            f"--format {form.name}",
            "use --format hs_safetensors; `specshim fetch` and `specshim convert` make shards of it on a disk",
        )
    return store.layout


class ObjectRows:
    """See :class:`pipeline.formats.stores.RowStore` and :class:`pipeline.formats.stores.Remote`."""

    def __init__(self, address: Address, layout: Layout, *, kept: Kept | None = None, sending: int = _SENDING) -> None:
        """Rows at ``address``.

        Args:
            kept: where fetched rows stay on this machine.
            sending: rows sent side by side; 0 sends each before :meth:`write` returns.
        """
        self._address, self._layout, self._kept, self._sending = address, layout, kept, sending
        self.at_once = _ASKING if layout.safetensors else _FETCHING
        self._bucket = Bucket(address)
        self._sizes: dict[int, int] | None = None
        self._just_listed = False
        self._fetched: FetchedRows | None = None
        self._pool: ThreadPoolExecutor | None = None
        self._under_way: set[Future[None]] = set()
        self._latest = threading.local()

    def locate(self, index: int) -> Named:
        """Where the row is."""
        return Named(self._address.of(self._name(index)))

    def glance(self, index: int, wanted: Wanted) -> int:
        """Like :meth:`check`, by what the listing says (name and size), where that is enough.

        What stands under a row's name was sent whole by a run of the same manifest: nothing else writes there.
        """
        if wanted.content or wanted.token_ids is None or None in (wanted.num_layers, wanted.hidden_size, wanted.dtype):
            return self.check(index, wanted)
        size = self._listed().get(index)
        if size is None:
            raise FileNotFoundError(self.locate(index))
        tokens = len(wanted.token_ids)
        least = RowSize(wanted.num_layers or 0, wanted.hidden_size or 0, wanted.dtype or "").numbers(tokens)
        if not least < size <= least + _OVERHEAD:
            raise DamagedRow(f"{size} bytes, where its numbers alone take {least}")
        return tokens

    def check(self, index: int, wanted: Wanted) -> int:
        """See the protocol; of a safetensors row, header, ids and mask are fetched, mostly in one request."""
        if not self._layout.safetensors:
            with self._file(index) as path:
                return self._layout.check(path, wanted)
        handle = self._opened(index)
        tokens = safetensors_row.check(_view(handle), wanted)
        self._latest.row = index, handle
        return tokens

    def read(self, index: int) -> StateRow:
        """See the protocol."""
        return float8.dense(self.read_stored(index))

    def read_stored(self, index: int) -> StateRow:
        """See the protocol."""
        if self._kept is None and self._layout.safetensors:
            content, found = self._bucket.read(self._name(index))
            return safetensors_row.decode(View(io.BytesIO(content), 0, found.size))
        with self._file(index) as path:
            return self._layout.read(path)

    def tokens(self, index: int) -> tuple[list[int], list[int] | None]:
        """See the protocol."""
        if not self._layout.safetensors:
            with self._file(index) as path:
                return self._layout.tokens(path)
        # Whoever has just checked a row mostly wants its ids next: they came with it.
        latest, self._latest.row = getattr(self._latest, "row", None), None
        return safetensors_row.tokens(_view(latest[1] if latest and latest[0] == index else self._opened(index)))

    def expect(self, indices: Sequence[int]) -> None:
        """Begin to fetch rows that will be read soon."""
        self._rows().expect(indices)

    def indices(self) -> list[int]:
        """See the protocol; asks anew, unless :meth:`others` has just done so."""
        if not self._just_listed:
            self._sizes = self._fetched = None
        self._just_listed = False
        return sorted(self._listed())

    def others(self) -> list[str]:
        """Names below the address that are no row's, the lock's excepted; asks anew."""
        others: list[str] = []
        self._sizes, self._fetched = self._listing(others), None
        self._just_listed = True
        return [name for name in others if name != LOCK]

    def begin(self, claim: Claim) -> None:
        """See the protocol; whoever calls this holds the lock of the address."""
        self._bucket.abort_unfinished()

    def write(self, index: int, row: StateRow, header: Mapping[str, str]) -> int:
        """See the protocol."""
        content = self._layout.encode(row, header)
        if not self._sending:
            self._bucket.upload(self._name(index), content)
            return len(content)
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._sending, "specshim-send")
        while len(self._under_way) >= self._sending:
            done, self._under_way = wait(self._under_way, return_when=FIRST_COMPLETED)
            for future in done:
                future.result()
        self._under_way.add(self._pool.submit(self._bucket.upload, self._name(index), content))
        return len(content)

    def sync(self) -> None:
        """See the protocol."""
        under_way, self._under_way = self._under_way, set()
        wait(under_way)
        for future in under_way:
            future.result()

    def close(self) -> None:
        """See the protocol."""
        try:
            self.sync()
        finally:
            if self._pool is not None:
                self._pool.shutdown()
                self._pool = None

    def _name(self, index: int) -> str:
        return self._layout.relative_path(index).as_posix()

    def is_row(self, name: str) -> bool:
        """Whether an object's name, below the address, is a row's."""
        return self._row(name) is not None

    def _row(self, name: str) -> int | None:
        """The row that an object's name stands for: only what would be written under exactly this name."""
        number = row_number(name)
        return number if number is not None and name == self._name(number) else None

    def _listed(self) -> dict[int, int]:
        """Bytes by row, of one listing."""
        if self._sizes is None:
            self._sizes = self._listing([])
        return self._sizes

    def _listing(self, others: list[str]) -> dict[int, int]:
        sizes: dict[int, int] = {}
        for found in self._bucket.list():
            number = self._row(found.name)
            if number is None:
                others.append(found.name)
            else:
                sizes[number] = found.size
        return sizes

    def _rows(self) -> FetchedRows:
        if self._fetched is None:
            self._fetched = FetchedRows(self._bucket, self._layout, self._listed(), self._kept)
        return self._fetched

    @contextlib.contextmanager
    def _file(self, index: int) -> Iterator[Path]:
        with self._rows().file(index) as path:
            yield path

    def _opened(self, index: int) -> RangedFile:
        return RangedFile(self._bucket, self._name(index))


def _view(handle: RangedFile) -> View:
    return View(handle, 0, handle.size)  # type: ignore[arg-type]


def rows_at(
    address: Address, form: Format, flag: str, *, kept: Kept | None = None, sending: int = _SENDING
) -> ObjectRows:
    """The rows of a format at an address.

    Raises:
        UsageError: the format cannot be there.
    """
    return ObjectRows(address, layout_of(form, flag), kept=kept, sending=sending)
