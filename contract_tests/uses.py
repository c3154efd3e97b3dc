"""Which names of a package a consumer's own source uses, and how it calls them. Reads, imports nothing.

Followed: imports (anywhere in a file), attributes of what was imported, and objects whose class can be told
(assigned from a call of an imported class, or annotated with one). An attribute of anything else is kept with
an unknown owner, so that nothing is passed over.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from contract_tests.readers import syntax
from shims.contract import Call, Parameter, Signature

UNKNOWN = "?"
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Use:
    """One use.

    Args:
        name: dotted, `vllm.config.CacheConfig.block_size`; `?.block_size` where the owner is unknown.
        call: its shape, None where it is not called, or with `*` or `**`.
        file, line: where.
        guarded: whether the code around it is prepared for its absence: it catches ImportError or
            AttributeError, or asks for a version or `hasattr` first.
        awaited: whether it is a call whose result is awaited on the spot.
    """

    name: str
    call: Call | None
    file: str
    line: int
    guarded: bool = False
    awaited: bool = False

    def as_list(self) -> list[Any]:
        """For a snapshot."""
        call = None if self.call is None else [self.call.positional, list(self.call.keywords)]
        return [self.name, call, self.file, self.line]

    @classmethod
    def from_list(cls, data: list[Any]) -> Use:
        name, call, file, line = data
        return cls(name, None if call is None else Call(call[0], tuple(call[1])), file, line)

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.name}{self.call or ''}"


@dataclass(frozen=True)
class Subclass:
    """A class of the consumer that derives from one of the packages.

    Args:
        base: dotted name of the base.
        methods: name -> signature without `self`, of each that it defines; what is no plain method has None.
        file, line: where.
        guarded: as for `Use`.
    """

    base: str
    methods: tuple[tuple[str, Signature | None], ...]
    file: str
    line: int
    guarded: bool = False


def uses_in(code: str, file: str, packages: Iterable[str]) -> list[Use]:
    """The uses of `packages` in one file, each once, in order.

    Raises:
        SyntaxError: this Python cannot parse the file.
    """
    return uses_and_subclasses_in(code, file, packages)[0]


def uses_and_subclasses_in(code: str, file: str, packages: Iterable[str]) -> tuple[list[Use], list[Subclass]]:
    """The same, and the classes that derive from one of the packages'.

    Raises:
        SyntaxError: this Python cannot parse the file.
    """
    reader = _Reader(file, frozenset(packages))
    tree = syntax.module(code)
    reader.learn(tree)
    reader.visit(tree)
    return list(dict.fromkeys(reader.found)), reader.subclasses


@dataclass
class _Reader(ast.NodeVisitor):
    file: str
    packages: frozenset[str]
    imported: dict[str, str] = field(default_factory=dict)  # local name -> dotted name
    types: dict[str, str] = field(default_factory=dict)  # `x` or `self.x` -> dotted name of its class
    returns: dict[str, str] = field(default_factory=dict)  # function of this file -> class of its result
    own: set[str] = field(default_factory=set)  # attributes that this file itself defines
    found: list[Use] = field(default_factory=list)
    subclasses: list[Subclass] = field(default_factory=list)
    awaiting: ast.expr | None = None  # the expression that stands right behind `await`
    guards: int = 0  # how many conditions around the node that is visited foresee its absence

    # --- what names stand for -------------------------------------------------------------------

    def learn(self, tree: ast.Module) -> None:
        nodes = list(_outside_of_checkers(tree))
        for node in nodes:
            if isinstance(node, ast.Import):
                for alias in node.names:
                    if alias.name.partition(".")[0] in self.packages:
                        self.imported[alias.asname or alias.name.partition(".")[0]] = (
                            alias.name if alias.asname else alias.name.partition(".")[0]
                        )
            elif isinstance(node, ast.ImportFrom) and not node.level:
                if (node.module or "").partition(".")[0] in self.packages:
                    for alias in node.names:
                        self.imported[alias.asname or alias.name] = f"{node.module}.{alias.name}"
            elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                self.own.add(node.name)
        for node in nodes:
            self._learn_types(node)
        for node in nodes:  # again: a result's class may be known only now
            self._learn_types(node)

    def _learn_types(self, node: ast.AST) -> None:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            owner = self._class_of_annotation(node.returns)
            if owner:
                self.returns[node.name] = owner
            for argument in (*node.args.args, *node.args.kwonlyargs):
                owner = self._class_of_annotation(argument.annotation)
                if owner:
                    self.types[argument.arg] = owner
        elif isinstance(node, (ast.Assign, ast.AnnAssign, ast.NamedExpr)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                key = _key(target)
                if isinstance(target, ast.Attribute):
                    self.own.add(target.attr)
                owner = self._class_of_value(node.value) if node.value is not None else ""
                if key and owner:
                    self.types[key] = owner

    def _class_of_annotation(self, annotation: ast.expr | None) -> str:
        name = annotation.id if isinstance(annotation, ast.Name) else ""
        return self.imported.get(name, "")

    def _class_of_value(self, value: ast.expr) -> str:
        if not isinstance(value, ast.Call):
            return ""
        called = _key(value.func) or ""
        name = called.removeprefix("self.")
        if name in self.returns:
            return self.returns[name]
        return self.imported.get(called, "") if called[:1].isupper() else ""

    # --- uses ------------------------------------------------------------------------------------

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if not node.level and (node.module or "").partition(".")[0] in self.packages:
            for alias in node.names:
                if self.imported.get(alias.asname or alias.name) == f"{node.module}.{alias.name}":
                    self._note(f"{node.module}.{alias.name}", None, node)

    def visit_Call(self, node: ast.Call) -> None:
        name = self._name(node.func)
        if name:
            self._note(name, _shape(node), node)
            if isinstance(node.func, ast.Attribute):
                self.visit(node.func.value)
        else:
            self.visit(node.func)
        for argument in (*node.args, *node.keywords):
            self.visit(argument)

    def visit_Await(self, node: ast.Await) -> None:
        self.awaiting = node.value
        self.visit(node.value)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        name = self._name(node)
        if name:
            self._note(name, None, node)
        self.visit(node.value)

    def visit_If(self, node: ast.If) -> None:
        guard = int(_asks_first(node.test))
        if not _for_checkers(node):
            self.visit(node.test)
            self._visit_guarded(node.body, guard)
        self._visit_guarded(node.orelse, guard)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self.visit(node.test)
        self._visit_guarded([node.body, node.orelse], int(_asks_first(node.test)))

    def visit_Try(self, node: ast.Try) -> None:
        guard = int(any(map(_catches_absence, node.handlers)))
        self._visit_guarded(node.body, guard)
        for handler in node.handlers:
            self._visit_guarded(handler.body, guard)
        self._visit_guarded([*node.orelse, *node.finalbody], 0)

    def visit_With(self, node: ast.With) -> None:
        suppressed = any("suppress(" in ast.unparse(item.context_expr) for item in node.items)
        for item in node.items:
            self.visit(item)
        self._visit_guarded(node.body, int(suppressed))

    def _visit_guarded(self, nodes: Iterable[ast.AST], guard: int) -> None:
        self.guards += guard
        for node in nodes:
            self.visit(node)
        self.guards -= guard

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        for base in node.bases:
            name = self._name(base)
            if name and not name.startswith(UNKNOWN):
                methods = tuple((m.name, _signature(m)) for m in node.body if isinstance(m, _FUNCTIONS))
                self.subclasses.append(Subclass(name, methods, self.file, node.lineno, self.guards > 0))
        self.generic_visit(node)

    def _name(self, node: ast.expr) -> str:
        """The dotted name that an expression stands for; '' for what is not of interest."""
        if isinstance(node, ast.Name):
            return self.imported.get(node.id, "")
        if not isinstance(node, ast.Attribute):
            return ""
        key = _key(node.value)
        if key in self.types:
            return f"{self.types[key]}.{node.attr}"
        owner = self._name(node.value)
        if owner and not owner.startswith(UNKNOWN):
            is_object = isinstance(node.value, ast.Attribute) and _key(node.value.value) in self.types
            return f"{UNKNOWN}.{node.attr}" if is_object else f"{owner}.{node.attr}"
        if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls") and node.attr in self.own:
            return ""
        return f"{UNKNOWN}.{node.attr}"

    def _note(self, name: str, call: Call | None, node: ast.expr | ast.stmt) -> None:
        awaited = node is self.awaiting and call is not None
        self.found.append(Use(name, call, self.file, node.lineno, self.guards > 0, awaited))


def _key(node: ast.expr) -> str | None:
    """`x` or `self.x`, as text; None for any other expression."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
        return f"self.{node.attr}"
    return None


