"""A configuration from a TOML or YAML file, under flags and over a recipe: each value from the nearest that has it."""

from __future__ import annotations

import dataclasses
import json
import sys
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from shims.errors import UsageError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_SUFFIXES = (".toml", ".yaml", ".yml")
Config = TypeVar("Config")


def read_settings(path: Path) -> dict[str, Any]:
    """The values of a file, by name; ``max-seq-len`` and ``max_seq_len`` are the same name.

    Raises:
        UsageError: no such file, of another kind, or not a flat table.
    """
    if path.suffix not in _SUFFIXES:
        raise UsageError(f"--config {path}", f"a file named {', '.join(_SUFFIXES)}", path.name, "rename it")
    try:
        text = path.read_text(encoding="utf-8-sig")
        content = tomllib.loads(text) if path.suffix == ".toml" else _yaml(path, text)
    except (OSError, ValueError) as error:
        found = f"{type(error).__name__}: {error}"
        raise UsageError(f"--config {path}", "a readable file", found, "correct it") from error
    if not isinstance(content, dict) or any(isinstance(value, dict | list) for value in content.values()):
        raise UsageError(f"--config {path}", "names and plain values", "tables or lists in it", "flatten it")
    settings = {str(name).replace("-", "_"): value for name, value in content.items()}
    if len(settings) < len(content):
        twice = ", ".join(name for name in content if "-" in name and name.replace("-", "_") in content)
        raise UsageError(f"--config {path}", "each name once", f"{twice}, with - and with _", "keep one of the two")
    return settings


def _yaml(path: Path, text: str) -> Any:
    try:
        import yaml
    except ImportError as error:
        raise UsageError(
            f"--config {path}", "the yaml library, which reads it", str(error), "pip install pyyaml, or write TOML"
        ) from error
    try:
        node = yaml.compose(text, yaml.SafeLoader)
        content = yaml.safe_load(text) or {}
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from error
    if isinstance(node, yaml.MappingNode):
        names = [str(key.value) for key, _ in node.value]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ValueError(f"{twice} is there twice")
    return content


def merged(
    kind: type[Config], given: Mapping[str, Any], file: Path | None, recipe: str | None, recipes: Mapping[str, Any]
) -> Config:
    """A configuration of dataclass ``kind``.

    Args:
        given: by flags; these come first.
        file: comes second; relative paths in it are relative to the current folder, as on the command line.
        recipe: a name in ``recipes``, comes third; the dataclass's own defaults come last. A file may name it.

    Raises:
        UsageError: an unknown name, a value of another type, or one that is needed and given nowhere.
    """
    from_file = read_settings(file) if file is not None else {}
    recipe = recipe or from_file.pop("recipe", None)
    from_file.pop("recipe", None)
    if recipe is not None and recipe not in recipes:
        raise UsageError("--recipe", ", ".join(recipes), repr(recipe), "use one of these")
    fields = {field.name: field for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    unknown = sorted(from_file.keys() - fields.keys())
    if unknown:
        raise UsageError(f"--config {file}", "names of flags", ", ".join(unknown), "correct or remove them")
    hints = typing.get_type_hints(kind)
    read = {name: _converted(f"--config {file}, {name}", hints[name], value) for name, value in from_file.items()}
    values = {**(recipes[recipe] if recipe else {}), **read, **given}
    missing = [name for name, field in fields.items() if field.default is dataclasses.MISSING and name not in values]
    if missing:
        flags = ", ".join("--" + name.replace("_", "-") for name in missing)
        raise UsageError("the command", flags, "neither a flag nor a value in a --config file", "give them")
    return kind(**values)


def _converted(where: str, hint: Any, value: Any) -> Any:
    allowed = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if value is None and type(None) in allowed:
        return None
    if value == "":  # as a path it would mean the current folder
        raise UsageError(where, "a value", "an empty text", "give it, or leave the name out")
    if Path in allowed and isinstance(value, str):
        return Path(value)
    # TOML and YAML read 1 as an integer, YAML 1e-4 as a text; a truth value is no number.
    if float in allowed and not isinstance(value, bool):
        try:
            return float(value)
        except (TypeError, ValueError):
            pass
    if type(value) in allowed:
        return value
    names = " or ".join(kind.__name__ for kind in allowed if kind is not type(None))
    raise UsageError(where, names, json.dumps(value, default=str), "correct the value")
