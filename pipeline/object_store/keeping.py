"""Where a training keeps the rows that it fetches, and how many bytes of them."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline import disk
from pipeline.config import TrainConfig
from pipeline.object_store.address import shown
from pipeline.object_store.ahead import Kept
from pipeline.progress import console

_LEFT_FREE = disk.GIB


def kept_rows(config: TrainConfig, record: Mapping[str, Any]) -> Kept:
    """The folder of this set, and no more bytes than were given, and than leave a GiB free on that disk.

    Args:
        record: the set's manifest; a set that is written anew gets another folder.
    """
    cache = config.cache_dir or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "specshim" / "rows"
    name = hashlib.sha256(json.dumps([shown(config.data), record], sort_keys=True).encode()).hexdigest()[:16]
    folder = cache / name
    there = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    room = max(0, disk.free_bytes(folder) + there - _LEFT_FREE)
    limit = min(int(config.cache_gib * disk.GIB), room)
    console.print(
        f"rows are fetched from {shown(config.data)}; up to {disk.human(limit)} of them are kept in {folder}",
        highlight=False,
        soft_wrap=True,
    )
    return Kept(folder, limit)
