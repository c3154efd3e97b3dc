"""An address that `extract` writes to: its lock, its rows, and the files beside them."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

from pipeline import disk
from pipeline.formats.registry import Format
from pipeline.formats.stores import RowStore
from pipeline.object_store.address import Address
from pipeline.object_store.beside import Beside
from pipeline.object_store.bucket import Bucket, require_boto3
from pipeline.object_store.keys import LOCK, MANIFEST
from pipeline.object_store.lock import StoreLock, Times, look
from pipeline.object_store.rows import layout_of, rows_at
from pipeline.object_store.view import named_as
from pipeline.places import Target
from pipeline.shard import Shard
from shims.errors import UsageError

TIMES = Times()
_FLAG = "--output-dir"


class StoreTarget(Target):
    """Rows go to an address; the files beside them are copies in a folder of this machine.

    Args:
        lock: held while there is writing; None only looks.
    """

    def __init__(self, address: Address, folder: Path, lock: StoreLock | None) -> None:
        self._address, self.folder, self._lock = address, folder, lock
        self.address = str(address)
        self._beside = Beside(Bucket(address), folder)

    def fetch_state(self) -> None:
        """Have manifest and bad rows in the folder."""
        self._beside.fetch_state()

    def open_store(self, form: Format, folder: Path, rows_per_file: int) -> RowStore:
        """See :class:`pipeline.places.Target`."""
        return rows_at(self._address, form, "--format")

    def strange(self, folder: Path) -> str:
        """See :class:`pipeline.places.Target`; anything at all is."""
        names = (found.name for found in Bucket(self._address).list() if found.name not in (LOCK, MANIFEST))
        first = next(names, "")
        return f"objects ({first})" if first else ""

    def publish(self) -> None:
        """See :class:`pipeline.places.Target`."""
        self.check()
        self._beside.publish()

    def check(self) -> None:
        """Go on only while the lock is held."""
        if self._lock is not None:
            self._lock.check()

    def describe_room(self, folder: Path) -> str:
        """See :class:`pipeline.places.Target`."""
        return f" to {self.address}"

    def refuse_what_does_not_fit(self, folder: Path, needed: int, files: int, reserve: int) -> None:
        """A store does not say how much it takes; when it is full it refuses a row, and says so."""

    def space(self, folder: Path, remaining: int, reserve: int) -> disk.Space:
        """See :class:`pipeline.places.Target`."""
        return _Watched(self, folder, remaining)


class _Watched(disk.Space):
    """In place of a disk that may fill up, a lock that may be lost."""

    def __init__(self, target: StoreTarget, folder: Path, remaining: int) -> None:
        super().__init__(folder, remaining, 0)
        self._target = target

    def stop_at_low_water(self, next_bytes: int) -> None:
        """Stop once another process may be writing."""
        self._target.check()


def check_options(address: Address, form: Format, shard: Shard) -> None:
    """Refuse before anything is asked of the store what cannot be written to an address.

    Raises:
        UsageError: the format, a shard, or a missing library.
    """
    require_boto3(f"{_FLAG} {address}")
    layout_of(form, f"{_FLAG} {address}")
    if not shard.alone:
        raise UsageError(
            "--shard",
            "one writer of the files beside the rows, at an address",
            str(shard),
            "use --replicas, which share out the rows under one command, or write to a shared file system",
        )


@contextlib.contextmanager
def opened(address: Address, writing: bool) -> Iterator[StoreTarget]:
    """The address with its state, locked where there is to be writing.

    Raises:
        UsageError: another process writes there, or it cannot be used.
    """
    bucket = Bucket(address)
    with tempfile.TemporaryDirectory(prefix="specshim-beside-") as name, contextlib.ExitStack() as held:
        held.enter_context(named_as(Path(name), address))
        lock = None
        if writing:
            lock = StoreLock(bucket, TIMES)
            lock.acquire()
            held.callback(lock.release)
        target = StoreTarget(address, Path(name), lock)
        target.fetch_state()
        yield target


def holder(address: Address) -> str | None:
    """Who is writing to an address; None when nobody is, as far as can be seen from here."""
    seen = look(Bucket(address))
    return None if seen is None or seen.gone else seen.owner


def signature(address: Address) -> str:
    """Names the run that is writing to an address; "" where there is none."""
    seen = look(Bucket(address))
    return "" if seen is None else seen.token
