"""A published release as a tree that fetches what is asked for and keeps it."""

from __future__ import annotations

import tarfile
import threading
import zipfile
import zlib
from collections.abc import Iterable
from typing import IO, Any, cast

import remotezip
import requests

from contract_tests.sources.index import Distribution, Index, explained
from contract_tests.sources.ranges import RemoteWheel
from contract_tests.sources.settings import Settings
from contract_tests.sources.store import Store, digest
from contract_tests.sources.trees import SourceError, SourceTree, TarTree
from shims.versions import newest_first

_MAX_SDIST = 256 * 1024 * 1024
# What a damaged or foreign archive ends in; the last two are zipfile's for what it does not support.
_DAMAGED = (
    zipfile.BadZipFile,
    tarfile.TarError,
    remotezip.RemoteZipError,
    zlib.error,
    EOFError,
    OSError,
    NotImplementedError,
    RuntimeError,
)


def released(package: str, settings: Settings) -> list[str]:
    """Versions of `package` on the index, final releases only, oldest first.

    Raises:
        SourceError: the index does not answer; or offline and never asked before.
    """
    versions = _files(package, "", settings)
    return newest_first(versions, final=True)[::-1]


def open_release(package: str, version: str, settings: Settings) -> ReleaseTree:
    """The sources of one release.

    Raises:
        SourceError: the index has no such release, or none of its files can be read.
    """
    return ReleaseTree(package, version, settings)


class ReleaseTree:
    """One release of a package; each file is fetched once and kept in the cache.

    Args:
        package: name of the distribution.
        version: as the index has it.
        settings: where to look.
    """

    def __init__(self, package: str, version: str, settings: Settings) -> None:
        self.package, self.version, self.settings = package, version, settings
        self.label = f"{package} {version}"
        self._store = Store(settings.cache)
        # The index is part of the name: another index may hold another build under the same version.
        self._name = ("trees", digest(settings.index.encode())[:12], package, version)
        self._known: dict[str, Any] = self._store.get(*self._name) or {}
        self._tree: SourceTree | None = None
        self._changed = False
        if not self._known:
            self._open()

    @property
    def distribution(self) -> Distribution:
        """The file that is read."""
        return Distribution(**self._known["distribution"])

    def paths(self) -> frozenset[str]:
        return frozenset(self._known["paths"])

    def prefetch(self, paths: Iterable[str]) -> None:
        """Fetch the files among `paths` that are not in the cache, in few requests.

        Raises:
            SourceError: the index does not answer.
        """
        missing = [path for path in paths if path not in self._known["read"]]
        if missing and not self.settings.offline:
            tree = self._open()
            if isinstance(tree, RemoteWheel):
                with explained(self.label):
                    try:
                        tree.prefetch(missing)
                    except _DAMAGED as error:
                        raise _unreadable(self.label, error) from error

    def read(self, path: str) -> bytes:
        sha256 = self._known["read"].get(path)
        kept = self._store.content(sha256) if sha256 else None
        if kept is not None:
            return kept
        with explained(f"{self.label}, {path}"):
            try:
                content = self._open().read(path)
            except _DAMAGED as error:
                if isinstance(error, requests.RequestException):
                    raise
                raise _unreadable(f"{self.label}, {path}", error) from error
        self._known["read"][path] = self._store.keep(content)
        self._changed = True
        return content

    def sha256(self, path: str) -> str:
        """Hash of a file that was read."""
        return str(self._known["read"][path])

    def save(self) -> None:
        """Remember which contents the files read so far have."""
        if self._changed:
            self._store.put(self._known, *self._name)
            self._changed = False

    def _open(self) -> SourceTree:
        if self._tree is not None:
            return self._tree
        if self.settings.offline:
            raise _offline(self.label, self.settings)
        index, failures = _index(self.settings), []
        for distribution in self._candidates():
            try:
                with explained(distribution.filename):
                    self._tree = _tree(distribution, index, self._store, self.label)
            except (*_DAMAGED, SourceError) as error:
                failures.append(f"{distribution.filename}: {_reason(error)}")
                continue
            self._known = {
                "distribution": distribution.as_dict(),
                "paths": sorted(self._tree.paths()),
                "read": self._known.get("read", {}),
            }
            self._changed = True
            return self._tree
        raise SourceError(
            self.label, "a wheel or a source distribution that can be read", "; ".join(failures) or "no file",
            "check that the index has this release and answers range requests",
        )  # fmt: skip

    def _candidates(self) -> list[Distribution]:
        """The files to try, best first; once one was read, only that one: contents must not mix."""
        if self._known:
            return [self.distribution]
        files = _files(self.package, self.version, self.settings)
        if self.version not in files:
            last = ", ".join(newest_first(files)[:3])
            raise SourceError(self.label, "a release on the index", f"not there (newest: {last})", "check the version")
        return sorted(files[self.version], key=_preference)


def _preference(distribution: Distribution) -> tuple[int, str]:
    name = distribution.filename
    if distribution.kind == "sdist":
        return 3, name
    return (0 if name.endswith("-any.whl") else 1 if "x86_64" in name else 2), name


def _tree(distribution: Distribution, index: Index, store: Store, label: str) -> SourceTree:
    session, timeout = index.session(), index.settings.timeout
    if distribution.kind == "wheel":
        return RemoteWheel(distribution.url, label, session, timeout)

    def download() -> IO[bytes]:
        response = session.get(distribution.url, stream=True, timeout=timeout)
        response.raise_for_status()
        if int(response.headers.get("Content-Length", 0)) > _MAX_SDIST:
            raise SourceError(label, f"an archive up to {_MAX_SDIST} bytes", "a larger one", "no such release is known")
        return cast("IO[bytes]", response.raw)

    return TarTree(download, label)


# One page of the index tells of every release: asked for once in a process, and kept for offline use.
_pages: dict[tuple[str, str], dict[str, list[Distribution]]] = {}
_lock = threading.Lock()
_indexes: dict[Settings, Index] = {}


def _index(settings: Settings) -> Index:
    return _indexes.setdefault(settings, Index(settings))


def _files(package: str, version: str, settings: Settings) -> dict[str, list[Distribution]]:
    store, name = Store(settings.cache), ("index", digest(settings.index.encode())[:12], package)
    with _lock:
        key = (settings.index, package)
        if key not in _pages:
            if settings.offline:
                kept = store.get(*name)
                if kept is None:
                    raise _offline(f"{package} {version}".strip(), settings)
                return {v: [Distribution(**d) for d in files] for v, files in kept.items()}
            _pages[key] = _index(settings).files(package)
            store.put({v: [d.as_dict() for d in files] for v, files in _pages[key].items()}, *name)
        return _pages[key]


def _offline(where: str, settings: Settings) -> SourceError:
    return SourceError(
        where, f"its sources in the cache ({settings.cache})", "not all of them are there, and offline mode is on",
        "run once without --offline (or SPECSHIM_OFFLINE), or name the right cache in SPECSHIM_CACHE",
    )  # fmt: skip


def _unreadable(where: str, error: Exception) -> SourceError:
    return SourceError(where, "a file of the archive", _reason(error), "try again; the archive may be damaged")


def _reason(error: Exception) -> str:
    return error.found if isinstance(error, SourceError) else f"{type(error).__name__}: {error}"
