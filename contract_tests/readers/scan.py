"""What griffe does not tell of a file: where imports lead, what is set on `self` outside of `__init__`,
what is defined in several branches, which functions make dataclasses.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from contract_tests.readers import syntax
from contract_tests.readers.facts import AliasFacts


@dataclass
class Scope:
    """A module, class or function body.

    Args:
        imports: name -> where it comes from.
        on_self: attributes assigned on `self` in any method, of a class.
        ambiguous: functions defined more than once with other parameters.
        makes_dataclass: the body calls something named `dataclass`.
        inner: name -> scope of a class or function in it.
    """

    imports: dict[str, AliasFacts] = field(default_factory=dict)
    on_self: dict[str, None] = field(default_factory=dict)
    ambiguous: set[str] = field(default_factory=set)
    makes_dataclass: bool = False
    inner: dict[str, Scope] = field(default_factory=dict)


@dataclass
class Scanned:
    """A file's outermost scope, its star imports, and its code with empty function bodies."""

    scope: Scope
    stars: list[str]
    outline: str
    replaces_itself: bool


def scan(code: str, module: str, is_package: bool) -> Scanned:
    """Read a file's syntax tree.

    Raises:
        SyntaxError: this Python cannot parse it.
    """
    body, lines = syntax.module(code).body, code.splitlines()
    scanner = _Scanner(module, is_package)
    scope = scanner.scope(body, lines)
    return Scanned(scope, scanner.stars, _outline(lines, body), scanner.replaces_itself)


def _outline(code: Sequence[str], body: list[ast.stmt]) -> str:
    """The code without what functions do: a tenth of the size, and griffe needs no more of it."""
    lines = list(code)
    for function in _functions(body):
        begin = function.body[0]
        first = min([begin.lineno, *(d.lineno for d in getattr(begin, "decorator_list", []))])
        last = function.body[-1].end_lineno or 0
        # A body that begins on the last line of the header, as in `) -> (A | B): ...`, is short enough to stay.
        own_line = not code[first - 1].encode()[: begin.col_offset].strip() or first < begin.lineno
        if first > max(function.lineno, _header_end(function)) and own_line:
            indent = " " * (function.col_offset + 1)
            lines[first - 1 : last] = [f"{indent}...", *[""] * (last - first)]
    return "\n".join(lines) + "\n"


def _functions(body: list[ast.stmt]) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    found: list[ast.FunctionDef | ast.AsyncFunctionDef] = []
    for statement in body:
        if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef)):
            found.append(statement)
        elif isinstance(statement, ast.ClassDef):
            found += _functions(statement.body)
        elif isinstance(statement, (ast.If, ast.Try, ast.With)):
            found += _functions([inner for inner, _ in _flat([statement], True)])
    return found


def _header_end(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """The last line of the parameters and the annotation of the result."""
    parts: list[ast.expr | ast.arg] = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    parts += [d for d in (*function.args.defaults, *function.args.kw_defaults, function.returns) if d is not None]
    parts += [a for a in (function.args.vararg, function.args.kwarg) if a is not None]
    return max((part.end_lineno or 0 for part in parts), default=0)


class _Scanner:
    def __init__(self, module: str, is_package: bool) -> None:
        self.module, self.is_package = module, is_package
        self.stars: list[str] = []
        self.replaces_itself = False

    def scope(self, body: list[ast.stmt], code: Sequence[str] = ()) -> Scope:
        scope = Scope()
        first: dict[str, ast.arguments] = {}
        for statement, runtime in _flat(body, True):
            if isinstance(statement, ast.Import):
                for alias in statement.names:
                    whole = alias.name if alias.asname else alias.name.partition(".")[0]
                    self._import(scope, alias.asname or whole, AliasFacts(whole, "", runtime))
            elif isinstance(statement, ast.ImportFrom):
                self._import_from(scope, statement, runtime)
            elif isinstance(statement, ast.Assign):
                self.replaces_itself |= any(_is_own_place(target) for target in statement.targets)
            elif isinstance(statement, ast.ClassDef):
                scope.inner[statement.name] = self.scope(statement.body)
                scope.inner[statement.name].on_self = _set_on_self(statement)
            elif isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef)):
                if "dataclass(" in _source(code, statement):  # functions of the module only
                    scope.inner[statement.name] = Scope(makes_dataclass=_makes_dataclass(statement))
                if not _is_variant(statement):
                    known = first.setdefault(statement.name, statement.args)
                    if known is not statement.args and ast.dump(known) != ast.dump(statement.args):
                        scope.ambiguous.add(statement.name)
        return scope

    def _import(self, scope: Scope, name: str, alias: AliasFacts) -> None:
        known = scope.imports.get(name)
        # An import that happens at run time counts for more than one for type checkers.
        if known is None or alias.runtime or not known.runtime:
            scope.imports[name] = alias

    def _import_from(self, scope: Scope, statement: ast.ImportFrom, runtime: bool) -> None:
        module = self._absolute(statement)
        for alias in statement.names:
            if alias.name == "*":
                if runtime:
                    self.stars.append(module)
            else:
                self._import(scope, alias.asname or alias.name, AliasFacts(module, alias.name, runtime))

    def _absolute(self, statement: ast.ImportFrom) -> str:
        if not statement.level:
            return statement.module or ""
        parts = self.module.split(".")
        kept = parts[: len(parts) - statement.level + (1 if self.is_package else 0)]
        return ".".join([*kept, *([statement.module] if statement.module else [])])


