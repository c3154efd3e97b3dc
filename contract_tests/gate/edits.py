"""Random edits of judged sources. Each knows, from how it was made, whether it breaks the use at which it aims."""

from __future__ import annotations

import ast
import copy
import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from contract_tests.judge import Judgement
from contract_tests.readers import syntax
from contract_tests.readers.found import FOUND
from contract_tests.readers.library import Library
from shims.adaptations import ADAPTATIONS
from shims.contract import Call, Verdict
from shims.verbs import Provide, Replace, reshape

_Option = TypeVar("_Option", str, tuple[str, str])
Function = ast.FunctionDef | ast.AsyncFunctionDef
Node = Function | ast.ClassDef | ast.AnnAssign


@dataclass(frozen=True)
class Edit:
    """One edit.

    Args:
        kind: what was done.
        key: touchpoint at which it aims.
        harmful: whether the use is broken by it, or can no longer be judged.
        files: path -> new content.
    """

    kind: str
    key: str
    harmful: bool
    files: dict[str, bytes]

    def __str__(self) -> str:
        return f"{self.kind} ({'harmful' if self.harmful else 'harmless'}) at {self.key} in {', '.join(self.files)}"


@dataclass(frozen=True)
class Aim:
    """A use, the definition that it leads to, and the call as it arrives there.

    Args:
        key: of the touchpoint.
        call: its shape after the rows, None where it is not called.
        path, module, code: of the file.
        node: the function, class or field.
        owner: class in which it stands, None at the top of the module.
        init: what a call of the class takes, where that is a function.
        complete: whether the module has every name that is looked up in it.
    """

    key: str
    call: Call | None
    path: str
    module: str
    code: str
    node: Node
    owner: ast.ClassDef | None
    init: Function | None
    complete: bool

    @property
    def signature(self) -> Function | None:
        """The function whose parameters a caller fills."""
        return self.node if isinstance(self.node, (ast.FunctionDef, ast.AsyncFunctionDef)) else self.init

    @property
    def names(self) -> list[str]:
        """Parameters that a caller can name, without `self`."""
        if self.signature is None:
            return []
        arguments = self.signature.args
        given = [a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
        return given[1:] if self.owner is not None or self.init is not None else given

    @property
    def optional(self) -> set[str]:
        """Those that have a default."""
        if self.signature is None:
            return set()
        a = self.signature.args
        by_position = [*a.posonlyargs, *a.args]
        named = {arg.arg for arg in by_position[len(by_position) - len(a.defaults) :]}
        return named | {arg.arg for arg, d in zip(a.kwonlyargs, a.kw_defaults, strict=True) if d is not None}

    @property
    def given(self) -> set[str]:
        """Those that the call fills."""
        return set() if self.call is None else {*self.names[: self.call.positional], *self.call.keywords}


def aims(library: Library, judged: list[Judgement], speculators: str) -> list[Aim]:
    """The uses that can be aimed at: those that hold, and that no row replaces as a whole."""
    incomplete = {one.touchpoint.module for one in judged if one.found.home.partition(":")[0] != one.touchpoint.module}
    found = []
    for one in judged:
        touchpoint = one.touchpoint
        rows = [row for row in ADAPTATIONS if row.name in one.rows]
        replaced = touchpoint.through or any(isinstance(row.verb, (Provide, Replace)) for row in rows)
        if one.verdict is not Verdict.HOLDS or touchpoint.package != "vllm" or replaced or one.found.status != FOUND:
            continue
        call = touchpoint.call_for(speculators)
        shape = None if call is None else reshape(call, [row.verb for row in rows if row.touchpoint == touchpoint.key])
        aim = _aim(library, touchpoint.key, one.found.home, shape, incomplete)
        if aim is not None:
            found.append(aim)
    return found


def _aim(library: Library, key: str, home: str, call: Call | None, incomplete: set[str]) -> Aim | None:
    module, _, qualname = home.partition(":")
    path = library.path_of(module)
    if path is None or not qualname:
        return None
    code = library.tree.read(path).decode()
    body: list[ast.stmt] = syntax.module(code).body
    owner: ast.ClassDef | None = None
    node: Node | None = None
    for name in qualname.split("."):
        same = [entry for entry in body if _named(entry) == name]
        if len(same) != 1 or any(_assigns(entry, name) for entry in body):
            return None  # defined in a branch, on `self`, or more than once: no edit of one place decides
        if isinstance(node, ast.ClassDef):
            owner = node
        node = same[0] if isinstance(same[0], Node) else None
        body = node.body if isinstance(node, ast.ClassDef) else []
    if node is None:
        return None
    inits = [e for e in body if isinstance(e, Function) and e.name == "__init__"]
    return Aim(
        key, call, path, module, code, node, owner, inits[0] if len(inits) == 1 else None, module not in incomplete
    )


def _named(node: ast.stmt) -> str:
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return node.name
    return node.target.id if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) else ""


