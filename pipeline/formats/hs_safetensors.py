"""``hidden_states/hs_{i}.safetensors``: one file a row, as speculators 0.5 and later name them.

Tensors: ``hidden_states`` [T, L, H], ``token_ids`` int64 [T], ``loss_mask`` int64 [T]. The
file's own metadata repeats whose row it is, so that a file copied from elsewhere is noticed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeline.atomic import write_bytes
from pipeline.formats import DamagedRow, StateRow

FOLDER = "hidden_states"
_HEADER = "specshim"
_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


def row_path(folder: Path, index: int) -> Path:
    """The file of row ``index``."""
    return folder / FOLDER / f"hs_{index}.safetensors"


def write_row(path: Path, row: StateRow, metadata: Mapping[str, str]) -> int:
    """Write one row durably, in one step.

    Args:
        metadata: strings stored in the file's header beside the row id.

    Returns:
        Bytes written.
    """
    from safetensors.torch import save

    tensors = {
        "hidden_states": row.states.contiguous(),
        "token_ids": row.token_ids.contiguous(),
        "loss_mask": row.loss_mask.contiguous(),
    }
    # One entry, because the writer puts several in random order and equal rows should be equal files.
    content = save(tensors, metadata={_HEADER: json.dumps({**metadata, "row_id": row.row_id}, sort_keys=True)})
    write_bytes(path, content)
    return len(content)


def check_row(
    path: Path,
    *,
    num_layers: int,
    hidden_size: int,
    dtype: str | None = None,
    metadata: Mapping[str, str] | None = None,
    token_ids: Sequence[int] | None = None,
    loss_mask: Sequence[int] | None = None,
) -> int:
    """Check a file's structure without reading its states.

    Args:
        num_layers: L, the states per token.
        hidden_size: H.
        dtype: as in ``float32``; None accepts any.
        metadata: header strings that must be there.
        token_ids: the ids the row must have; None skips the comparison.
        loss_mask: the mask it must have; None skips the comparison.

    Returns:
        T, the row's tokens.

    Raises:
        DamagedRow: truncated, foreign, or of another shape.
        FileNotFoundError: there is no such file.
    """
    with _opened(path) as file:
        header = _header(file)
        for key, value in (metadata or {}).items():
            if header.get(key) != value:
                raise DamagedRow(f"metadata {key} is {header.get(key)!r}, not {value!r}")
        names = set(file.keys())
        if names != {"hidden_states", "token_ids", "loss_mask"}:
            raise DamagedRow(f"tensors {sorted(names)}")
        states = file.get_slice("hidden_states")
        shape = list(states.get_shape())
        if len(shape) != 3 or shape[1:] != [num_layers, hidden_size] or shape[0] < 1:
            raise DamagedRow(f"hidden_states {shape}, not [T, {num_layers}, {hidden_size}]")
        found = _DTYPES.get(states.get_dtype(), states.get_dtype())
        if dtype is not None and found != dtype:
            raise DamagedRow(f"hidden_states {found}, not {dtype}")
        for name in ("token_ids", "loss_mask"):
            part = file.get_slice(name)
            if part.get_dtype() != "I64" or list(part.get_shape()) != shape[:1]:
                raise DamagedRow(f"{name} {part.get_dtype()}{list(part.get_shape())}, not int64[{shape[0]}]")
        if token_ids is not None and file.get_tensor("token_ids").tolist() != list(token_ids):
            raise DamagedRow("other token ids than the prepared row")
        if loss_mask is not None and file.get_tensor("loss_mask").tolist() != list(loss_mask):
            raise DamagedRow("another loss mask than the prepared row")
        return int(shape[0])


def read_row(path: Path) -> StateRow:
    """Read one row whole.

    Raises:
        DamagedRow: the file cannot be read as a row.
        FileNotFoundError: there is no such file.
    """
    with _opened(path, framework="pt") as file:
        try:
            return StateRow(
                states=file.get_tensor("hidden_states"),
                token_ids=file.get_tensor("token_ids"),
                loss_mask=file.get_tensor("loss_mask"),
                row_id=str(_header(file).get("row_id", "")),
            )
        except DamagedRow:
            raise
        except Exception as error:
            raise DamagedRow(f"{type(error).__name__}: {error}") from error


def read_mask(path: Path) -> Any:
    """A row's loss mask alone: numpy int64 [T].

    Raises:
        DamagedRow: the file cannot be read as a row.
        FileNotFoundError: there is no such file.
    """
    with _opened(path) as file:
        return file.get_tensor("loss_mask")


def _opened(path: Path, framework: str = "numpy") -> Any:
    from safetensors import safe_open

    try:
        return safe_open(path, framework=framework)
    except FileNotFoundError:
        raise
    except Exception as error:
        raise DamagedRow(f"{type(error).__name__}: {error}") from error


def _header(file: Any) -> dict[str, Any]:
    try:
        content = json.loads((file.metadata() or {}).get(_HEADER, "{}"))
    except ValueError as error:
        raise DamagedRow(f"metadata: {error}") from error
    return content if isinstance(content, dict) else {}


def row_indices(folder: Path) -> list[int]:
    """Indices of the rows that have a file, ascending."""
    found = []
    for path in (folder / FOLDER).glob("hs_*.safetensors"):
        number = path.stem.removeprefix("hs_")
        if number.isdecimal():
            found.append(int(number))
    return sorted(found)
