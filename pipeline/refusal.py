"""A refused training tells its launcher: started again, it would be refused again.

Launchers (torchrun, Ray Train) start all processes again when one ends with an error, whatever the error. So a process
that is refused leaves its refusal in a file, and one that finds the file ends at once; the launcher says it once more,
as the last word.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pipeline.atomic import write_text
from shims.errors import UsageError

VARIABLE = "SPECSHIM_REFUSAL"
"""Names the file, in the environment of what a launcher starts."""
_STARTS = "TORCHELASTIC_RESTART_COUNT"
"""How often torchrun has started its processes again; set by it."""
EXIT_CODE = 2
Parts = tuple[str, str, str, str]
_UNREADABLE: Parts = (
    "specshim train", "options that can be read", "others: see the message above", "see `specshim train --help`",
)  # fmt: skip


def tell(error: UsageError | None = None) -> None:
    """Leave word of a refusal, where a launcher wants to know.

    Only at the first start: what was accepted then and is refused later may find the folder held by a process that
    is about to end, and is worth another try.

    Args:
        error: None for a command line that could not be read.
    """
    file = os.environ.get(VARIABLE)
    if file and os.environ.get(_STARTS, "0") == "0":
        parts = (error.where, error.wanted, error.found, error.next_step) if error else _UNREADABLE
        write_text(Path(file), json.dumps(parts))


def end_if_told() -> None:
    """End this process, if it or one of its equals was refused already."""
    file = os.environ.get(VARIABLE)
    if file and Path(file).exists():
        sys.exit(EXIT_CODE)


@contextmanager
def asked_for() -> Iterator[Path]:
    """A file for :data:`VARIABLE`; gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="specshim-launch-") as folder:
        yield Path(folder) / "refusal.json"


def told(file: Path) -> Parts | None:
    """The four parts of the refusal; None where nothing was refused."""
    if not file.exists():
        return None
    where, wanted, found, next_step = json.loads(file.read_text(encoding="utf-8"))
    return where, wanted, found, next_step
