"""A safetensors file that lies inside another file.

The library opens whole files only; this reads one at an offset, and hands out single tensors like the
library's ``safe_open``. The layout is that of the format's own description: eight bytes with the length of
a JSON header, the header, the tensors (https://github.com/huggingface/safetensors#format).
"""

from __future__ import annotations

import json
import math
from typing import IO, Any

from pipeline.formats import DamagedRow

_MAX_HEADER = 100_000_000
_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "I64": 8}
_TORCH = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64"} | {
    "F8_E4M3": "float8_e4m3fn"
}


class View:
    """One file of ``size`` bytes at ``offset``; nothing but its header is read before a tensor is asked for."""

    def __init__(self, handle: IO[bytes], offset: int, size: int) -> None:
        """Read and check the header.

        Raises:
            DamagedRow: no such file there, or one cut off.
        """
        self._handle = handle
        handle.seek(offset)
        length = int.from_bytes(handle.read(8), "little") if size >= 8 else 0
        if not 2 <= length <= min(size - 8, _MAX_HEADER):
            raise DamagedRow(f"a header of {length} bytes in a file of {size}")
        try:
            header = json.loads(handle.read(length))
        except (ValueError, RecursionError) as error:
            raise DamagedRow(f"header: {type(error).__name__}: {error}") from error
        if not isinstance(header, dict):
            raise DamagedRow("header: not an object")
        metadata = header.pop("__metadata__", {})
        self._metadata = metadata if isinstance(metadata, dict) else {}
        self._start = offset + 8 + length
        self._entries = {str(name): _entry(name, entry) for name, entry in header.items()}
        self._check_extents(size - 8 - length)

    def _check_extents(self, available: int) -> None:
        """The tensors lie end to end and fill the file."""
        at = 0
        for name, (_, _, begin, end) in sorted(self._entries.items(), key=lambda item: item[1][2]):
            if begin != at:
                raise DamagedRow(f"{name} begins at {begin}, not {at}")
            at = end
        if at != available:
            raise DamagedRow(f"{available} bytes of tensors, the header says {at}")

    def keys(self) -> list[str]:
        """Names of the tensors."""
        return list(self._entries)

    def metadata(self) -> dict[str, Any]:
        """The header's free texts."""
        return self._metadata

    def get_slice(self, name: str) -> _Slice:
        """Shape and type of a tensor."""
        kind, shape, _, _ = self._entries[name]
        return _Slice(kind, shape)

    def get_tensor(self, name: str) -> Any:
        """Read one tensor.

        Raises:
            DamagedRow: the file has become shorter meanwhile.
        """
        import torch

        kind, shape, begin, end = self._entries[name]
        self._handle.seek(self._start + begin)
        content = bytearray(self._handle.read(end - begin))
        if len(content) != end - begin:
            raise DamagedRow(f"{name}: {len(content)} of {end - begin} bytes")
        dtype = getattr(torch, _TORCH[kind])
        return torch.frombuffer(content, dtype=dtype).reshape(shape) if content else torch.empty(shape, dtype=dtype)


class _Slice:
    def __init__(self, kind: str, shape: list[int]) -> None:
        self._kind, self._shape = kind, shape

    def get_dtype(self) -> str:
        """As in the header, e.g. ``BF16``."""
        return self._kind

    def get_shape(self) -> list[int]:
        """Sizes of its dimensions."""
        return list(self._shape)


def _entry(name: str, entry: Any) -> tuple[str, list[int], int, int]:
    """(type, shape, begin, end) of one tensor, checked against each other."""
    fields = entry if isinstance(entry, dict) else {}
    kind = fields.get("dtype")
    if not isinstance(kind, str) or kind not in _BYTES:
        raise DamagedRow(f"{name} of type {kind!r}")
    shape, offsets = _naturals(name, fields.get("shape")), _naturals(name, fields.get("data_offsets"))
    if len(offsets) != 2:
        raise DamagedRow(f"{name}: offsets {offsets!r}")
    if math.prod(shape) * _BYTES[kind] != offsets[1] - offsets[0]:
        raise DamagedRow(f"{name} {kind}{shape} in {offsets[1] - offsets[0]} bytes")
    return kind, shape, offsets[0], offsets[1]


def _naturals(name: str, values: Any) -> list[int]:
    if not isinstance(values, list) or not all(type(value) is int and value >= 0 for value in values):
        raise DamagedRow(f"{name}: {json.dumps(values)[:60]} where sizes should be")
    return values
