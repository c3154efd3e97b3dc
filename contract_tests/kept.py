"""Whole readings, so that a release that was read once is not read again: in the cache, and the committed snapshots.

A file of the index never changes under its name and hash; what may change is what is asked of it, and the code
that reads. Both are part of the cache's key; of the snapshots, tests see to it.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from pathlib import Path

from contract_tests import readers
from contract_tests.homes import called_homes, homes_in
from contract_tests.readers.found import Reading
from contract_tests.recorded import is_recorded, recorded
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


def same_as_recorded(tree: ReleaseTree) -> bool:
    """Whether every source file that the snapshot of this release was read from is, by its hash, the one in `tree`.

    Then the snapshot says what a reading would. Not for those who make or check snapshots.

    Raises:
        SourceError: a file cannot be fetched.
    """
    if tree.package != "vllm" or not is_recorded(tree.version):
        return False
    snapshot, store = recorded(tree.version), Store(tree.settings.cache)
    if snapshot.distribution != tree.distribution.filename or set(snapshot.found) != set(homes_in("vllm")):
        return False
    state = hashlib.sha256(repr(sorted(snapshot.files.items())).encode()).hexdigest()[:24]
    key = ("same", state, _identity(tree))
    kept = store.get(*key)
    if isinstance(kept, bool):
        return kept
    there = tree.paths().issuperset(snapshot.files)
    if there:
        tree.prefetch(snapshot.files)
    same = there and all(_hash(tree, path) == sha256 for path, sha256 in snapshot.files.items())
    tree.save()
    store.put(same, *key)
    return same


def _hash(tree: ReleaseTree, path: str) -> str:
    tree.read(path)
    return tree.sha256(path)


def _name(tree: ReleaseTree) -> tuple[str, ...]:
    return "readings", _asked(tree.package), f"{tree.package}-{tree.version}-{_identity(tree)}"


def _identity(tree: ReleaseTree) -> str:
    file = tree.distribution
    return hashlib.sha256(f"{file.filename} {file.url} {file.sha256}".encode()).hexdigest()[:24]


@lru_cache(maxsize=8)
def _asked(package: str) -> str:
    """A digest of the names that are looked up in a package and of the code that looks."""
    names = (*homes_in(package), "", *sorted(called_homes()), "", *(entry.home for entry in WATCHED))
    asked = hashlib.sha256("\n".join(names).encode())
    for path in sorted(Path(readers.__file__).parent.glob("*.py")):
        asked.update(path.read_bytes())
    return asked.hexdigest()[:24]
