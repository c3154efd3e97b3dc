"""``shards/rows-{first}-{last}.tar``: many rows a file, so that ten million rows need no ten million files.

Each member ``hs_{i}.safetensors`` is what `hs_safetensors` writes as a file of its own; any tar program
unpacks them. A shard is filled under the name ``.tar.part`` by appending, and gets its name when it
holds all its rows. What a kill leaves behind the last whole member of a part is cut off. A shard in
which a row has to be replaced becomes a part again, without that row.
"""

from __future__ import annotations

import contextlib
import os
import re
import tarfile
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import IO

from pipeline.atomic import replacing, sync_folder
from pipeline.formats import DamagedRow, StateRow, Wanted, float8, safetensors_row
from pipeline.formats.safetensors_view import View
from pipeline.formats.stores import Claim
from shims.errors import UsageError

FOLDER = "shards"
ROWS_PER_FILE = 1000
_BLOCK = 512
_PART = ".part"
_NAME = re.compile(r"rows-(\d+)-(\d+)\.tar(?:\.part)?")
_MEMBER = re.compile(r"hs_(\d+)\.safetensors")
_DISTRUSTED = 64
"""Members at a part's end whose content is read when it is opened again: they may not have been durable."""

_OPEN_PARTS = 32
"""Parts held open at once: a worker that writes for another process names none, and has thousands."""

Extents = dict[int, tuple[int, int]]
"""Row -> (offset, size) of its safetensors file inside the shard."""


def scan(path: Path) -> tuple[Extents, int, int]:
    """Find the members of a shard.

    Returns:
        Where each row's last member lies, how many members there are, and where the last whole one ends.

    Raises:
        FileNotFoundError: there is no such shard.
    """
    extents: Extents = {}
    members = end = 0
    size = path.stat().st_size
    with path.open("rb") as handle:
        while end + _BLOCK <= size:
            handle.seek(end)
            try:
                info = tarfile.TarInfo.frombuf(handle.read(_BLOCK), "utf-8", "strict")
            except tarfile.HeaderError:
                break
            name = _MEMBER.fullmatch(info.name)
            after = end + _BLOCK + _padded(info.size)
            if name is None or info.size < 0 or after > size:
                break
            extents[int(name[1])] = (end + _BLOCK, info.size)
            members, end = members + 1, after
    return extents, members, end


