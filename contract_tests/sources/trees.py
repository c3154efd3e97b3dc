"""A release as a tree of files: which files it has, and the content of some of them.

Trees of archives and folders; add another kind of place here, nothing else.
"""

from __future__ import annotations

import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import IO, Protocol

from shims.errors import SpecshimError

# No source file of the packages read here comes near these; a file that does is not what it claims to be.
MAX_FILE = 8 * 1024 * 1024
MAX_FILES = 200_000


class SourceError(SpecshimError):
    """Sources could not be read: nothing may be concluded from that."""


class SourceTree(Protocol):
    """What the readers need of a place that holds a release."""

    @property
    def label(self) -> str:
        """What the tree is, for messages: `vllm 0.33.0`."""

    def paths(self) -> frozenset[str]:
        """Every path of the release that matters here, with `/` between its parts."""

    def read(self, path: str) -> bytes:
        """The content of one of `paths()`.

        Raises:
            SourceError: it cannot be read.
        """


def relevant(path: str) -> bool:
    """Whether a path may hold a module, or what the release says about itself."""
    return path.endswith((".py", ".so", ".pyd", ".pyi", ".dist-info/METADATA"))


class FolderTree:
    """A folder that holds packages: a checkout, or an unpacked archive."""

    def __init__(self, folder: Path, label: str = "") -> None:
        self.folder, self.label = folder, label or str(folder)
        self._paths: frozenset[str] | None = None

    def paths(self) -> frozenset[str]:
        if self._paths is None:
            found = (p.relative_to(self.folder).as_posix() for p in self.folder.rglob("*") if p.is_file())
            self._paths = frozenset(path for path in found if relevant(path))
        return self._paths

    def read(self, path: str) -> bytes:
        with (self.folder / path).open("rb") as file:
            return bounded(file, f"{self.label}, {path}")


class ZipTree:
    """A wheel: a local file, or one read by ranges.

    Args:
        archive: opened; must stay open while the tree is read.
        label: for messages.
    """

    def __init__(self, archive: zipfile.ZipFile, label: str) -> None:
        self.archive, self.label = archive, label
        names = archive.namelist()
        if len(names) > MAX_FILES:
            raise too_large(label, f"{len(names)} files")
        self._paths = frozenset(name for name in names if relevant(name))

    def paths(self) -> frozenset[str]:
        return self._paths

    def read(self, path: str) -> bytes:
        if self.archive.getinfo(path).file_size > MAX_FILE:
            raise too_large(f"{self.label}, {path}", f"{self.archive.getinfo(path).file_size} bytes")
        with self.archive.open(path) as file:
            return bounded(file, f"{self.label}, {path}")


class TarTree:
    """A source distribution; its own top folder, and a `src` folder in it, are not part of the paths.

    Args:
        open_file: opens the compressed archive from its beginning.
        label: for messages.
    """

    def __init__(self, open_file: Callable[[], IO[bytes]], label: str) -> None:
        self.label = label
        self._contents: dict[str, bytes] = {}
        with open_file() as file, tarfile.open(fileobj=file, mode="r|gz") as archive:
            for count, member in enumerate(archive):
                if count > MAX_FILES:
                    raise too_large(label, f"more than {MAX_FILES} files")
                path = member.name.partition("/")[2].removeprefix("src/")
                content = archive.extractfile(member) if member.isfile() and relevant(path) else None
                if content is not None:
                    self._contents[path] = bounded(content, f"{label}, {path}")

    def paths(self) -> frozenset[str]:
        return frozenset(self._contents)

    def read(self, path: str) -> bytes:
        return self._contents[path]


def bounded(file: IO[bytes], where: str) -> bytes:
    """The content of `file`.

    Raises:
        SourceError: it is larger than a source file can be.
    """
    content = file.read(MAX_FILE + 1)
    if len(content) > MAX_FILE:
        raise too_large(where, f"more than {MAX_FILE} bytes")
    return content


def too_large(where: str, found: str) -> SourceError:
    return SourceError(where, f"files up to {MAX_FILE} bytes", found, "this is no release of a Python package")