def _assigns(node: ast.stmt, name: str) -> bool:
    targets = node.targets if isinstance(node, ast.Assign) else []
    return any(isinstance(target, ast.Name) and target.id == name for target in targets)


def random_edits(found: list[Aim], count: int, seed: int) -> Iterator[Edit]:
    """As many edits as asked for, each of a kind drawn by lot, at a use that admits it."""
    chance = random.Random(seed)
    made = 0
    while made < count:
        kind = chance.choice(_KINDS)
        edits = (kind(aim, chance) for aim in chance.sample(found, len(found)))
        edit = next((edit for edit in edits if edit is not None), None)
        if edit is not None:
            made += 1
            yield edit


# --- edits of the definition as a whole ----------------------------------------------------------


def _rename(aim: Aim, chance: random.Random) -> Edit | None:
    """The definition has another name. A method may be inherited from a base then: those are left out."""
    if _inherits(aim):
        return None
    node = copy.deepcopy(aim.node)
    if isinstance(node, ast.AnnAssign):
        assert isinstance(node.target, ast.Name)
        node.target.id += "_renamed"
    else:
        node.name += "_renamed"
    return _edit("rename", aim, True, _replaced(aim, aim.node, node))


def _remove(aim: Aim, chance: random.Random) -> Edit | None:
    if _inherits(aim):
        return None
    return _edit("remove", aim, True, _replaced(aim, aim.node, ast.Pass()))


def _move(aim: Aim, chance: random.Random) -> Edit | None:
    """To a new module beside it; half of the time an import stays behind, and nobody notices."""
    if aim.owner is not None or isinstance(aim.node, ast.AnnAssign):
        return None
    new = f"{aim.module.rpartition('.')[0]}.new_home"
    stays = chance.random() < 0.5
    left = ast.parse(f"from {new} import {aim.node.name}").body[0] if stays else ast.Pass()
    moved = "from __future__ import annotations\nimport dataclasses\nfrom dataclasses import dataclass\n"
    # What its bases and decorators are called has to be known there, too.
    moved += f"from {aim.module} import *\n" + "\n".join(_imports(aim)) + "\n" + ast.unparse(aim.node) + "\n"
    edit = _edit("move, import stays" if stays else "move", aim, not stays, _replaced(aim, aim.node, left))
    return Edit(edit.kind, edit.key, edit.harmful, {**edit.files, f"{new.replace('.', '/')}.py": moved.encode()})


def _imports(aim: Aim) -> list[str]:
    """The module's own imports and the names that it defines, for a definition that leaves it."""
    body = syntax.module(aim.code).body
    lines = [ast.unparse(e) for e in body if isinstance(e, (ast.Import, ast.ImportFrom)) and not _is_future(e)]
    own = [_named(e) for e in body if _named(e)]
    return [*lines, *(f"from {aim.module} import {name}" for name in own if name != _named(aim.node))]


def _is_future(node: ast.stmt) -> bool:
    return isinstance(node, ast.ImportFrom) and node.module == "__future__"


def _wrap(aim: Aim, chance: random.Random) -> Edit | None:
    """In a decorator: an unknown one may change what it takes, one that is known does not."""
    if not isinstance(aim.node, (ast.FunctionDef, ast.AsyncFunctionDef)) or aim.call is None:
        return None
    known = chance.random() < 0.5
    node = copy.deepcopy(aim.node)
    node.decorator_list.insert(0, ast.Name("override" if known else "reworked", ast.Load()))
    return _edit("wrap, harmless" if known else "wrap", aim, not known, _replaced(aim, aim.node, node))


def _asynchronous(aim: Aim, chance: random.Random) -> Edit | None:
    if not isinstance(aim.node, ast.FunctionDef) or aim.call is None:
        return None
    fields = {field: getattr(aim.node, field) for field in aim.node._fields}
    return _edit("make async", aim, True, _replaced(aim, aim.node, ast.AsyncFunctionDef(**fields)))


def _lazily(aim: Aim, chance: random.Random) -> Edit | None:
    """The module answers names at run time: instead of the definition, or beside it."""
    if aim.owner is not None or isinstance(aim.node, ast.AnnAssign) or "def __getattr__" in aim.code:
        return None
    beside = chance.random() < 0.5
    if beside and not aim.complete:
        return None  # names that were looked up in vain are answered now: nobody can tell with what
    code = aim.code if beside else _replaced(aim, aim.node, ast.Pass())
    code += "\n\ndef __getattr__(name):\n    return make(name)\n"
    return _edit("__getattr__ beside" if beside else "__getattr__ instead", aim, not beside, code)


