"""Calls, signatures and whether they fit: one model for hook time, static checks and docs. Pure."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any


class Verdict(str, Enum):
    """What a reading of one touchpoint on one release says.

    `not judged` means that the source read does not hold the answer; absence from what was read
    is never `broken`.
    """

    HOLDS = "holds"
    BROKEN = "broken"
    OPAQUE = "opaque"  # exists, but takes *args/**kwargs or is built at run time: nothing can be concluded
    NOT_JUDGED = "not judged"


@dataclass(frozen=True)
class Parameter:
    """One parameter: `kind` is an `inspect` kind name in lower case (`positional_or_keyword`, …)."""

    name: str
    kind: str = "positional_or_keyword"
    required: bool = True

    def as_dict(self) -> dict[str, Any]:
        return {"name": self.name, "kind": self.kind, "required": self.required}


@dataclass(frozen=True)
class Signature:
    """Parameters a caller can fill, without `self` or `cls`."""

    parameters: tuple[Parameter, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(p.name for p in self.parameters if not p.kind.startswith("var_"))

    @property
    def takes_any_keyword(self) -> bool:
        return any(p.kind == "var_keyword" for p in self.parameters)

    @property
    def takes_any_positional(self) -> bool:
        return any(p.kind == "var_positional" for p in self.parameters)

    def __str__(self) -> str:
        marks = {"var_positional": "*", "var_keyword": "**"}
        parts: list[str] = []
        for p in self.parameters:
            if p.kind == "keyword_only" and not any(part.startswith("*") for part in parts):
                parts.append("*")
            parts.append(f"{marks.get(p.kind, '')}{p.name}{'' if p.required or p.kind in marks else '=…'}")
        return f"({', '.join(parts)})"

    @classmethod
    def of(cls, target: Callable[..., Any]) -> Signature | None:
        """The signature of a live object, or None where Python cannot tell (C code, built at run time)."""
        try:
            found = inspect.signature(target)
        except (TypeError, ValueError):
            return None
        parameters = [
            Parameter(p.name, p.kind.name.lower(), p.default is p.empty)
            for p in found.parameters.values()
            if p.name not in ("self", "cls")
        ]
        return cls(tuple(parameters))


@dataclass(frozen=True)
class Call:
    """The shape in which a consumer calls something: how many positional arguments, which keywords."""

    positional: int = 0
    keywords: tuple[str, ...] = ()

    def without(self, name: str) -> Call:
        return Call(self.positional, tuple(k for k in self.keywords if k != name))

    def adding(self, name: str) -> Call:
        return self if name in self.keywords else Call(self.positional, (*self.keywords, name))

    def __str__(self) -> str:
        return f"({', '.join(['…'] * self.positional + [f'{k}=' for k in self.keywords])})"


def misfits(signature: Signature, call: Call) -> list[str]:
    """Why `call` does not bind to `signature`, one phrase per reason; empty if it binds."""
    reasons: list[str] = []
    by_position = [p for p in signature.parameters if p.kind in ("positional_only", "positional_or_keyword")]
    if call.positional > len(by_position) and not signature.takes_any_positional:
        reasons.append(f"takes at most {len(by_position)} positional arguments, the call gives {call.positional}")
    filled = {p.name for p in by_position[: call.positional]}
    accepted = {p.name for p in signature.parameters if p.kind in ("positional_or_keyword", "keyword_only")}
    for name in call.keywords:
        if name in accepted & filled:
            reasons.append(f"{name} is given twice")
        elif name not in accepted and not signature.takes_any_keyword:
            reasons.append(f"does not know {name}")
    given = filled | (set(call.keywords) & accepted)
    reasons.extend(
        f"requires {p.name}"
        for p in signature.parameters
        if p.required and not p.kind.startswith("var_") and p.name not in given
    )
    return reasons


def binds(signature: Signature, call: Call) -> bool:
    """Whether Python would accept `call` for `signature`."""
    return not misfits(signature, call)