def _shape(node: ast.Call) -> Call | None:
    if any(isinstance(a, ast.Starred) for a in node.args) or any(k.arg is None for k in node.keywords):
        return None
    return Call(len(node.args), tuple(k.arg for k in node.keywords if k.arg))


def _signature(method: ast.FunctionDef | ast.AsyncFunctionDef) -> Signature | None:
    """What a method takes, without `self`; None for a property and other methods that are not called as written."""
    names = {ast.unparse(d).partition("(")[0].rpartition(".")[2] for d in method.decorator_list}
    if names - {"classmethod", "staticmethod", "abstractmethod", "override"}:
        return None
    a = method.args
    by_position = [*a.posonlyargs, *a.args]
    required = len(by_position) - len(a.defaults)
    parameters = [
        Parameter(p.arg, "positional_only" if i < len(a.posonlyargs) else "positional_or_keyword", i < required)
        for i, p in enumerate(by_position)
    ]
    parameters = parameters if "staticmethod" in names else parameters[1:]
    parameters += [Parameter(a.vararg.arg, "var_positional")] if a.vararg else []
    parameters += [
        Parameter(p.arg, "keyword_only", default is None)
        for p, default in zip(a.kwonlyargs, a.kw_defaults, strict=True)
    ]
    parameters += [Parameter(a.kwarg.arg, "var_keyword")] if a.kwarg else []
    return Signature(tuple(parameters))


def _asks_first(test: ast.expr) -> bool:
    """Whether a condition asks which version there is, or whether something is there at all."""
    text = ast.unparse(test).lower()
    return any(word in text for word in ("version", "hasattr(", "find_spec(", "is_available", "_available"))


def _catches_absence(handler: ast.ExceptHandler) -> bool:
    text = "Exception" if handler.type is None else ast.unparse(handler.type)
    caught = {part.strip(" ()").rpartition(".")[2] for part in text.split(",")}
    return bool(caught & {"ImportError", "ModuleNotFoundError", "AttributeError", "Exception", "BaseException"})


def _for_checkers(node: ast.If) -> bool:
    return "TYPE_CHECKING" in ast.unparse(node.test)


def _outside_of_checkers(node: ast.AST) -> Iterator[ast.AST]:
    yield node
    for child in ast.iter_child_nodes(node):
        if isinstance(node, ast.If) and _for_checkers(node) and child in node.body:
            continue
        yield from _outside_of_checkers(child)
