"""Whole readings in the cache, so that a release that was read once is not read again.

A file of the index never changes under its name and hash; what may change is what is asked of it, and the code
that reads. Both are part of the key.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from pathlib import Path

from contract_tests import readers
from contract_tests.homes import called_homes, homes_in
from contract_tests.readers.found import Reading
from contract_tests.sources.release import ReleaseTree
from contract_tests.sources.store import Store
from contract_tests.watched import WATCHED


def kept_reading(tree: ReleaseTree) -> Reading | None:
    """The reading of this file of the index that was kept, or None."""
    data = Store(tree.settings.cache).get(*_name(tree))
    return None if data is None else Reading.from_dict(data)


def keep_reading(tree: ReleaseTree, reading: Reading) -> None:
    """Keep a complete reading of `tree`."""
    Store(tree.settings.cache).put(reading.as_dict(), *_name(tree))


def _name(tree: ReleaseTree) -> tuple[str, ...]:
    file = tree.distribution
    identity = hashlib.sha256(f"{file.filename} {file.url} {file.sha256}".encode()).hexdigest()[:24]
    return "readings", _asked(tree.package), f"{tree.package}-{tree.version}-{identity}"


@lru_cache(maxsize=8)
def _asked(package: str) -> str:
    """A digest of the names that are looked up in a package and of the code that looks."""
    names = (*homes_in(package), "", *sorted(called_homes()), "", *(entry.home for entry in WATCHED))
    asked = hashlib.sha256("\n".join(names).encode())
    for path in sorted(Path(readers.__file__).parent.glob("*.py")):
        asked.update(path.read_bytes())
    return asked.hexdigest()[:24]