def _is_own_place(target: ast.expr) -> bool:
    return isinstance(target, ast.Subscript) and ast.unparse(target) == "sys.modules[__name__]"


def _flat(body: list[ast.stmt], runtime: bool) -> list[tuple[ast.stmt, bool]]:
    """The statements of a body and of its branches, each with whether it runs outside of type checkers."""
    found: list[tuple[ast.stmt, bool]] = []
    for statement in body:
        if isinstance(statement, ast.If):
            for_checkers = "TYPE_CHECKING" in ast.unparse(statement.test)
            found += _flat(statement.body, runtime and not for_checkers) + _flat(statement.orelse, runtime)
        elif isinstance(statement, ast.Try):
            parts = [statement.body, *(h.body for h in statement.handlers), statement.orelse, statement.finalbody]
            for part in parts:
                found += _flat(part, runtime)
        elif isinstance(statement, ast.With):
            found += _flat(statement.body, runtime)
        else:
            found.append((statement, runtime))
    return found


def _set_on_self(owner: ast.ClassDef) -> dict[str, None]:
    names: dict[str, None] = {}
    for method in owner.body:
        if not isinstance(method, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        arguments = [*method.args.posonlyargs, *method.args.args]
        if arguments:
            own = arguments[0].arg
            for node in _stored_attributes(method.body):
                if isinstance(node.value, ast.Name) and node.value.id == own:
                    names[node.attr] = None
    return names


def _source(lines: Sequence[str], function: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    return "".join(lines[function.lineno - 1 : function.end_lineno])


def _stored_attributes(body: list[ast.stmt]) -> Iterator[ast.Attribute]:
    """Attributes that statements assign to; expressions are not searched, since they assign none."""
    for statement in body:
        if isinstance(statement, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            for target in targets:
                yield from _attributes(target)
        elif isinstance(statement, (ast.For, ast.AsyncFor)):
            yield from _attributes(statement.target)
        elif isinstance(statement, (ast.With, ast.AsyncWith)):
            for item in statement.items:
                if item.optional_vars is not None:
                    yield from _attributes(item.optional_vars)
        elif isinstance(statement, (ast.Expr, ast.Return)):
            continue  # most statements: nothing stands inside
        for name in ("body", "orelse", "finalbody"):
            inner = getattr(statement, name, None)
            if inner:
                yield from _stored_attributes(inner)
        for handler in getattr(statement, "handlers", ()):
            yield from _stored_attributes(handler.body)


def _attributes(target: ast.expr) -> Iterator[ast.Attribute]:
    if isinstance(target, ast.Attribute):
        yield target
    elif not isinstance(target, ast.Name):
        yield from (n for n in ast.walk(target) if isinstance(n, ast.Attribute))


def _makes_dataclass(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    calls = (node.func for node in ast.walk(function) if isinstance(node, ast.Call))
    return any(ast.unparse(called).rpartition(".")[2] == "dataclass" for called in calls)


def _is_variant(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether it is one of several definitions by design: an overload, a property's setter, a registration."""
    names = (ast.unparse(decorator).partition("(")[0].rpartition(".")[2] for decorator in function.decorator_list)
    return any(name in ("overload", "setter", "deleter", "register") for name in names)
