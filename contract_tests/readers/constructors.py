"""What a class's constructor takes: `__init__`, or the fields of a dataclass, a struct or a model."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from contract_tests.readers import syntax
from contract_tests.readers.facts import ClassFacts, FunctionFacts, ValueFacts
from contract_tests.readers.found import FOUND, OPAQUE, UNREAD, Found, parsed
from shims.contract import Parameter, Signature

if TYPE_CHECKING:
    from contract_tests.readers.resolve import Place, Resolver

# Class decorators after which the constructor still takes what is written.
_HARMLESS = frozenset(
    (
        "deprecated",
        "final",
        "instrument",
        "register",
        "register_processor",
        "runtime_checkable",
        "support_torch_compile",
        "total_ordering",
    )
)
_FIELD_CALLS = frozenset(("field", "Field"))


def constructor(resolver: Resolver, place: Place) -> Found:
    """The signature of calling the class at `place`."""
    lineage = list(resolver.lineage(place))
    for position, owner in enumerate(lineage):
        if isinstance(owner, Found):
            style = _foreign_style(owner.home)
            if style:
                return _fields(resolver, lineage[:position], style)
            return Found(UNREAD, detail=f"{place.home}: {owner.detail}")
        assert isinstance(owner.member, ClassFacts)
        if not owner.member.keywords.get("metaclass", "ABCMeta").endswith(("ABCMeta", "EnumMeta")):
            return Found(OPAQUE, detail=f"{owner.home} has a metaclass")
        dataclass, strange = _decorators(resolver, owner)
        init = owner.member.members.get("__init__") or owner.member.members.get("__new__")
        if strange:
            return Found(OPAQUE, detail=f"{owner.home} is wrapped by {', '.join(strange)}")
        if isinstance(init, FunctionFacts):
            return _from_function(owner, init)
        if dataclass:
            return _fields(resolver, lineage, "dataclass")
    return Found(FOUND, signature=Signature(()))


def _from_function(owner: Place, init: FunctionFacts) -> Found:
    from contract_tests.readers.resolve import plain

    strange = [d for d in init.decorators if plain(d) not in ("overload", "override", "deprecated")]
    if strange or init.ambiguous:
        return Found(OPAQUE, detail=f"the constructor of {owner.home} is wrapped or defined in several branches")
    signature, defaults = parsed(init.parameters)
    return Found(FOUND, signature=Signature(signature.parameters[1:]), defaults=tuple(defaults.items()))


def _foreign_style(base: str) -> str:
    """How a base class of another package makes constructors: '' where that is not known."""
    name = base.replace(":", ".").rpartition(".")[2]
    return {"Struct": "struct", "BaseModel": "model", "NamedTuple": "dataclass"}.get(name, "")


def _decorators(resolver: Resolver, owner: Place) -> tuple[bool, list[str]]:
    """(whether the class is a dataclass, decorators of which nothing is known)."""
    from contract_tests.readers.resolve import Place, plain

    assert isinstance(owner.member, ClassFacts)
    dataclass, strange = False, []
    for decorator in owner.member.decorators:
        name = plain(decorator)
        if name == "dataclass":
            dataclass = True
            continue
        if name in _HARMLESS:
            continue
        found = resolver.expression(owner.module, decorator.partition("(")[0])
        if isinstance(found, Place) and isinstance(found.member, FunctionFacts):
            # `config` of vLLM: up to 0.11 it only marks a class, later it makes a dataclass of it.
            dataclass = dataclass or found.member.makes_dataclass
            if not found.member.makes_dataclass and name != "config":
                strange.append(decorator)
        else:
            strange.append(decorator)
    return dataclass, strange


def _fields(resolver: Resolver, lineage: list[Place | Found], style: str) -> Found:
    """The constructor that fields make, base classes first, as `dataclasses` orders them."""
    parameters: dict[str, Parameter] = {}
    defaults: dict[str, str] = {}
    for owner in reversed(lineage):
        if isinstance(owner, Found):
            continue
        facts = owner.member
        assert isinstance(facts, ClassFacts)
        if style == "dataclass" and not _decorators(resolver, owner)[0] and owner is not lineage[0]:
            continue  # a plain base: its annotations are no fields
        kind = "keyword_only" if style == "model" or _keyword_only(facts) else "positional_or_keyword"
        for name, member in facts.members.items():
            if not isinstance(member, ValueFacts) or member.instance or member.is_property or not member.annotation:
                continue
            if member.annotation.rpartition(".")[2] == "KW_ONLY":
                kind = "keyword_only"
                continue
            field = _field(member, style)
            if field is not None and not (style == "model" and name.startswith("_")):
                required, own_kind, default = field
                parameters[name] = Parameter(name, own_kind or kind, required)
                defaults.pop(name, None)
                if not required:
                    defaults[name] = default
    # `__init__` takes keyword-only parameters after the others, whatever their order in the class.
    ordered = sorted(parameters.values(), key=lambda p: p.kind == "keyword_only")
    if style == "model":
        ordered.append(Parameter("extra", "var_keyword"))
    return Found(FOUND, signature=Signature(tuple(ordered)), defaults=tuple(defaults.items()), fields=True)


def _keyword_only(facts: ClassFacts) -> bool:
    marked = any("kw_only=True" in decorator.replace(" ", "") for decorator in facts.decorators)
    return marked or facts.keywords.get("kw_only") == "True"


def _field(member: ValueFacts, style: str) -> tuple[bool, str, str] | None:
    """(required, kind or '', default as written) of an annotated name; None where it is no parameter."""
    annotation = member.annotation.strip("'\"")
    if "ClassVar" in annotation.partition("[")[0]:
        return None
    if not member.value:
        return True, "", ""
    call = _field_call(member.value)
    if call is None:
        return False, "", member.value if len(member.value) <= 60 else f"{member.value[:60]}…"
    keywords = {k.arg: ast.unparse(k.value) for k in call.keywords if k.arg}
    if keywords.get("init") == "False":
        return None
    kind = "keyword_only" if keywords.get("kw_only") == "True" else ""
    default = keywords.get("default", ast.unparse(call.args[0]) if call.args else "")
    if "default_factory" in keywords:
        return False, kind, f"{keywords['default_factory']}()"
    return (True, kind, "") if default in ("", "...", "Ellipsis") else (False, kind, default[:60])


def _field_call(value: str) -> ast.Call | None:
    expression = syntax.expression(value)
    if isinstance(expression, ast.Call) and ast.unparse(expression.func).rpartition(".")[2] in _FIELD_CALLS:
        return expression
    return None
