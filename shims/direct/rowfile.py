"""A safetensors file from tensors as they lie in memory: no copy, and the interpreter is free meanwhile.

The library's writer copies each tensor twice while it holds the interpreter, which a worker that
feeds a GPU notices. The layout is the library's own (https://github.com/huggingface/safetensors,
"Format"); files are equal to its, byte for byte.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

# In the name of a file that is not whole yet; what a killed run left is known by it.
TEMP_MARK = ".tmp-"

_NAMES = {
    "torch.float32": "F32",
    "torch.float16": "F16",
    "torch.bfloat16": "BF16",
    "torch.float8_e4m3fn": "F8_E4M3",
    "torch.int64": "I64",
    "torch.int32": "I32",
    "torch.uint8": "U8",
    "torch.bool": "BOOL",
}
# The library sorts by alignment, from the widest, as its list of dtypes has them.
_RANK = {name: rank for rank, name in enumerate(("I64", "F32", "I32", "BF16", "F16", "F8_E4M3", "U8", "BOOL"))}


def write_tensors(
    path: Path,
    tensors: Mapping[str, Any],
    metadata: Mapping[str, str] | None = None,
    final: Callable[[], Mapping[str, str]] | None = None,
) -> int:
    """Write a file durably, in one step: whole (on the disk, fsync) or absent.

    Args:
        path: its folder has to exist.
        tensors: CPU tensors, contiguous.
        metadata: strings for the header; with more than one, their order is the mapping's.
        final: asked once the tensors are written, for what goes into the header in place of `metadata`: as long.

    Returns:
        Bytes written.

    Raises:
        OSError: the disk refused; no file and no leftover stays.
        TypeError: a dtype that is not one of the table above, or a tensor that is not contiguous.
        ValueError: the final header is not as long as the one it replaces.
    """
    header, parts = _layout(tensors, metadata)
    buffers = [header, *parts]
    size = sum(len(buffer) for buffer in buffers)
    temp = temporary(path)
    try:
        handle = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        try:
            _write_all(handle, buffers)
            if final is not None:
                _replace_header(handle, header, _layout(tensors, final())[0])
            os.fsync(handle)
        finally:
            os.close(handle)
        temp.replace(path)
    except OSError as error:
        if error.filename is None:  # a failing write does not say of which file
            error.filename = str(path)
        raise
    finally:
        temp.unlink(missing_ok=True)
    return size


def to_bytes(tensors: Mapping[str, Any], metadata: Mapping[str, str] | None = None) -> bytes:
    """The same file in memory, where it does not go to a disk: each tensor is copied once.

    Raises:
        TypeError: as :func:`write_tensors`.
    """
    header, parts = _layout(tensors, metadata)
    return b"".join([header, *parts])


def temporary(path: Path) -> Path:
    """Where this process writes a file before it gets its name."""
    return path.with_name(f".{path.name}{TEMP_MARK}{os.getpid()}")


def _layout(tensors: Mapping[str, Any], metadata: Mapping[str, str] | None) -> tuple[bytes, list[memoryview]]:
    fields: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    parts, offset = [], 0
    for name in sorted(tensors, key=lambda n: (_RANK[_dtype(tensors[n])], n)):
        tensor = tensors[name]
        if not tensor.is_contiguous() or tensor.device.type != "cpu":
            raise TypeError(f"{name}: wanted a contiguous CPU tensor")
        length = tensor.numel() * tensor.element_size()
        fields[name] = {
            "dtype": _dtype(tensor),
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + length],
        }
        parts.append(_bytes(tensor))
        offset += length
    text = json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, parts


def _dtype(tensor: Any) -> str:
    name = _NAMES.get(str(tensor.dtype))
    if name is None:
        raise TypeError(f"wanted a dtype of {sorted(_NAMES)}, found {tensor.dtype}")
    return name


def _bytes(tensor: Any) -> memoryview:
    import torch

    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy())


def _replace_header(handle: int, header: bytes, final: bytes) -> None:
    if len(final) != len(header):
        raise ValueError(f"wanted a header of {len(header)} bytes, found {len(final)}")
    os.lseek(handle, 0, os.SEEK_SET)
    _write_all(handle, [final])


def _write_all(handle: int, buffers: list[Any]) -> None:
    for buffer in buffers:
        view = memoryview(buffer)
        while view:
            view = view[os.write(handle, view) :]