# --- edits of what it takes ----------------------------------------------------------------------


def _rename_parameter(aim: Aim, chance: random.Random) -> Edit | None:
    name = _choice(chance, aim.names)
    if aim.call is None or name is None:
        return None
    by_position = name in aim.names[: aim.call.positional]
    harmful = not by_position and (name in aim.given or name not in aim.optional)

    def change(arguments: ast.arguments) -> None:
        _argument(arguments, name).arg = f"{name}_renamed"

    return _with_arguments("rename parameter", aim, harmful, change)


def _remove_parameter(aim: Aim, chance: random.Random) -> Edit | None:
    """One that the call gives, or one that it leaves to its default."""
    name = _choice(chance, [n for n in aim.names if n in aim.given or n in aim.optional])
    if aim.call is None or name is None or (aim.signature is not None and aim.signature.args.kwarg):
        return None
    if name in aim.names[: aim.call.positional] and aim.signature is not None and aim.signature.args.vararg:
        return None

    def change(arguments: ast.arguments) -> None:
        _drop(arguments, name)

    rest = [n for n in aim.names if n != name]
    # By position, those behind it move up; the last one of the call then has no place, or another's.
    harmful = name in aim.given
    if not harmful and name in aim.names[: aim.call.positional]:
        return None
    return _with_arguments("remove parameter", aim, harmful, change) if rest is not None else None


def _require(aim: Aim, chance: random.Random) -> Edit | None:
    """Take a default away; those by position before it lose theirs as well, as Python wants."""
    name = _choice(chance, sorted(aim.optional))
    if aim.call is None or name is None or aim.signature is None:
        return None
    a = aim.signature.args
    by_position = [x.arg for x in (*a.posonlyargs, *a.args)]
    lost = {name}
    if name in by_position:
        lost |= set(by_position[: by_position.index(name)]) & aim.optional

    def change(arguments: ast.arguments) -> None:
        if name in by_position:
            arguments.defaults = arguments.defaults[len(lost) :]
        else:
            arguments.kw_defaults[[x.arg for x in arguments.kwonlyargs].index(name)] = None

    return _with_arguments("make required", aim, bool(lost - aim.given), change)


def _add_parameter(aim: Aim, chance: random.Random) -> Edit | None:
    if aim.call is None or aim.signature is None:
        return None
    required = chance.random() < 0.5

    def change(arguments: ast.arguments) -> None:
        arguments.kwonlyargs.append(ast.arg("brand_new"))
        arguments.kw_defaults.append(None if required else ast.Constant(None))

    return _with_arguments("add required" if required else "add optional", aim, required, change)


def _reorder(aim: Aim, chance: random.Random) -> Edit | None:
    """Swap two neighbours that both have a default, or both have none."""
    if aim.call is None or aim.signature is None:
        return None
    names = [x.arg for x in aim.signature.args.args if x.arg in aim.names]
    pairs = [
        (left, right) for left, right in itertools.pairwise(names) if (left in aim.optional) == (right in aim.optional)
    ]
    pair = _choice(chance, pairs)
    if pair is None or aim.signature.args.posonlyargs:
        return None

    def change(arguments: ast.arguments) -> None:
        order = [x.arg for x in arguments.args]
        left, right = order.index(pair[0]), order.index(pair[1])
        arguments.args[left], arguments.args[right] = arguments.args[right], arguments.args[left]

    harmful = bool(set(pair) & set(aim.names[: aim.call.positional]))
    return _with_arguments("reorder", aim, harmful, change)


def _change_default(aim: Aim, chance: random.Random) -> Edit | None:
    name = _choice(chance, sorted(aim.optional))
    if name is None or aim.signature is None:
        return None

    def change(arguments: ast.arguments) -> None:
        new = ast.Constant("another default")
        by_position = [x.arg for x in (*arguments.posonlyargs, *arguments.args)]
        if name in by_position:
            arguments.defaults[by_position.index(name) - len(by_position)] = new
        else:
            arguments.kw_defaults[[x.arg for x in arguments.kwonlyargs].index(name)] = new

    return _with_arguments("change default", aim, False, change)


# --- edits of fields -----------------------------------------------------------------------------


