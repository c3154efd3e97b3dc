"""One row as the bytes of a safetensors file, and back.

Tensors: ``hidden_states`` [T, L, H], ``token_ids`` int64 [T], ``loss_mask`` int64 [T] (where the
writer knows it). float8 rows hold ``hidden_states_float8`` and ``hidden_states_scale`` [T, L]
instead: a reader that knows nothing of scales then finds no states, where it would find wrong ones.
The header is one JSON text under the key ``specshim``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from pipeline.formats import DamagedRow, StateRow, Wanted, float8
from pipeline.formats.checking import Outline, check_outline
from pipeline.formats.content import sealed_header, unsealed_header
from shims.direct.rowfile import write_tensors

STATES, FLOAT8, SCALE, IDS, MASK = (
    "hidden_states", "hidden_states_float8", "hidden_states_scale", "token_ids", "loss_mask",
)  # fmt: skip
_HEADER = "specshim"
_LARGE = 1 << 20
"""Bytes; hashing as many takes longer than starting a thread that does it while they are written."""
_DTYPES = {"F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16", "F8_E4M3": float8.NAME}


def encode(row: StateRow, header: Mapping[str, str]) -> bytes:
    """The file of a row.

    Args:
        header: strings stored beside the row's id; equal rows with equal headers are equal bytes.
    """
    from safetensors.torch import save

    tensors, metadata = parts(row, header)
    content: bytes = save(tensors, metadata=metadata)
    return content


def parts(row: StateRow, header: Mapping[str, str]) -> tuple[dict[str, Any], dict[str, str]]:
    """What the file of a row holds: (tensors, the file's own metadata)."""
    return _tensors(row), _metadata(sealed_header(row, header))


def write(path: Path, row: StateRow, header: Mapping[str, str]) -> int:
    """Write the file of a row durably, in one step.

    Returns:
        Bytes written.
    """
    tensors = _tensors(row)
    if sum(tensor.nbytes for tensor in tensors.values()) < _LARGE:
        return write_tensors(path, tensors, _metadata(sealed_header(row, header)))
    with ThreadPoolExecutor(1) as beside:
        hashed = beside.submit(sealed_header, row, header)
        begun = _metadata(unsealed_header(row, header))
        return write_tensors(path, tensors, begun, lambda: _metadata(hashed.result()))


def _tensors(row: StateRow) -> dict[str, Any]:
    tensors = {(STATES if row.scale is None else FLOAT8): row.states, IDS: row.token_ids}
    if row.scale is not None:
        tensors[SCALE] = row.scale
    if row.loss_mask is not None:
        tensors[MASK] = row.loss_mask
    return {name: tensor.contiguous() for name, tensor in tensors.items()}


def _metadata(header: Mapping[str, str]) -> dict[str, str]:
    # One entry, because the writer puts several in random order.
    return {_HEADER: json.dumps(header, sort_keys=True)}


def check(file: Any, wanted: Wanted) -> int:
    """Check an opened row; its states are read only where ``wanted.content`` asks for them.

    Returns:
        T, the row's tokens.

    Raises:
        DamagedRow: foreign, or of another shape.
    """
    names = set(file.keys())
    packed = FLOAT8 in names
    if names - {MASK} != ({FLOAT8, SCALE, IDS} if packed else {STATES, IDS}):
        raise DamagedRow(f"tensors {sorted(names)}")
    part = file.get_slice(FLOAT8 if packed else STATES)
    shape, dtype = list(part.get_shape()), _DTYPES.get(part.get_dtype(), part.get_dtype())
    if dtype not in _DTYPES.values() or packed != (dtype == float8.NAME):
        raise DamagedRow(f"{FLOAT8 if packed else STATES} of type {dtype}")
    for name, kind, form in ((IDS, "I64", shape[:1]), (MASK, "I64", shape[:1]), (SCALE, "F32", shape[:2])):
        if name in names:
            found = file.get_slice(name)
            if found.get_dtype() != kind or list(found.get_shape()) != form:
                raise DamagedRow(f"{name} {found.get_dtype()}{list(found.get_shape())}, not {kind}{form}")

    def numbers(name: str) -> list[int]:
        values: list[int] = file.get_tensor(name).tolist()
        return values

    outline = Outline(
        shape=shape,
        dtype=dtype,
        header=header_of(file),
        token_ids=lambda: numbers(IDS),
        loss_mask=lambda: numbers(MASK) if MASK in names else None,
        whole=lambda: decode(file),
    )
    return check_outline(outline, wanted)


def decode(file: Any) -> StateRow:
    """Read an opened row whole, states as stored.

    Raises:
        DamagedRow: it is no row.
    """
    names = set(file.keys())
    header = header_of(file)
    try:
        return StateRow(
            states=file.get_tensor(FLOAT8 if FLOAT8 in names else STATES),
            token_ids=file.get_tensor(IDS),
            loss_mask=file.get_tensor(MASK) if MASK in names else None,
            row_id=str(header.get("row_id", "")),
            scale=file.get_tensor(SCALE) if FLOAT8 in names else None,
            header=header,
        )
    except Exception as error:
        raise DamagedRow(f"{type(error).__name__}: {error}") from error


def tokens(file: Any) -> tuple[list[int], list[int] | None]:
    """Token ids and loss mask of an opened row, without its states.

    Raises:
        DamagedRow: it is no row.
    """
    names = set(file.keys())
    try:
        return file.get_tensor(IDS).tolist(), file.get_tensor(MASK).tolist() if MASK in names else None
    except Exception as error:
        raise DamagedRow(f"{type(error).__name__}: {error}") from error


def opened(path: Path) -> Any:
    """Open a row's file; nothing but the header is read.

    Raises:
        DamagedRow: truncated, or no safetensors file.
        FileNotFoundError: there is no such file.
    """
    from safetensors import safe_open

    try:
        return safe_open(path, framework="pt")
    except FileNotFoundError:
        raise
    except Exception as error:
        raise DamagedRow(f"{type(error).__name__}: {error}") from error


def header_of(file: Any) -> dict[str, str]:
    """What the row says of itself; empty in a file of other writers.

    Raises:
        DamagedRow: the entry cannot be read.
    """
    try:
        content = json.loads((file.metadata() or {}).get(_HEADER, "{}"))
    except (ValueError, RecursionError) as error:
        raise DamagedRow(f"metadata: {error}") from error
    return content if isinstance(content, dict) else {}