class ShardStore:
    """Rows in tar shards of ``rows_per_file`` rows each."""

    def __init__(self, folder: Path, rows_per_file: int = ROWS_PER_FILE) -> None:
        """Rows below ``folder``; a folder that has shards already keeps their size.

        Raises:
            UsageError: they have several.
        """
        self._folder = folder / FOLDER
        self._rows_per_file = _size_in_use(self._folder) or rows_per_file
        self._parts: dict[int, _Part] = {}
        self._scans: dict[Path, tuple[tuple[int, int], Extents]] = {}
        self._claim: Claim | None = None

    @property
    def rows_per_file(self) -> int:
        """Rows that a shard holds; the last one may hold fewer."""
        return self._rows_per_file

    def locate(self, index: int) -> Path:
        """The shard of the row: the part being filled where there is one."""
        path = self._shard(index // self._rows_per_file)
        part = path.with_name(path.name + _PART)
        # Both exist only while a shard is becoming a part again, and then the part holds all that is good.
        return part if part.exists() or not path.exists() else path

    def check(self, index: int, wanted: Wanted) -> int:
        """See :class:`pipeline.formats.stores.RowStore`."""
        path, (offset, size) = self._find(index)
        with path.open("rb") as handle:
            return safetensors_row.check(View(handle, offset, size), wanted)

    def read(self, index: int) -> StateRow:
        """See :class:`pipeline.formats.stores.RowStore`."""
        return float8.dense(self.read_stored(index))

    def read_stored(self, index: int) -> StateRow:
        """See :class:`pipeline.formats.stores.RowStore`."""
        path, (offset, size) = self._find(index)
        with path.open("rb") as handle:
            return safetensors_row.decode(View(handle, offset, size))

    def tokens(self, index: int) -> tuple[list[int], list[int] | None]:
        """See :class:`pipeline.formats.stores.RowStore`."""
        path, (offset, size) = self._find(index)
        with path.open("rb") as handle:
            return safetensors_row.tokens(View(handle, offset, size))

    def indices(self) -> list[int]:
        """See :class:`pipeline.formats.stores.RowStore`."""
        # A shard holds the rows of its name, so those of all shards come out in order.
        shards = (self._extents(self.locate(number * self._rows_per_file)) for number in _shards(self._folder))
        return [index for extents in shards for index in sorted(extents)]

    def begin(self, claim: Claim) -> None:
        """See :class:`pipeline.formats.stores.RowStore`; shards that others have filled get their name."""
        self._folder.mkdir(parents=True, exist_ok=True)
        self._claim = claim
        for number in _shards(self._folder):
            first = number * self._rows_per_file
            if claim.owns(first) and self.locate(first).name.endswith(_PART):
                self._part(number)
                self._seal_if_full(number)

    def write(self, index: int, row: StateRow, header: Mapping[str, str]) -> int:
        """See :class:`pipeline.formats.stores.RowStore`."""
        content = safetensors_row.encode(row, header)
        self._part(index // self._rows_per_file).append(index, content)
        return len(content)

    def sync(self) -> None:
        """See :class:`pipeline.formats.stores.RowStore`; shards that are full get their name."""
        for part in self._parts.values():
            part.sync()
        self._seal()

    def close(self) -> None:
        """See :class:`pipeline.formats.stores.RowStore`."""
        try:
            self.sync()
        finally:
            for part in self._parts.values():
                part.close()
            self._parts.clear()

    def _seal(self) -> None:
        for number in list(self._parts):
            self._seal_if_full(number)

    def _seal_if_full(self, number: int) -> None:
        # Whoever writes for another process (a worker of an engine) knows not how many rows there are.
        if self._claim is None:
            return
        first = number * self._rows_per_file
        rows = set(range(first, min(first + self._rows_per_file, self._claim.total)))
        if rows - self._parts[number].extents.keys() <= self._claim.absent:
            self._parts[number].seal(self._shard(number))
            del self._parts[number]

    def _let_go_of_oldest(self) -> None:
        number = next(iter(self._parts))
        self._parts[number].sync()
        self._seal_if_full(number)
        if number in self._parts:
            self._parts.pop(number).close()

    def _part(self, number: int) -> _Part:
        if number not in self._parts:
            path = self._shard(number)
            part = path.with_name(path.name + _PART)
            if path.exists():
                if not part.exists():
                    _copy(path, part, _good(path))
                path.unlink()
            if len(self._parts) >= _OPEN_PARTS:
                self._let_go_of_oldest()
            self._parts[number] = _Part(part)
        return self._parts[number]

    def _shard(self, number: int) -> Path:
        first = number * self._rows_per_file
        return self._folder / f"rows-{first:09d}-{first + self._rows_per_file - 1:09d}.tar"

    def _find(self, index: int) -> tuple[Path, tuple[int, int]]:
        path = self.locate(index)
        extent = self._extents(path).get(index)
        if extent is None:
            raise FileNotFoundError(f"{path}: no row {index}")
        return path, extent

    def _extents(self, path: Path) -> Extents:
        """Where the rows of a shard lie; scanned again when the file has changed."""
        open_part = next((part for part in self._parts.values() if part.path == path), None)
        if open_part is not None:
            open_part.flush()
            return open_part.extents
        state = path.stat()
        key = (state.st_size, state.st_mtime_ns)
        if path not in self._scans or self._scans[path][0] != key:
            if len(self._scans) > 256:
                self._scans.clear()
            self._scans[path] = (key, scan(path)[0])
        return self._scans[path][1]


class _Part:
    """A shard that is being filled."""

    def __init__(self, path: Path) -> None:
        """Go on with the part at ``path``, or begin one."""
        self.path = path
        self.extents: Extents = {}
        self._members = self._end = 0
        if path.exists():
            self.extents, self._members, self._end = scan(path)
            os.truncate(path, self._end)
            self._drop_unsound_tail()
        self._handle: IO[bytes] = path.open("r+b" if path.exists() else "w+b")
        self._handle.seek(self._end)

    def _drop_unsound_tail(self) -> None:
        latest = sorted(self.extents, key=lambda index: self.extents[index])[-_DISTRUSTED:]
        for index in set(latest) - _sound(self.path, {index: self.extents[index] for index in latest}).keys():
            del self.extents[index]

    def append(self, index: int, content: bytes) -> None:
        """Add one member; a row that is there already is replaced."""
        info = tarfile.TarInfo(f"hs_{index}.safetensors")
        info.size = len(content)
        try:
            self._handle.write(info.tobuf(tarfile.GNU_FORMAT))
            self._handle.write(content)
            self._handle.write(b"\0" * (_padded(len(content)) - len(content)))
            self._handle.flush()
        except OSError as error:
            error.filename = error.filename or str(self.path)
            self._take_back()
            raise
        self.extents[index] = (self._end + _BLOCK, len(content))
        self._end += _BLOCK + _padded(len(content))
        self._members += 1

    def _take_back(self) -> None:
        """A member that did not fit is cut off again, so that what is there can be read and closed."""
        with contextlib.suppress(OSError):
            self._handle.close()
        os.truncate(self.path, self._end)
        self._handle = self.path.open("r+b")
        self._handle.seek(self._end)

    def flush(self) -> None:
        """Let readers of the file see what was appended."""
        self._handle.flush()

    def sync(self) -> None:
        """Make what was appended durable."""
        self._handle.flush()
        os.fsync(self._handle.fileno())
        sync_folder(self.path.parent)

    def seal(self, target: Path) -> None:
        """End the part and give it its name; members that were replaced are left out."""
        self._handle.write(b"\0" * 2 * _BLOCK)
        self.sync()
        self.close()
        if self._members > len(self.extents):
            _copy(self.path, target, self.extents)
            self.path.unlink()
        else:
            self.path.replace(target)
        sync_folder(target.parent)

    def close(self) -> None:
        """Let go of the file."""
        self._handle.close()


def _copy(source: Path, target: Path, extents: Extents) -> None:
    """Write a shard anew with these members of another one, in the order of their rows."""
    with source.open("rb") as reading, replacing(target, "wb") as writing:
        for index in sorted(extents):
            offset, size = extents[index]
            reading.seek(offset - _BLOCK)
            writing.write(reading.read(_BLOCK + _padded(size)))  # type: ignore[arg-type]
        writing.write(b"\0" * 2 * _BLOCK)  # type: ignore[arg-type]


def _good(path: Path) -> Extents:
    return _sound(path, scan(path)[0])


def _sound(path: Path, extents: Extents) -> Extents:
    """Those members whose content is what their writer hashed."""
    sound: Extents = {}
    with path.open("rb") as handle:
        for index, (offset, size) in extents.items():
            try:
                safetensors_row.check(View(handle, offset, size), Wanted(content=True))
            except DamagedRow:
                continue
            sound[index] = (offset, size)
    return sound


def _padded(size: int) -> int:
    return -(-size // _BLOCK) * _BLOCK


def _shards(folder: Path) -> list[int]:
    """Numbers of the shards that exist, whole or in part."""
    spans = _spans(folder)
    return sorted({first // (last - first + 1) for first, last in spans})


def _spans(folder: Path) -> Collection[tuple[int, int]]:
    names = (_NAME.fullmatch(path.name) for path in folder.glob("rows-*.tar*"))
    return {(int(name[1]), int(name[2])) for name in names if name and int(name[2]) >= int(name[1])}


def _size_in_use(folder: Path) -> int | None:
    sizes = sorted({last - first + 1 for first, last in _spans(folder)})
    if len(sizes) > 1:
        raise UsageError(
            str(folder),
            "shards of one size",
            f"some of {' and some of '.join(map(str, sizes))} rows, by their names",
            "move those away that belong to another data set",
        )
    return sizes[0] if sizes else None
