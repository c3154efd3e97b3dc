"""The committed snapshots: what was read of each release, as files. Needs no network."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

from contract_tests.readers.found import Reading
from contract_tests.uses import Use
from shims.errors import UsageError

FOLDER = Path(__file__).with_name("snapshots")
OTHERS = ("speculators", "torch", "transformers")


@lru_cache(maxsize=128)
def recorded(release: str) -> Reading:
    """The snapshot of one vLLM release.

    Raises:
        UsageError: there is none.
    """
    path = FOLDER / f"{release}.json"
    if not path.is_file():
        next_step = f"python -m contract_tests.snapshot {release}"
        raise UsageError(f"snapshot of vllm {release}", f"snapshots/{path.name}", "no such file", next_step)
    return Reading.from_dict(json.loads(path.read_text(encoding="utf-8")))


def is_recorded(release: str) -> bool:
    """Whether there is a snapshot of this vLLM release."""
    return (FOLDER / f"{release}.json").is_file()


@lru_cache(maxsize=8)
def recorded_others(package: str) -> dict[str, Reading]:
    """release -> snapshot, for a package that is read beside vLLM; {} where none was taken."""
    path = FOLDER / f"{package}.json"
    if not path.is_file():
        return {}
    data = json.loads(path.read_text(encoding="utf-8"))
    return {release: Reading.from_dict(reading) for release, reading in data.items()}


@lru_cache(maxsize=1)
def recorded_uses() -> dict[str, list[Use]]:
    """`distribution version` -> what that release of a consumer uses."""
    data = json.loads((FOLDER / "uses.json").read_text(encoding="utf-8"))
    return {consumer: [Use.from_list(use) for use in uses] for consumer, uses in data.items()}


def rendered_uses(uses: dict[str, list[Use]]) -> str:
    """The snapshot of uses as text, one line for each use."""
    parts = [
        f" {json.dumps(consumer)}: [\n" + ",\n".join(f"  {json.dumps(use.as_list())}" for use in found) + "\n ]"
        for consumer, found in uses.items()
    ]
    return "{\n" + ",\n".join(parts) + "\n}\n"


def rendered(data: dict[str, Any]) -> str:
    """A snapshot as text: one line for each name, so that a change shows as one line."""
    return _rendered(data, 0) + "\n"


def _rendered(value: Any, depth: int) -> str:
    if not isinstance(value, dict) or depth > 3 or not value or "status" in value:
        return json.dumps(value, ensure_ascii=False)
    inner = ",\n".join(
        f"{' ' * (depth + 1)}{json.dumps(key)}: {_rendered(item, depth + 1)}" for key, item in value.items()
    )
    return f"{{\n{inner}\n{' ' * depth}}}"
