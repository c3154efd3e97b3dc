"""What one source file says, before names are followed into other files. Plain data, kept by content hash."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

# Part of the cache's key: raise it when the meaning of these classes, or what fills them, changes.
VERSION = 4


@dataclass
class FunctionFacts:
    """A function or method. `parameters` as in `readers.found.written`, with `self`."""

    parameters: list[str]
    decorators: list[str] = field(default_factory=list)
    is_async: bool = False
    ambiguous: bool = False  # defined more than once, with other parameters
    makes_dataclass: bool = False  # a decorator of classes that turns them into dataclasses


@dataclass
class ValueFacts:
    """A name that is assigned or annotated; `instance`: on `self`, in some method."""

    annotation: str = ""
    value: str = ""
    is_property: bool = False
    instance: bool = False


@dataclass
class AliasFacts:
    """An import: `name` of `module`, or the module itself where `name` is ''."""

    module: str
    name: str = ""
    runtime: bool = True  # False under `if TYPE_CHECKING`


@dataclass
class ClassFacts:
    """A class. `decorators` and `keywords` as written; members in the order in which they are defined."""

    bases: list[str] = field(default_factory=list)
    decorators: list[str] = field(default_factory=list)
    keywords: dict[str, str] = field(default_factory=dict)
    members: dict[str, Member] = field(default_factory=dict)


Member = FunctionFacts | ValueFacts | AliasFacts | ClassFacts


@dataclass
class ModuleFacts:
    """A module: what it defines and imports, and the modules it star-imports."""

    name: str
    members: dict[str, Member] = field(default_factory=dict)
    stars: list[str] = field(default_factory=list)
    problem: str = ""  # why it could not be read
    replaces_itself: bool = False  # puts another object in its place in `sys.modules`


_TYPES: dict[str, Any] = {"f": FunctionFacts, "v": ValueFacts, "a": AliasFacts}
_LETTERS = {value: key for key, value in _TYPES.items()}


def dump(facts: ModuleFacts) -> dict[str, Any]:
    return {
        "name": facts.name,
        "stars": facts.stars,
        "problem": facts.problem,
        "replaces_itself": facts.replaces_itself,
        "members": {name: _dump(member) for name, member in facts.members.items()},
    }


def load(data: dict[str, Any]) -> ModuleFacts:
    members = {name: _load(member) for name, member in data["members"].items()}
    return ModuleFacts(data["name"], members, data["stars"], data["problem"], data["replaces_itself"])


def _dump(member: Member) -> list[Any]:
    if isinstance(member, ClassFacts):
        members = {name: _dump(inner) for name, inner in member.members.items()}
        return ["c", member.bases, member.decorators, member.keywords, members]
    return [_LETTERS[type(member)], *vars(member).values()]


def _load(data: list[Any]) -> Member:
    if data[0] == "c":
        return ClassFacts(data[1], data[2], data[3], {name: _load(inner) for name, inner in data[4].items()})
    member: Member = _TYPES[data[0]](*data[1:])
    return member
