"""The hash that ties a row's numbers to its header, the same in every format."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from pipeline.formats import DamagedRow, StateRow

KEY = "content_sha256"
"""Header entry that holds the hash."""


def sealed_header(row: StateRow, header: Mapping[str, str]) -> dict[str, str]:
    """``header`` with the row's id and the hash over everything the row holds."""
    whole = {**header, "row_id": row.row_id}
    return {**whole, KEY: content_hash(row, whole)}


def unsealed_header(row: StateRow, header: Mapping[str, str]) -> dict[str, str]:
    """The same, as long, with zeros for the hash: for a file that is begun before its hash is known."""
    return {**header, "row_id": row.row_id, KEY: "0" * (2 * hashlib.sha256().digest_size)}


def content_hash(row: StateRow, header: Mapping[str, str]) -> str:
    """sha256, as hexadecimal, over header, dtypes, shapes and bytes.

    A row keeps its hash when it moves to another format without a change of its numbers.
    """
    digest = hashlib.sha256()
    named = {name: text for name, text in header.items() if name != KEY}
    digest.update(json.dumps(named, sort_keys=True).encode())
    for name in ("states", "scale", "token_ids", "loss_mask"):
        tensor = getattr(row, name)
        if tensor is not None:
            digest.update(f"\0{name} {tensor.dtype} {list(tensor.shape)}\0".encode())
            digest.update(_bytes_of(tensor))
    return digest.hexdigest()


def check_content(row: StateRow) -> None:
    """Compare a row as read with the hash in its header.

    Raises:
        DamagedRow: they differ, or there is no hash.
    """
    stated = row.header.get(KEY)
    if stated is None:
        raise DamagedRow("no hash of its content in its header")
    found = content_hash(row, row.header)
    if found != stated:
        raise DamagedRow(f"content hash {found[:12]}…, its header says {stated[:12]}…")


def _bytes_of(tensor: Any) -> Any:
    import torch

    # A view of the same memory; torch's bfloat16 and float8 have no numpy type.
    return memoryview(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy())
