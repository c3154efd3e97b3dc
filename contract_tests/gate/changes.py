"""What changed about one name between two releases, each change with a kind. Pure: works on readings alone."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from contract_tests.readers.found import ABSENT, FOUND, OPAQUE, UNREAD, Found
from shims.contract import Call, Parameter, Signature

# Kind -> whether it can break a caller by itself.
KINDS = {
    "removed": True,
    "moved": True,
    "renamed": True,
    "added": False,
    "defined elsewhere": False,
    "unreadable": True,
    "became another kind of object": True,
    "parameter removed": True,
    "parameter added, required": True,
    "parameter added, optional": False,
    "parameter renamed": True,
    "field removed": True,
    "field added, required": True,
    "field added, optional": False,
    "field renamed": True,
    "became required": True,
    "became optional": False,
    "became keyword-only": True,
    "became positional-only": True,
    "parameter kind changed": False,
    "order changed": True,
    "default changed": False,
    "became async": True,
    "no longer async": True,
    "abstract method added": True,
    "abstract method gone": False,
    "choice removed": True,
    "choice added": False,
    "body changed": False,
    "namesake differs": False,
}
_ALIKE = 0.6


@dataclass(frozen=True)
class Change:
    """One difference.

    Args:
        kind: key of `KINDS`.
        name: of what changed: a parameter, a field, a method, a choice, or the touchpoint itself.
        detail: from what to what, '' where the kind says it all.
    """

    kind: str
    name: str
    detail: str = ""

    @property
    def can_break(self) -> bool:
        return KINDS[self.kind]

    def as_dict(self) -> dict[str, str]:
        return asdict(self)

    def __str__(self) -> str:
        return f"{self.kind}: {self.name}{f' ({self.detail})' if self.detail else ''}"


def changes(before: Found, after: Found) -> list[Change]:
    """The differences between two readings of one home, those that can break a caller first.

    Args:
        before: what the older release has.
        after: what the newer one has there.
    """
    found = list(_status(before, after) or _inside(before, after))
    return sorted(found, key=lambda change: not change.can_break)


def _status(before: Found, after: Found) -> Iterator[Change] | list[Change]:
    name = (after.home or before.home or after.detail).rpartition(":")[2]
    if after.status == before.status != FOUND:
        return []
    if after.status == ABSENT:
        return [Change("removed", before.home.rpartition(":")[2] or name, after.detail)]
    if after.status in (OPAQUE, UNREAD) or (after.shape and after.shape != before.shape):
        return [Change("unreadable", name, after.detail)]
    if before.status == ABSENT:
        return [Change("added", name)]
    return []


def _inside(before: Found, after: Found) -> Iterator[Change]:
    if before.status != FOUND or after.status != FOUND:
        return
    name = after.home.rpartition(":")[2]
    if before.kind != after.kind and "import" not in (before.kind, after.kind):
        yield Change("became another kind of object", name, f"{before.kind} -> {after.kind}")
    if before.home.partition(":")[0] != after.home.partition(":")[0] and before.home and after.home:
        # Still found at the old home, by a re-export: nobody is broken yet.
        yield Change("defined elsewhere", name, f"{before.home.partition(':')[0]} -> {after.home.partition(':')[0]}")
    yield from _parameters(before, after)
    if before.is_async != after.is_async:
        yield Change("became async" if after.is_async else "no longer async", name)
    for method in sorted(set(after.abstract) - set(before.abstract)):
        yield Change("abstract method added", method)
    for method in sorted(set(before.abstract) - set(after.abstract)):
        yield Change("abstract method gone", method)
    if before.text.startswith("Literal[") and after.text.startswith("Literal["):
        old, new = _choices(before.text), _choices(after.text)
        yield from (Change("choice removed", choice) for choice in old if choice not in new)
        yield from (Change("choice added", choice) for choice in new if choice not in old)


def misplaced(before: Signature, after: Signature, call: Call) -> str:
    """Why a call's positional arguments would no longer go where they went; '' if they do.

    A parameter that only has another name in its old place is none: whoever gives it by position does not notice.
    """
    names, known = [p.name for p in after.parameters], {p.name for p in before.parameters}
    for number, old in enumerate(before.parameters[: call.positional]):
        new = names[number] if number < len(names) else ""
        if new != old.name and (old.name in names or new in known):
            return f"argument {number + 1} was {old.name} and would now be {new}; the call is {call}"
    return ""


def _choices(text: str) -> list[str]:
    return [part.strip() for part in text[len("Literal[") : -1].split(",")]


def _parameters(before: Found, after: Found) -> Iterator[Change]:
    if before.signature is None or after.signature is None:
        return
    # `*rest` and `rest` are two things: their stars are part of the name.
    old = {_shown(p): p for p in before.signature.parameters}
    new = {_shown(p): p for p in after.signature.parameters}
    gone, come = [n for n in old if n not in new], [n for n in new if n not in old]
    noun = "field" if before.fields and after.fields else "parameter"
    renamed = dict(_renamed(gone, come, list(old), list(new)))
    for was, now in renamed.items():
        yield Change(f"{noun} renamed", was, f"-> {now}")
    for name in gone:
        if name not in renamed:
            yield Change(f"{noun} removed", name)
    for name in come:
        if name not in renamed.values():
            parameter = new[name]
            required = parameter.required and not parameter.kind.startswith("var_")
            yield Change(f"{noun} added, {'required' if required else 'optional'}", name)
    old_defaults, new_defaults = dict(before.defaults), dict(after.defaults)
    for name in old:
        if name in new:
            yield from _parameter(old[name], new[name], old_defaults.get(name, ""), new_defaults.get(name, ""))
    kept_old, kept_new = _positions(old, new), _positions(new, old)
    if kept_old != kept_new:
        yield Change("order changed", after.home.rpartition(":")[2], f"{_listed(kept_old)} -> {_listed(kept_new)}")


def _renamed(gone: list[str], come: list[str], old: list[str], new: list[str]) -> Iterator[tuple[str, str]]:
    """Pairs that are one parameter under two names: alike, or alone in the same place."""
    left = [name for name in come if not name.startswith("*")]
    for name in (name for name in gone if not name.startswith("*")):
        alike = difflib.get_close_matches(name, left, 1, _ALIKE)
        if not alike and len(gone) == len(come) == len(left) == 1 and old.index(name) == new.index(left[0]):
            alike = left[:]
        if alike:
            left.remove(alike[0])
            yield name, alike[0]


def _parameter(old: Parameter, new: Parameter, default: str, now: str) -> Iterator[Change]:
    if new.required and not old.required:
        yield Change("became required", new.name, f"was {default}" if default else "")
    elif old.required and not new.required:
        yield Change("became optional", new.name, f"default {now}" if now else "")
    elif default != now:
        yield Change("default changed", new.name, f"{default} -> {now}")
    if new.kind != old.kind:
        named = {"keyword_only": "became keyword-only", "positional_only": "became positional-only"}
        yield Change(named.get(new.kind, "parameter kind changed"), new.name, f"was {old.kind}")


def _positions(parameters: dict[str, Parameter], others: dict[str, Parameter]) -> list[str]:
    """Those that both have and that can be given by position, in order."""
    by_position = ("positional_only", "positional_or_keyword")
    return [n for n, p in parameters.items() if n in others and p.kind in by_position and others[n].kind in by_position]


def _listed(names: list[str]) -> str:
    return ", ".join(names)


def _shown(parameter: Parameter) -> str:
    return {"var_positional": "*", "var_keyword": "**"}.get(parameter.kind, "") + parameter.name
