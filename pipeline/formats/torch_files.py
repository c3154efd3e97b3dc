"""``torch.save`` files, written and read without a stranger's pickle ever running."""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pipeline.formats import DamagedRow

_PIECE = 1 << 24


def to_bytes(content: Any) -> bytes:
    """What ``torch.save`` writes; equal contents are equal bytes."""
    import torch

    # Into memory: saved to a path, the file would hold that path's name.
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


def load(path: Path) -> Any:
    """Read such a file, tensors lazily. It may hold tensors, texts, numbers, lists and dictionaries, nothing else.

    Raises:
        DamagedRow: unreadable, or made of something that would have to be run to be read.
        FileNotFoundError: there is no such file.
    """
    import torch

    # mmap needs the zip container that torch.save writes since 1.6; the older form is a bare pickle.
    return _told(lambda: torch.load(path, map_location="cpu", weights_only=True, mmap=True))


def load_bytes(content: bytes) -> Any:
    """The same, from memory."""
    import torch

    return _told(lambda: torch.load(io.BytesIO(content), map_location="cpu", weights_only=True))


def unzipped(path: Path, limit: int) -> bytes:
    """The content of a gzip file.

    Args:
        limit: bytes that it may have; more is taken for a bomb.

    Raises:
        DamagedRow: truncated, damaged, no gzip file, or larger than ``limit``.
        FileNotFoundError: there is no such file.
    """
    try:
        content = bytearray()
        with gzip.open(path, "rb") as handle:
            # In pieces: asked for everything, the library reserves all that it may become.
            while len(content) <= limit and (piece := handle.read(_PIECE)):
                content += piece
    except (OSError, EOFError, zlib.error) as error:
        if isinstance(error, FileNotFoundError):
            raise
        raise DamagedRow(f"{type(error).__name__}: {error}") from error
    if len(content) > limit:
        raise DamagedRow(f"more than {limit} bytes in a file of {path.stat().st_size}")
    return bytes(content)


def _told(read: Callable[[], Any]) -> Any:
    try:
        return read()
    except FileNotFoundError:
        raise
    except Exception as error:
        # torch explains at length how to switch its protection off; the first sentence says what is wrong.
        text = " ".join(str(error).split())
        refused = "weights_only" in text or "Unsupported" in text
        reason = "it holds more than tensors, texts and numbers, and is not run" if refused else text[:200]
        raise DamagedRow(f"{type(error).__name__}: {reason}") from error
