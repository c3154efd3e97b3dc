"""Does a manifest hold what its schema says? The part of JSON Schema that manifest_schema.py uses."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "object": (dict,),
    "array": (list,),
    "null": (type(None),),
}


def misfit(value: Any, schema: Mapping[str, Any], name: str = "") -> tuple[str, str, str] | None:
    """The first place where a value is not what its schema says.

    Args:
        name: of the value, for the answer; fields within it are named with dots.

    Returns:
        Name, what was wanted and what is there; None where it fits.
    """
    wanted = _wanted(value, schema)
    if wanted is not None:
        return name, wanted, _short(value)
    if isinstance(value, dict):
        for key in schema.get("required", ()):
            if key not in value:
                return f"{name}.{key}".lstrip("."), "a value", "nothing"
        more = schema.get("additionalProperties", {})
        for key, part in value.items():
            found = misfit(part, schema.get("properties", {}).get(key, more), f"{name}.{key}".lstrip("."))
            if found is not None:
                return found
    if isinstance(value, list):
        for index, part in enumerate(value):
            found = misfit(part, schema.get("items", {}), f"{name}[{index}]")
            if found is not None:
                return found
    return None


def _wanted(value: Any, schema: Mapping[str, Any]) -> str | None:
    """What a value itself should have been; None where it is that."""
    kinds = schema.get("type")
    names = [kinds] if isinstance(kinds, str) else list(kinds or ())
    # In Python a truth value is a whole number.
    if names and not any(
        isinstance(value, _TYPES[name]) and (name == "boolean" or not isinstance(value, bool)) for name in names
    ):
        return " or ".join(names)
    if "enum" in schema and value not in schema["enum"]:
        return ", ".join(map(str, schema["enum"]))
    if "pattern" in schema and isinstance(value, str) and not re.search(schema["pattern"], value):
        return f"a text like {schema['pattern']}"
    if isinstance(value, (int, float)) and not schema.get("minimum", value) <= value <= schema.get("maximum", value):
        return f"a number from {schema.get('minimum', '…')} to {schema.get('maximum', '…')}"
    return None


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."
