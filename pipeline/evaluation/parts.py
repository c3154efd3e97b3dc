"""Finished parts of an evaluation: each is kept with what it was made from, and made again when that changes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pipeline.atomic import write_text
from pipeline.progress import console


class Parts:
    """Results by name, in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def get(self, name: str, made_from: Mapping[str, Any], make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The part, made now unless it lies there already, of the same things.

        Args:
            made_from: whatever the part depends on, as JSON values.
            make: makes it.
        """
        key = hashlib.sha256(json.dumps(made_from, sort_keys=True, default=str).encode()).hexdigest()
        file = self.folder / f"{name}.json"
        kept = _read(file)
        if kept.get("key") == key:
            console.print(f"{name}: kept from before", highlight=False)
            return dict(kept["result"])
        console.print(f"{name} …", highlight=False)
        result = make()
        write_text(file, json.dumps({"key": key, "made_from": dict(made_from), "result": result}, default=str))
        return result


def _read(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) and isinstance(content.get("result"), dict) else {}
