"""For tests: a package of signatures alone, vLLM most of all, written from a snapshot: every name reads the same.

So that whole runs of the gate, and edits of the sources that it judges, need no network.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from contract_tests.readers.found import ABSENT, UNREAD, Found, Reading, written

_HEAD = """from __future__ import annotations
import abc
import dataclasses
from typing import Any, Literal
from elsewhere import Foreign
"""


@dataclass
class _Class:
    found: Found | None = None
    members: dict[str, Found] = field(default_factory=dict)


@dataclass
class _Module:
    functions: dict[str, Found] = field(default_factory=dict)
    values: dict[str, Found] = field(default_factory=dict)
    classes: dict[str, _Class] = field(default_factory=dict)
    imports: dict[str, str] = field(default_factory=dict)  # name -> module


def stub_files(reading: Reading) -> dict[str, bytes]:
    """path -> content of a package that reads like `reading`."""
    modules: dict[str, _Module] = {}
    there = {home: found for home, found in reading.found.items() if found.status != ABSENT}
    # Classes before their members.
    for home, found in sorted(there.items(), key=lambda item: ("." in item[0].partition(":")[2], item[0])):
        _place(modules, home, found)
    names = set(modules) | {name.rpartition(".")[0] for name in modules}
    packages = {n for name in names for n in _above(name)} | {reading.package}
    files = {f"{name.replace('.', '/')}/__init__.py": b"" for name in packages}
    for name, module in modules.items():
        end = "/__init__.py" if name in packages else ".py"
        files[name.replace(".", "/") + end] = _text(module).encode()
    files[f"{reading.package}/_version.py"] = f"__version__ = version = '{reading.release}'\n".encode()
    files["requirements/common.txt"] = "".join(f"{n}{r}\n" for n, r in reading.requires.items()).encode()
    return files


def write_files(files: Mapping[str, bytes], folder: Path) -> Path:
    """Write a stub to disk; returns `folder`."""
    for path, content in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content)
    return folder


def _above(name: str) -> Iterator[str]:
    while "." in name:
        name = name.rpartition(".")[0]
        yield name


def _place(modules: dict[str, _Module], home: str, found: Found) -> None:
    """Put a name where it is defined, and an import of it where it is looked for."""
    asked, _, qualname = home.partition(":")
    if not qualname:
        modules.setdefault(asked, _Module())
        return
    defined = found.home.partition(":")[0] if found.kind in ("class", "function", "method", "attribute") else asked
    outer, _, inner = qualname.partition(".")
    at = modules.setdefault(asked, _Module())
    if inner:
        # A member stands in the class that is asked for: where it is inherited from does not matter here.
        owner = modules[at.imports[outer]] if outer in at.imports else at
        owner.classes.setdefault(outer, _Class()).members[inner] = found
        return
    if defined != asked:
        at.imports[outer] = defined
        at = modules.setdefault(defined, _Module())
    if found.kind == "class":
        at.classes.setdefault(outer, _Class()).found = found
    elif found.kind == "function":
        at.functions[outer] = found
    else:
        at.values[outer] = found


def _text(module: _Module) -> str:
    lines = [_HEAD, *(f"from {home} import {name}" for name, home in module.imports.items())]
    for name, found in module.values.items():
        lines += _value(name, found.text)
    for name, found in module.functions.items():
        lines += _function(name, found, "")
    for name, owner in module.classes.items():
        lines += _class(name, owner)
    return "\n".join(lines) + "\n"


def _value(name: str, text: str) -> Iterator[str]:
    """A value; a long `Literal` in parts, since the reader keeps short ones only."""
    choices = [choice.strip() for choice in text.removeprefix("Literal[").removesuffix("]").split(",")]
    if len(text) < 200:
        yield f"{name} = {text or 'object()'}"
        return
    parts = [choices[i : i + 5] for i in range(0, len(choices), 5)]
    yield from (f"_{name}{number} = Literal[{', '.join(part)}]" for number, part in enumerate(parts))
    yield f"{name} = Literal[{', '.join(f'_{name}{number}' for number in range(len(parts)))}]"


def _class(name: str, owner: _Class) -> Iterator[str]:
    found = owner.found
    abstract = found.abstract if found is not None else ()
    parameters = found.signature.parameters if found is not None and found.signature is not None else ()
    defaults = dict(found.defaults) if found is not None else {}
    fields = found is not None and found.fields
    if fields:
        yield "@dataclasses.dataclass"
    unread = any(member.status == UNREAD for member in owner.members.values())
    yield f"class {name}({'abc.ABC' if abstract else 'Foreign' if unread else ''}):"
    yield "    pass"
    for parameter in parameters if fields else ():
        only = parameter.kind == "keyword_only"
        options = [f"default={_default(defaults.get(parameter.name, ''))}"] if not parameter.required else []
        options += ["kw_only=True"] if only else []
        value = f" = dataclasses.field({', '.join(options)})" if options else ""
        yield f"    {parameter.name}: Any{value}"
    names = {p.name for p in parameters} if fields else set()
    attributes = [n for n, member in owner.members.items() if member.kind == "attribute" and n not in names]
    if fields:
        yield "    def __post_init__(self):"
    else:
        shown = written(found.signature, defaults) if found is not None and found.signature is not None else []
        yield f"    def __init__({', '.join(['self', *shown])}):"
    yield from (f"        self.{attribute} = None" for attribute in attributes)
    yield "        pass"
    for method, member in owner.members.items():
        if member.kind in ("method", "function"):
            yield from _function(method, member, "    ", method in abstract)
    for method in abstract:
        if method not in owner.members:
            yield from ("    @abc.abstractmethod", f"    def {method}(self): ...")


def _default(text: str) -> str:
    """A default as it was written, or `None` where the snapshot has only a part of it."""
    return "None" if not text or text.endswith("…") else text


def _function(name: str, found: Found, indent: str, abstract: bool = False) -> Iterator[str]:
    shown = written(found.signature, dict(found.defaults)) if found.signature is not None else []
    parameters = ", ".join(["self", *shown] if indent else shown)
    if abstract:
        yield f"{indent}@abc.abstractmethod"
    yield f"{indent}{'async ' if found.is_async else ''}def {name}({parameters}): ..."
