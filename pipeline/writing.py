"""A store that is being written to: whatever ends the writing, what was written is durable."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from pipeline import disk
from pipeline.formats.stores import Claim, RowStore


@contextlib.contextmanager
def writing(store: RowStore, claim: Claim, space: disk.Space) -> Iterator[None]:
    """Make ``store`` ready, and close it however the block ends.

    Raises:
        DiskFull: in place of the error of a write for which there was no space.
    """
    try:
        store.begin(claim)
        yield
        store.close()
    except BaseException as error:
        # Closing may need space too, and what is durable by now is enough.
        with contextlib.suppress(OSError):
            store.close()
        if isinstance(error, OSError) and disk.is_full(error):
            raise space.full(error) from error
        raise
