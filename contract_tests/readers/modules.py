"""One source file -> `ModuleFacts`. griffe tells classes, functions and values; `scan` tells the rest."""

from __future__ import annotations

import logging
import sys
from pathlib import PurePosixPath
from typing import Any

from contract_tests.readers import scan, syntax
from contract_tests.readers.facts import ClassFacts, FunctionFacts, Member, ModuleFacts, ValueFacts
from contract_tests.readers.found import written
from shims.contract import Parameter, Signature

# griffe warns of docstrings and annotations that do not matter here.
logging.getLogger("griffe").setLevel(logging.CRITICAL)

# Long values are only of use as tables of lazily imported names.
_LONG = 300
_LONG_TABLE = 20_000
# A syntax tree takes a hundred times the space of its source; no module that matters comes near this.
MOST_PARSED = 2 * 1024 * 1024


def read_module(name: str, path: str, content: bytes) -> ModuleFacts:
    """The facts of one file; `problem` is set where this Python cannot parse it.

    Args:
        name: dotted name of the module.
        path: of the file, to tell a package from a module.
        content: its source.
    """
    if len(content) > MOST_PARSED:
        return ModuleFacts(name, problem=f"{path} is larger than a module can be: {len(content)} bytes")
    try:
        code = content.decode("utf-8-sig")
        scanned = scan.scan(code, name, PurePosixPath(path).stem == "__init__")
        tree = syntax.outline(name.rpartition(".")[2], PurePosixPath(path), scanned.outline)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        problem = f"{path} cannot be parsed by Python {version}: {type(error).__name__}: {error}"
        return ModuleFacts(name, problem=problem)
    members = _members(tree, scanned.scope)
    return ModuleFacts(name, members, scanned.stars, replaces_itself=scanned.replaces_itself)


def _members(owner: Any, scope: scan.Scope) -> dict[str, Member]:
    members: dict[str, Member] = {**scope.imports}
    for name, item in owner.members.items():
        member = None if item.is_alias else _member(item, scope.inner.get(name, scan.Scope()), name in scope.ambiguous)
        if member is not None and not (name in scope.imports and isinstance(member, ValueFacts)):
            members[name] = member
    for name in scope.on_self:
        members.setdefault(name, ValueFacts(instance=True))
    return members


def _member(item: Any, inner: scan.Scope, ambiguous: bool) -> Member | None:
    if item.is_function:
        return FunctionFacts(
            _parameters(item),
            [str(d.value) for d in item.decorators],
            "async" in item.labels,
            ambiguous,
            inner.makes_dataclass or any("dataclass_transform" in str(d.value) for d in item.decorators),
        )
    if item.is_class:
        keywords = {str(name): str(value) for name, value in (item.keywords or {}).items()}
        return ClassFacts(
            [str(base) for base in item.bases], [str(d.value) for d in item.decorators], keywords, _members(item, inner)
        )
    if item.is_attribute:
        value = "" if item.value is None else str(item.value)
        keep = len(value) <= (_LONG_TABLE if value.startswith("{") else _LONG)
        annotation = "" if item.annotation is None else str(item.annotation)
        if "class-attribute" in item.labels and "instance-attribute" not in item.labels and annotation:
            annotation = "ClassVar"  # griffe takes the mark itself off
        # An annotation alone stands in the body of a class: a field, or a promise; `self.x = …` has a value.
        instance = "class-attribute" not in item.labels and "instance-attribute" in item.labels and bool(value)
        return ValueFacts(annotation, value if keep else "…", "property" in item.labels, instance)
    return None


def _parameters(function: Any) -> list[str]:
    kinds = {"positional-only": "positional_only", "positional or keyword": "positional_or_keyword",
             "variadic positional": "var_positional", "keyword-only": "keyword_only",
             "variadic keyword": "var_keyword"}  # fmt: skip
    parameters, defaults = [], {}
    for p in function.parameters:
        kind = kinds[p.kind.value]
        optional = p.default is not None and not kind.startswith("var_")
        parameters.append(Parameter(p.name, kind, not optional))
        if optional:
            defaults[p.name] = _short(str(p.default))
    return written(Signature(tuple(parameters)), defaults)


def _short(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:60]}…"
