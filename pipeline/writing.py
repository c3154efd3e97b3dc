"""A store that is being written to: whatever ends the writing, what was written is durable."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

from pipeline import disk
from pipeline.formats.stores import Claim, RowStore


@contextlib.contextmanager
def writing(store: RowStore, claim: Claim, folder: Path, remaining: Callable[[], int]) -> Iterator[None]:
    """Make ``store`` ready, and close it however the block ends.

    Args:
        folder: where it lies, for messages.
        remaining: bytes that are still to be written, asked when there is no more space.

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
            raise disk.full(folder, error, remaining()) from error
        raise
