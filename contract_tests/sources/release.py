"""A published release as a tree that fetches what is asked for and keeps it."""

from __future__ import annotations

import tarfile
import threading
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
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


def released(package: str, settings: Settings, final: bool = True) -> list[str]:
    """Versions of `package` on the index, oldest first; with `final`, without pre-releases.

    Raises:
        SourceError: the index does not answer; or offline and never asked before.
    """
    versions = _files(package, "", settings)
    return newest_first(versions, final)[::-1]


def open_release(package: str, version: str, settings: Settings) -> ReleaseTree:
    """The sources of one release.

    Raises:
        SourceError: the index has no such release, or none of its files can be read.
    """
    return ReleaseTree(package, version, settings)


def known_release(package: str, version: str, settings: Settings) -> ReleaseTree | None:
    """The sources of a release of which something was read before; None where nothing was. Asks nobody."""
    known = Store(settings.cache).get(*_name(package, version, settings))
    return ReleaseTree(package, version, settings) if known else None


def open_url(url: str, label: str, settings: Settings) -> SourceTree:
    """A wheel, read by ranges, or a source distribution at an address of its own.

    Raises:
        SourceError: it cannot be read; or offline, since only releases of the index are kept in the cache.
    """
    if settings.offline:
        wanted, found = "a file or a release in the cache", "an address, and offline mode is on"
        raise SourceError(label, wanted, found, "download the file and name it, or run without --offline")
    kind = "wheel" if label.endswith(".whl") else "sdist"
    with unreadable_as(label):
        return _tree(Distribution(label, url, kind), _index(settings), Store(settings.cache), label)


@contextmanager
def unreadable_as(where: str) -> Iterator[None]:
    """Turn what a damaged or foreign archive, or the network, ends in into one kind of error.

    Raises:
        SourceError: instead of it.
    """
    with explained(where):
        try:
            yield
        except _DAMAGED as error:
            if isinstance(error, requests.RequestException):
                raise
            raise _unreadable(where, error) from error


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
        self._name = _name(package, version, settings)
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
        missing = [path for path in self.paths().intersection(paths) if path not in self._known["read"]]
        if missing and not self.settings.offline:
            tree = self._open()
            if isinstance(tree, RemoteWheel):
                with unreadable_as(self.label):
                    tree.prefetch(missing)

    def read(self, path: str) -> bytes:
        sha256 = self._known["read"].get(path)
        kept = self._store.content(sha256) if sha256 else None
        if kept is not None:
            return kept
        with unreadable_as(f"{self.label}, {path}"):
            content = self._open().read(path)
        self._known["read"][path] = self._store.keep(content)
        self._changed = True
        return content

    def sha256(self, path: str) -> str:
        """Hash of a file that was read."""
        return str(self._known["read"][path])

    def known_hash(self, path: str) -> str:
        """See `HashedTree`."""
        return str(self._known["read"].get(path, ""))

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


def _name(package: str, version: str, settings: Settings) -> tuple[str, ...]:
    """Where the cache keeps what is known of a release.

    The index is part of it: another index may hold another build under the same version.
    """
    return "trees", digest(settings.index.encode())[:12], package, version


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
