"""``hidden_states/hs_{i}.safetensors``: one file a row, as speculators 0.5 and later name them.

`safetensors_row` says what is in a file. It repeats whose row it is, so that a file copied from
elsewhere is noticed.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from pipeline.formats import StateRow, Wanted, float8, safetensors_row
from shims.direct.rowfile import to_bytes

FOLDER = "hidden_states"


def relative_path(index: int) -> Path:
    """Where row ``index`` lies in the folder."""
    return Path(FOLDER) / f"hs_{index}.safetensors"


def row_path(folder: Path, index: int) -> Path:
    """The file of row ``index``."""
    return folder / relative_path(index)


def write_row(path: Path, row: StateRow, metadata: Mapping[str, str]) -> int:
    """Write one row durably, in one step: temporary file, fsync, rename.

    Args:
        metadata: strings stored in the file's header beside the row's id and its content hash.

    Returns:
        Bytes written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    return safetensors_row.write(path, row, metadata)


def encode_row(row: StateRow, metadata: Mapping[str, str]) -> bytes:
    """The file of a row, for a place that is no disk; see :func:`write_row`."""
    return to_bytes(*safetensors_row.parts(row, metadata))


def check_file(path: Path, wanted: Wanted) -> int:
    """Check a file; its states are read only where ``wanted.content`` asks for them.

    Returns:
        T, the row's tokens.

    Raises:
        DamagedRow: truncated, foreign, or not what is wanted.
        FileNotFoundError: there is no such file.
    """
    with safetensors_row.opened(path) as file:
        return safetensors_row.check(file, wanted)


def read_row(path: Path) -> StateRow:
    """Read one row whole; float8 states come back as bfloat16.

    Raises:
        DamagedRow: the file cannot be read as a row.
        FileNotFoundError: there is no such file.
    """
    return float8.dense(read_stored(path))


def read_stored(path: Path) -> StateRow:
    """Read one row whole, states as stored.

    Raises:
        DamagedRow: the file cannot be read as a row.
        FileNotFoundError: there is no such file.
    """
    with safetensors_row.opened(path) as file:
        return safetensors_row.decode(file)


def read_tokens(path: Path) -> tuple[list[int], list[int] | None]:
    """A row's token ids and loss mask alone.

    Raises:
        DamagedRow: the file cannot be read as a row.
        FileNotFoundError: there is no such file.
    """
    with safetensors_row.opened(path) as file:
        return safetensors_row.tokens(file)
