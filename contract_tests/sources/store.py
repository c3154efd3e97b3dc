"""The cache on disk: JSON documents by name, file contents by hash. Safe for several processes at once."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


class Store:
    """A folder of JSON documents and of contents named by their hash.

    Args:
        folder: created when something is first put into it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def get(self, *name: str) -> Any:
        """The document, or None where there is none (a damaged one counts as none)."""
        try:
            return json.loads(self._path(name).read_bytes())
        except (FileNotFoundError, ValueError):
            return None

    def put(self, document: Any, *name: str) -> None:
        _write(self._path(name), json.dumps(document, separators=(",", ":")).encode())

    def content(self, sha256: str) -> bytes | None:
        """The content with this hash, or None; content that no longer has it counts as none."""
        try:
            found = (self.folder / "contents" / sha256[:2] / sha256).read_bytes()
        except FileNotFoundError:
            return None
        return found if digest(found) == sha256 else None

    def keep(self, content: bytes) -> str:
        """Keep a content; returns its hash."""
        sha256 = digest(content)
        path = self.folder / "contents" / sha256[:2] / sha256
        if not path.exists():
            _write(path, content)
        return sha256

    def _path(self, name: tuple[str, ...]) -> Path:
        return self.folder.joinpath(*name[:-1], f"{name[-1]}.json")


def _write(path: Path, content: bytes) -> None:
    """Write by renaming, so that a reader sees the whole file or none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
