"""A release as a tree of files: which files it has, and the content of some of them.

Trees of archives and folders; add another kind of place here, nothing else.
"""

from __future__ import annotations

import gzip
import os
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Protocol, runtime_checkable

from shims.errors import SpecshimError

# No source file of the packages read here comes near these; a file that does is not what it claims to be.
MAX_FILE = 8 * 1024 * 1024
MAX_FILES = 200_000
# The list of files at the end of a wheel; vLLM's is about 1 MB.
MAX_DIRECTORY = 64 * 1024 * 1024
# What a source distribution unpacks to, all files together; vLLM's is about 150 MB.
MAX_UNPACKED = 512 * 1024 * 1024


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


@runtime_checkable
class HashedTree(Protocol):
    """A tree that knows the hashes of some contents without reading them again."""

    def known_hash(self, path: str) -> str:
        """The hash of a file that was read before, '' of one that was not."""


# Where a source distribution or a checkout says what it asks for; `.dist-info/METADATA` of a wheel aside.
METADATA_FILES = frozenset(("PKG-INFO", "requirements/common.txt", "requirements/cuda.txt"))


# Folders of a project that hold no source of its own.
_NO_SOURCES = frozenset(("__pycache__", "build", "dist", "node_modules", "site-packages", "venv"))


def relevant(path: str) -> bool:
    """Whether a path may hold a module, or what the release says about itself."""
    return path.endswith((".py", ".so", ".pyd", ".pyi", ".dist-info/METADATA")) or path in METADATA_FILES


class FolderTree:
    """A folder that holds packages: a checkout, or an unpacked archive.

    Args:
        folder: its place.
        label: for messages.
        package: the one package to look at, '' for all.
        confined: whether links that lead out of the folder are left out.
    """

    def __init__(self, folder: Path, label: str = "", package: str = "", confined: bool = False) -> None:
        self.folder, self.label, self.package = folder, label or str(folder), package
        self.confined = confined
        self._paths: frozenset[str] | None = None

    def paths(self) -> frozenset[str]:
        if self._paths is None:
            found = {path.relative_to(self.folder).as_posix() for path in self._walk()}
            found |= {name for name in METADATA_FILES if (self.folder / name).is_file()}
            self._paths = frozenset(found)
        return self._paths

    def _walk(self) -> Iterator[Path]:
        start = self.folder / self.package if self.package else self.folder
        count = 0
        for folder, inner, files in os.walk(start):
            count += len(files) + 1
            if count > MAX_FILES:
                raise too_large(self.label, f"more than {MAX_FILES} files")
            inner[:] = [name for name in inner if name not in _NO_SOURCES and not name.startswith(".")]
            for path in (Path(folder, name) for name in files if relevant(f"{folder}/{name}")):
                if path.is_file() and self._inside(path):
                    yield path

    def read(self, path: str) -> bytes:
        with (self.folder / path).open("rb") as file:
            return bounded(file, f"{self.label}, {path}")

    def _inside(self, path: Path) -> bool:
        return not self.confined or not path.is_symlink() or path.resolve().is_relative_to(self.folder.resolve())


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
        with open_file() as file, _Unpacked(file, label) as plain, tarfile.open(fileobj=plain, mode="r:") as archive:
            for count, member in enumerate(archive):
                if count > MAX_FILES:
                    raise too_large(label, f"more than {MAX_FILES} files")
                path = member.name.partition("/")[2].removeprefix("src/")
                content = archive.extractfile(member) if member.isfile() and relevant(path) else None
                if content is not None:
                    self._contents[path] = bounded(content, f"{label}, {path}")
            while plain.read(1 << 16):  # to the end, where the checksum is: the archive may be cut off
                pass

    def paths(self) -> frozenset[str]:
        return frozenset(self._contents)

    def read(self, path: str) -> bytes:
        return self._contents[path]


class _Unpacked(gzip.GzipFile):
    """A compressed stream that refuses to become larger than a source distribution can be.

    The limit on one read is for headers: tarfile takes those whole, whatever size they claim.
    """

    def __init__(self, file: IO[bytes], label: str) -> None:
        super().__init__(fileobj=file, mode="rb")
        self._label = label

    def read(self, size: int | None = -1) -> bytes:
        if size is None or not 0 <= size <= MAX_FILE + 1:
            raise too_large(self._label, f"a part of {size} bytes")
        if self.tell() > MAX_UNPACKED:
            raise too_large(self._label, f"more than {MAX_UNPACKED} bytes, unpacked")
        return super().read(size)

    def seek(self, offset: int, whence: int = 0) -> int:
        if offset > MAX_UNPACKED:
            raise too_large(self._label, f"more than {MAX_UNPACKED} bytes, unpacked")
        return super().seek(offset, whence)


def open_zip(file: IO[bytes], label: str) -> zipfile.ZipFile:
    """A local zip archive whose list of files is of a size that can be read.

    Raises:
        SourceError: the list is too large.
        zipfile.BadZipFile: it is no zip archive.
    """
    end = file.seek(0, 2)
    tail = file.seek(max(0, end - 65_557))  # the record at the end, and the longest comment after it
    record = file.read()
    at = record.rfind(b"PK\x05\x06")
    if at >= 0:
        size = int.from_bytes(record[at + 12 : at + 16], "little")
        # 0xFFFFFFFF: the size stands elsewhere; then all that lies before the record bounds it.
        size = tail + at if size == 0xFFFFFFFF else size
        if size > MAX_DIRECTORY:
            raise too_large(label, f"a list of files of {size} bytes")
    return zipfile.ZipFile(file)


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