def _field(aim: Aim, chance: random.Random) -> Edit | None:
    """A field of a class whose fields are its constructor: renamed, made required, or one more."""
    if not isinstance(aim.node, ast.ClassDef) or aim.init is not None or aim.call is None:
        return None
    fields = [e for e in aim.node.body if isinstance(e, ast.AnnAssign) and "ClassVar" not in ast.unparse(e.annotation)]
    given = [e for e in fields if _named(e) in aim.call.keywords]
    if not given or not aim.node.decorator_list:
        return None
    what = chance.choice(("rename", "add optional", "add required"))
    if what == "rename":
        old = chance.choice(given)
        new = copy.deepcopy(old)
        assert isinstance(new.target, ast.Name)
        new.target.id += "_renamed"
        return _edit("rename field", aim, True, _replaced(aim, old, new))
    options = "kw_only=True" + (", default=None" if what == "add optional" else "")
    added = f"import dataclasses\n{ast.unparse(fields[-1])}\nbrand_new: int = dataclasses.field({options})"
    last = ast.Module([e for e in ast.parse(added).body if not isinstance(e, ast.Import)], [])
    code = _replaced(aim, fields[-1], last)
    return _edit(f"{what} field", aim, what == "add required", code)


# --- edits that nobody should notice -------------------------------------------------------------


def _comment(aim: Aim, chance: random.Random) -> Edit | None:
    return _edit("comment", aim, False, f"# A remark.\n{aim.code}\n\nUNRELATED = 1\n")


def _annotate(aim: Aim, chance: random.Random) -> Edit | None:
    name = _choice(chance, aim.names)
    if name is None:
        return None

    def change(arguments: ast.arguments) -> None:
        _argument(arguments, name).annotation = ast.Constant("AnotherType")

    return _with_arguments("annotate", aim, False, change)


def _neighbour(aim: Aim, chance: random.Random) -> Edit | None:
    """Another definition of the module goes that nobody looks up."""
    code = aim.code + "\n\nclass BrandNew:\n    def schedule(self, *, required): ...\n"
    return _edit("add a neighbour", aim, False, code)


_KINDS: tuple[Callable[[Aim, random.Random], Edit | None], ...] = (
    *(_rename, _remove, _move, _wrap, _asynchronous, _lazily),
    *(_rename_parameter, _remove_parameter, _require, _add_parameter, _reorder, _change_default),
    *(_field, _comment, _annotate, _neighbour),
)


# --- how code is changed -------------------------------------------------------------------------


def _edit(kind: str, aim: Aim, harmful: bool, code: str) -> Edit:
    return Edit(kind, aim.key, harmful, {aim.path: code.encode()})


def _choice(chance: random.Random, options: list[_Option]) -> _Option | None:
    return chance.choice(options) if options else None


def _inherits(aim: Aim) -> bool:
    """Whether the name may stay without its definition: from a base, or because a method sets it on `self`."""
    if isinstance(aim.node, ast.AnnAssign) and f"self.{_named(aim.node)} =" in aim.code:
        return True
    return aim.owner is not None and any(ast.unparse(b).rpartition(".")[2] not in _BARE for b in aim.owner.bases)


_BARE = frozenset(("ABC", "object", "Enum", "IntEnum", "BaseModel"))


def _argument(arguments: ast.arguments, name: str) -> ast.arg:
    found = (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
    return next(argument for argument in found if argument.arg == name)


def _drop(arguments: ast.arguments, name: str) -> None:
    for argument, at in [(a, i) for i, a in enumerate(arguments.kwonlyargs) if a.arg == name]:
        arguments.kwonlyargs.remove(argument)
        del arguments.kw_defaults[at]
    by_position = [*arguments.posonlyargs, *arguments.args]
    names = [argument.arg for argument in by_position]
    if name in names:
        from_end = names.index(name) - len(names)
        if -from_end <= len(arguments.defaults):
            del arguments.defaults[from_end]
        for group in (arguments.posonlyargs, arguments.args):
            group[:] = [argument for argument in group if argument.arg != name]


def _with_arguments(kind: str, aim: Aim, harmful: bool, change: Callable[[ast.arguments], None]) -> Edit | None:
    if aim.signature is None:
        return None
    node = copy.deepcopy(aim.signature)
    change(node.args)
    return _edit(kind, aim, harmful, _replaced(aim, aim.signature, node))


def _replaced(aim: Aim, old: ast.stmt, new: ast.AST) -> str:
    """The code with one statement, decorators included, written anew."""
    lines = aim.code.splitlines()
    first = min([old.lineno, *(d.lineno for d in getattr(old, "decorator_list", []))])
    indent = " " * old.col_offset
    text = "\n".join(indent + line for line in ast.unparse(ast.fix_missing_locations(new)).splitlines())
    return "\n".join([*lines[: first - 1], text, *lines[old.end_lineno or old.lineno :]]) + "\n"
