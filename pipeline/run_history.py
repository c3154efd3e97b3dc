"""Which stack computed which rows: a manifest keeps every run, not the last one alone.

A *stack* is the installed versions, the adaptations in force and the engine, under a short hash of the three. Each
row's header names its stack, and the manifest says what the name stands for.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pipeline import manifest
from pipeline.atomic import clear_leftovers
from pipeline.lock import queued

_LOCK = ".lock-manifest"


@contextlib.contextmanager
def changing(folder: Path) -> Iterator[None]:
    """Change what all shards of a folder share, one process at a time; not to be nested."""
    with queued(folder / _LOCK):
        yield


def stack_name(record: Mapping[str, Any]) -> str:
    """The short hash of a manifest's stack."""
    named = _stack(record)
    return hashlib.sha256(json.dumps(named, sort_keys=True, default=str).encode()).hexdigest()[:12]


def _stack(record: Mapping[str, Any]) -> dict[str, Any]:
    return {"versions": record["versions"], "plan": record.get("plan"), "engine": record.get("engine")}


def begin(folder: Path, record: dict[str, Any], **facts: Any) -> int:
    """Write the manifest of a run that begins, with the runs before it.

    Args:
        record: from :func:`pipeline.manifest.compose`.
        facts: what else to keep of this run, e.g. its shard.

    Returns:
        The run's place among ``runs``.
    """
    with changing(folder):
        clear_leftovers(folder, lambda name: name == manifest.FILE_NAME)
        before = manifest.read(folder, record["stage"]) or {}
        name = stack_name(record)
        runs = [*before.get("runs", []), {"stack": name, "started": record["created"], **facts}]
        stacks = before.get("stacks", {}) | {name: _stack(record)}
        kept = {key: before[key] for key in ("counts", "bad_rows", "speed") if key in before}
        # A run that adds to a finished set (a row was damaged) makes it unfinished until it ends.
        manifest.write(folder, kept | record | {"complete": False, "stacks": stacks, "runs": runs})
        return len(runs) - 1


def end(folder: Path, stage: str, run: int | None, facts: Mapping[str, Any], **fields: Any) -> None:
    """Complete the entry of a run, and set ``fields`` of the manifest.

    Args:
        run: from :func:`begin`; None where this run computed nothing.
        facts: what the run did.
    """
    with changing(folder):
        record = manifest.require(folder, stage, "folder")
        if run is not None:
            ended = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
            record["runs"][run] |= {"ended": ended, **facts}
        manifest.write(folder, record | fields)


def other_stacks(folder: Path, stage: str, current: str, engine: str) -> list[str]:
    """In words, what earlier runs had that differs from what is there now.

    Args:
        current: name of the stack that is there now.
        engine: the one chosen now.
    """
    record = manifest.read(folder, stage) or {}
    installed = manifest.installed_versions()
    described = []
    for name, stack in record.get("stacks", {}).items():
        if name != current:
            differing = {
                package: version
                for package, version in stack.get("versions", {}).items()
                if installed.get(package) != version
            }
            words = [f"{package} {version}" for package, version in differing.items()]
            words += [f"the engine {stack['engine']}"] if stack.get("engine") not in (None, engine) else []
            described.append(", ".join(words) or "other adaptations")
    return described
