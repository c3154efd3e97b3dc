"""An address that is only read: `verify`, `train --data`, `extract --status`."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pipeline.formats.registry import DEFAULT, get_format
from pipeline.formats.stores import RowStore
from pipeline.object_store.address import Address
from pipeline.object_store.ahead import Kept
from pipeline.object_store.beside import Beside
from pipeline.object_store.bucket import Bucket, require_boto3
from pipeline.object_store.keys import LOCK, MANIFEST, is_beside
from pipeline.object_store.rows import ObjectRows, rows_at
from pipeline.places import View
from shims.errors import SpecshimError


class StoreView(View):
    """The files beside the rows are copies; the rows are asked for one by one."""

    def __init__(self, folder: Path, address: Address, flag: str) -> None:
        super().__init__(folder)
        self._address, self._flag = address, flag
        self._beside = Beside(Bucket(address), folder)

    def fetch_state(self) -> None:
        """Have the manifest in the folder."""
        self._beside.fetch_state()

    def open_rows(self, record: Mapping[str, Any]) -> RowStore:
        """See :class:`pipeline.places.View`."""
        return rows_of(self._address, record, self._flag)

    def fetch_beside(self, store: RowStore) -> list[str]:
        """See :class:`pipeline.places.View`."""
        assert isinstance(store, ObjectRows), "it is the one of open_rows"
        others = store.others()
        self._beside.fetch_all(others)
        return [self._address.of(name) for name in others if not is_beside(name) and name not in (MANIFEST, LOCK)]

    def says(self, text: str) -> str:
        """See :class:`pipeline.places.View`."""
        return text.replace(str(self.folder), str(self._address))


@contextlib.contextmanager
def opened(address: Address, flag: str) -> Iterator[StoreView]:
    """Look at an address; what is copied is gone afterwards.

    Raises:
        UsageError: it cannot be read.
    """
    require_boto3(flag)
    with tempfile.TemporaryDirectory(prefix="specshim-beside-") as name:
        view = StoreView(Path(name), address, flag)
        with named_as(Path(name), address):
            view.fetch_state()
            yield view


def rows_of(address: Address, record: Mapping[str, Any], flag: str, kept: Kept | None = None) -> ObjectRows:
    """The rows that a manifest describes.

    Raises:
        UsageError: their format is unknown, or none for an address.
    """
    where = f"{address.of(MANIFEST)}, format"
    rows = rows_at(address, get_format(record.get("format", DEFAULT), where), flag, kept=kept)
    if kept is not None:
        rows.indices()  # once, for all processes that are forked from here
    return rows


@contextlib.contextmanager
def named_as(folder: Path, address: Address) -> Iterator[None]:
    """Errors about files in ``folder`` name the address that they are copies from."""
    try:
        yield
    except SpecshimError as error:
        error.where, error.wanted, error.found, error.next_step = (
            part.replace(str(folder), str(address))
            for part in (error.where, error.wanted, error.found, error.next_step)
        )
        error.args = (error.where, error.wanted, error.found, error.next_step)
        raise
