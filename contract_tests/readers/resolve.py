"""`module:name` -> `Found`, following imports, re-exports and inheritance through the files of a release."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from contract_tests.readers import constructors, syntax
from contract_tests.readers.facts import AliasFacts, ClassFacts, FunctionFacts, Member, ModuleFacts, ValueFacts
from contract_tests.readers.found import ABSENT, FOUND, OPAQUE, UNREAD, Found, parsed
from contract_tests.readers.library import Library
from contract_tests.sources.store import Store
from contract_tests.sources.trees import SourceTree
from shims.contract import Signature

# Decorators after which a function still takes what is written: they wrap with `functools.wraps`, only
# mark it, or bind it.
_HARMLESS = frozenset(
    (
        "abstractmethod",
        "cache",
        "cached_property",
        "classmethod",
        "contextmanager",
        "deprecated",
        "final",
        "inference_mode",
        "instrument",
        "lru_cache",
        "no_grad",
        "overload",
        "override",
        "staticmethod",
        "wraps",
    )
)
# Bases that bring no names a consumer asks for.
_BARE_BASES = frozenset(("ABC", "Enum", "Exception", "Generic", "IntEnum", "Protocol", "int", "object", "str"))
_DEPTH = 20


@dataclass(frozen=True)
class Place:
    """A member and where it stands: the module and the qualified name of its definition."""

    module: str
    qualname: str
    member: Member

    @property
    def home(self) -> str:
        return f"{self.module}:{self.qualname}"


def read_source(tree: SourceTree, homes: list[str], store: Store | None = None) -> dict[str, Found]:
    """What a release's sources say about names, without importing anything.

    Args:
        tree: files of the release.
        homes: `module:qualified.name`, or `module` alone.
        store: cache of what single files say.

    Raises:
        SourceError: a file that the release has cannot be fetched.
    """
    resolver = Resolver(Library(tree, store))
    return {home: resolver.find(home) for home in homes}


class Resolver:
    """Follows names through one release.

    Args:
        library: its modules.
    """

    def __init__(self, library: Library) -> None:
        self.library = library

    def find(self, home: str) -> Found:
        """What stands at `module:qualified.name`, or at `module`."""
        module, _, qualname = home.partition(":")
        if not qualname:
            return self._module(module)
        found = self._walk(module, qualname.split("."))
        return found if isinstance(found, Found) else self._describe(found, "." in qualname)

    def _module(self, name: str) -> Found:
        if not self.library.owns(name):
            return Found(UNREAD, detail=f"{name.partition('.')[0]} is another package")
        if self.library.has(name):
            return Found(FOUND, "module", name)
        return Found(ABSENT, detail=f"module {name} does not exist")

    # --- from a dotted name to a place ----------------------------------------------------------

    def _walk(self, module: str, parts: list[str]) -> Place | Found:
        place = self.lookup(module, parts[0])
        for part in parts[1:]:
            if isinstance(place, Found):
                return place
            place = self._inside(place, part)
        return place

    def lookup(self, module: str, name: str, depth: int = 0) -> Place | Found:
        """The place of a name of a module, wherever it is defined in the end."""
        if not self.library.owns(module):
            detail = f"{name} comes from {module}" if module else f"{name} comes from elsewhere"
            return Found(OPAQUE, "import", f"{module}:{name}", detail=detail)
        facts = self.library.module(module)
        if facts is None:
            return Found(ABSENT, detail=f"module {module} does not exist")
        if facts.problem:
            return Found(UNREAD, detail=facts.problem)
        if depth > _DEPTH:
            return Found(UNREAD, detail=f"imports of {name} go in a circle")
        member = facts.members.get(name)
        if isinstance(member, AliasFacts):
            if not member.runtime and not facts.replaces_itself:
                return self._checkers_only(facts, name, depth)
            return self._alias(member, module, name, depth)
        if isinstance(member, ValueFacts) and member.value and member.value != name:
            same = facts.members.get(member.value)  # `old_name = new_name`
            if isinstance(same, (ClassFacts, FunctionFacts, AliasFacts)):
                return self.lookup(module, member.value, depth + 1)
        if member is not None:
            return Place(module, name, member)
        return self._elsewhere(facts, name, depth)

    def _alias(self, alias: AliasFacts, module: str, name: str, depth: int) -> Place | Found:
        if not alias.name:
            if not self.library.owns(alias.module):
                return Found(FOUND, "import", alias.module)
            return self._module(alias.module)
        if not self.library.owns(alias.module):
            return Found(FOUND, "import", f"{alias.module}:{alias.name}")
        found = self.lookup(alias.module, alias.name, depth + 1)
        if isinstance(found, Found) and found.status == ABSENT and not alias.runtime:
            return Found(OPAQUE, detail=f"{module} answers names at run time")
        if isinstance(found, Found) and found.status == ABSENT:
            detail = f"{module} imports {name} from {alias.module}, which does not have it"
            return replace(found, detail=detail)
        return found

    def _checkers_only(self, facts: ModuleFacts, name: str, depth: int) -> Place | Found:
        found = self._elsewhere(facts, name, depth)
        if isinstance(found, Found) and found.status == ABSENT:
            detail = f"{facts.name} imports {name} for type checkers only"
            return replace(found, detail=detail, text=", ".join(_annotated_with(facts, name)))
        return found

    def _elsewhere(self, facts: ModuleFacts, name: str, depth: int) -> Place | Found:
        """A name that the module does not define itself: star imports, lazy lookup, a submodule."""
        doubts: list[str] = []
        for star in facts.stars:
            found = self.lookup(star, name, depth + 1) if self.library.owns(star) else None
            if isinstance(found, Place) or (found is not None and found.status == FOUND):
                return found
            if found is None or found.status != ABSENT:
                doubts.append(f"{facts.name} takes all names of {star}")
        if facts.replaces_itself:
            return Found(OPAQUE, detail=f"{facts.name} puts another object in its own place")
        if "__getattr__" in facts.members:
            lazy = self._lazy(facts, name, depth)
            return lazy or Found(OPAQUE, detail=f"{facts.name} answers names at run time (__getattr__)")
        if self.library.has(f"{facts.name}.{name}"):
            return Found(FOUND, "module", f"{facts.name}.{name}")
        if doubts:
            return Found(UNREAD, detail=", ".join(doubts))
        return Found(ABSENT, detail=f"{facts.name} has no {name}")

    def _lazy(self, facts: ModuleFacts, name: str, depth: int) -> Place | Found | None:
        """A name in a table from which `__getattr__` imports, such as `{"LLM": ".entrypoints.llm:LLM"}`."""
        for member in facts.members.values():
            if isinstance(member, ValueFacts) and member.value.startswith("{") and f"'{name}'" in member.value:
                table = syntax.literal(member.value)
                target = table.get(name) if isinstance(table, dict) else None
                if isinstance(target, str):
                    module, _, attribute = target.partition(":")
                    if module.startswith("."):
                        module = self.library.package_of(facts.name) + module
                    if self.library.owns(module) and self.library.has(module):
                        return self.lookup(module, attribute or name, depth + 1)
        return None

    # --- inside a class -------------------------------------------------------------------------

    def _inside(self, place: Place, name: str) -> Place | Found:
        if isinstance(place.member, FunctionFacts):
            return Found(ABSENT, detail=f"{place.home} is a function and has no {name}")
        if not isinstance(place.member, ClassFacts):
            return Found(OPAQUE, detail=f"{place.home} is assigned a value that is not followed")
        doubts: list[str] = []
        for owner in self.lineage(place):
            if isinstance(owner, Found):
                doubts.append(owner.detail)
                continue
            assert isinstance(owner.member, ClassFacts)
            member = owner.member.members.get(name)
            if isinstance(member, ValueFacts) and isinstance(owner.member.members.get(member.value), FunctionFacts):
                member = owner.member.members[member.value]  # `old_name = new_name`
            if member is not None:
                return Place(owner.module, f"{owner.qualname}.{name}", member)
            if "__getattr__" in owner.member.members:
                return Found(OPAQUE, detail=f"{owner.home} answers names at run time (__getattr__)")
        if doubts:
            return Found(UNREAD, detail=f"{place.home} may inherit {name}: {', '.join(doubts)}")
        return Found(ABSENT, detail=f"{place.home} has no {name}")

    def lineage(self, place: Place) -> Iterator[Place | Found]:
        """The class and its bases, nearest first; a base that was not read comes as a `Found`."""
        seen: set[str] = set()

        def walk(current: Place) -> Iterator[Place | Found]:
            if current.home in seen or not isinstance(current.member, ClassFacts):
                return
            seen.add(current.home)
            yield current
            for base in current.member.bases:
                found = self.expression(current.module, base.partition("[")[0])
                if isinstance(found, Place):
                    yield from walk(found)
                elif base.partition("[")[0].rpartition(".")[2] not in _BARE_BASES:
                    yield Found(UNREAD, home=found.home, detail=f"its base {base} was not read")

        yield from walk(place)

    def expression(self, module: str, text: str) -> Place | Found:
        """The place of a dotted name as it is written in a module."""
        name, *rest = text.split(".")
        facts = self.library.module(module)
        member = facts.members.get(name) if facts is not None else None
        if member is None or not name.isidentifier():
            return Found(UNREAD, home=text, detail=f"{text} is not a name of {module}")
        if isinstance(member, AliasFacts) and not member.runtime:
            return Found(UNREAD, home=f"{member.module}:{member.name}", detail=f"{name} is for type checkers")
        found = self.lookup(module, name)
        for part in rest:
            if isinstance(found, Place):
                found = self._inside(found, part)
            elif found.kind == "module":
                found = self.lookup(found.home, part)
            else:
                return replace(found, home=f"{found.home}.{part}")
        return found

    # --- from a place to what a caller sees -----------------------------------------------------

    def _describe(self, place: Place, nested: bool) -> Found:
        member = place.member
        if isinstance(member, FunctionFacts):
            return self._function(place, member, nested)
        if isinstance(member, ClassFacts):
            made = constructors.constructor(self, place)
            shape = "" if made.status == FOUND else made.status
            return replace(
                made, status=FOUND, kind="class", home=place.home, abstract=self._abstract(place), shape=shape
            )
        assert isinstance(member, ValueFacts)
        return Found(FOUND, "attribute", place.home, text=self._choices(place.module, member.value))

    def _choices(self, module: str, text: str, depth: int = 0) -> str:
        """A `Literal` with the Literals that it names written out; '' for any other value."""
        if not text.startswith("Literal[") or depth > _DEPTH:
            return ""
        parts = []
        for part in (part.strip() for part in text[len("Literal[") : -1].split(",")):
            found = self.expression(module, part) if part.isidentifier() else None
            if isinstance(found, Place) and isinstance(found.member, ValueFacts):
                inner = self._choices(found.module, found.member.value, depth + 1)
                part = inner[len("Literal[") : -1] if inner else part
            parts.append(part)
        return f"Literal[{', '.join(parts)}]"

    def _function(self, place: Place, facts: FunctionFacts, nested: bool) -> Found:
        kind = "method" if nested else "function"
        if facts.ambiguous:
            detail = f"{place.home} is defined differently in several branches"
            return Found(FOUND, kind, place.home, shape=OPAQUE, detail=detail)
        strange = [name for name in facts.decorators if plain(name) not in _HARMLESS]
        if strange:
            detail = f"{place.home} is wrapped by {', '.join(strange)}"
            return Found(FOUND, kind, place.home, shape=OPAQUE, detail=detail)
        signature, defaults = parsed(facts.parameters)
        if nested and not any(plain(name) == "staticmethod" for name in facts.decorators):
            signature = Signature(signature.parameters[1:])
        names = {p.name for p in signature.parameters}
        kept = tuple((name, text) for name, text in defaults.items() if name in names)
        return Found(FOUND, kind, place.home, signature, kept, facts.is_async)

    def _abstract(self, place: Place) -> tuple[str, ...]:
        """Methods that are still abstract in this class."""
        decided: dict[str, bool] = {}
        for owner in self.lineage(place):
            if isinstance(owner, Place) and isinstance(owner.member, ClassFacts):
                for name, member in owner.member.members.items():
                    marks = member.decorators if isinstance(member, FunctionFacts) else []
                    decided.setdefault(name, any(plain(mark) == "abstractmethod" for mark in marks))
        return tuple(sorted(name for name, is_abstract in decided.items() if is_abstract))


def _annotated_with(facts: ModuleFacts, name: str) -> list[str]:
    """Classes of a module whose fields are annotated with a name: pydantic looks it up when it builds them."""
    classes = ((key, member) for key, member in facts.members.items() if isinstance(member, ClassFacts))
    word = re.compile(rf"\b{re.escape(name)}\b")

    def asks(member: Member) -> bool:
        return isinstance(member, ValueFacts) and not member.instance and bool(word.search(member.annotation))

    return [key for key, member in classes if any(map(asks, member.members.values()))]


def plain(decorator: str) -> str:
    """`module.name(arguments)` -> `name`."""
    return decorator.partition("(")[0].rpartition(".")[2]
