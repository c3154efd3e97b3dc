"""What the two families of ``torch.save`` rows share: tensors out of an untrusted dictionary."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pipeline.formats import DamagedRow, StateRow, Wanted
from pipeline.formats.checking import Outline, check_outline
from pipeline.formats.content import sealed_header

HEADER = "specshim"
"""Entry with our header as JSON text; the trainers pick their own entries and pass over it."""


def header_entry(row: StateRow, header: Mapping[str, str]) -> dict[str, str]:
    """The entry to store beside a row."""
    return {HEADER: json.dumps(sealed_header(row, header), sort_keys=True)}


def header_of(content: Mapping[str, Any]) -> dict[str, str]:
    """What the row says of itself; empty in a file of other writers.

    Raises:
        DamagedRow: the entry cannot be read.
    """
    try:
        header = json.loads(content.get(HEADER, "{}"))
    except (ValueError, TypeError, RecursionError) as error:
        raise DamagedRow(f"{HEADER}: {error}") from error
    return header if isinstance(header, dict) else {}


def dictionary(content: Any, *names: str) -> dict[str, Any]:
    """``content``, if it is a dictionary with these entries.

    Raises:
        DamagedRow: it is not.
    """
    if not isinstance(content, dict):
        raise DamagedRow(f"{type(content).__name__}, not a dictionary")
    missing = [name for name in names if name not in content]
    if missing:
        raise DamagedRow(f"no {', '.join(missing)} in it, but {sorted(map(str, content))[:8]}")
    return content


def tensor(content: Mapping[str, Any], name: str, kind: str, dimensions: int) -> Any:
    """One dense tensor of ``content``.

    Args:
        kind: ``int64``, or ``floating`` for any of float16, bfloat16, float32, float64.

    Raises:
        DamagedRow: absent, or something else.
    """
    return dense_tensor(content.get(name), name, kind, dimensions)


def dense_tensor(value: Any, name: str, kind: str, dimensions: int) -> Any:
    """``value``, if it is such a tensor; see :func:`tensor`.

    Raises:
        DamagedRow: it is something else.
    """
    import torch

    if not isinstance(value, torch.Tensor) or value.layout != torch.strided or value.device.type != "cpu":
        raise DamagedRow(f"{name} is {type(value).__name__}, not a dense tensor")
    kinds = {"floating": (torch.float16, torch.bfloat16, torch.float32, torch.float64)}
    if value.dtype not in kinds.get(kind, (torch.int64,)) or value.dim() != dimensions:
        raise DamagedRow(f"{name} {value.dtype}{list(value.shape)}, not {kind} of {dimensions} dimensions")
    return value


def ids_and_mask(content: Mapping[str, Any], length: int) -> tuple[Any, Any]:
    """``input_ids`` and ``loss_mask`` of ``length`` tokens.

    Raises:
        DamagedRow: of another length, or no such tensors.
    """
    ids, mask = tensor(content, "input_ids", "int64", 1), tensor(content, "loss_mask", "int64", 1)
    for name, value in (("input_ids", ids), ("loss_mask", mask)):
        if len(value) != length:
            raise DamagedRow(f"{name} of {len(value)} tokens for {length} states")
    return ids, mask


def check_row(row: StateRow, wanted: Wanted) -> int:
    """Compare a row (its tensors may still lie on disk) with what it should be.

    Returns:
        T, the row's tokens.

    Raises:
        DamagedRow: the first difference.
    """
    outline = Outline(
        shape=list(row.states.shape),
        dtype=str(row.states.dtype).removeprefix("torch."),
        header=row.header,
        token_ids=row.token_ids.tolist,
        loss_mask=row.loss_mask.tolist,
        whole=lambda: row,
    )
    return check_outline(outline, wanted)
