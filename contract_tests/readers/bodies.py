"""What a function does, as text and as a fingerprint that formatting, comments, messages and annotations leave alone.

The fingerprint is taken of source text, not of a syntax tree dumped: that looks different on each Python.
"""

from __future__ import annotations

import ast
import hashlib
import io
import re
import textwrap
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from contract_tests.readers import syntax
from contract_tests.readers.library import Library
from contract_tests.readers.modules import MOST_PARSED
from contract_tests.readers.resolve import Resolver

# Part of the cache's key: raise it when another fingerprint is made of the same code.
VERSION = 3


@dataclass(frozen=True)
class Body:
    """One function.

    Args:
        home: where it is defined.
        lines: its source without docstrings, comments and log messages.
        fingerprint: 16 hexadecimal digits.
    """

    home: str
    lines: tuple[str, ...]
    fingerprint: str


def read_body(library: Library, home: str) -> Body | None:
    """The function at `module:qualified.name`, inherited or re-exported ones too; None where it cannot be read.

    Raises:
        SourceError: a file that the release has cannot be fetched.
    """
    module, _, qualname = home.partition(":")
    body = _in_module(library, module, qualname)
    if body is not None or not library.has(module):
        return body
    found = Resolver(library).find(home)
    module, _, qualname = found.home.partition(":")
    return _in_module(library, module, qualname) if found.kind in ("function", "method") else None


def fingerprint(library: Library, home: str) -> str:
    """The fingerprint of the function at a home, '' where it cannot be read.

    Raises:
        SourceError: a file that the release has cannot be fetched.
    """
    body = read_body(library, home)
    return body.fingerprint if body is not None else ""


def _in_module(library: Library, module: str, qualname: str) -> Body | None:
    """The function, if this file itself has it; kept by content hash."""
    sha256 = library.hash_of(module)
    if not sha256:
        return None
    key = ("bodies", str(VERSION), sha256[:2], f"{sha256}-{qualname}")
    kept = library.store.get(*key) if library.store is not None else None
    if kept is not None:
        return Body(f"{module}:{qualname}", tuple(kept["lines"]), kept["fingerprint"])
    content = library.source(module)
    body = _in_content(content, module, qualname) if content is not None else None
    if body is not None and library.store is not None:
        library.store.put({"lines": body.lines, "fingerprint": body.fingerprint}, *key)
    return body


@lru_cache(maxsize=256)
def _in_content(content: bytes, module: str, qualname: str) -> Body | None:
    if len(content) > MOST_PARSED:
        return None
    home, names = f"{module}:{qualname}", qualname.split(".")
    try:
        code = content.decode("utf-8-sig")
        text = _sliced(code, names)
        try:
            return None if text is None else _body(home, text)
        except SyntaxError:  # a text within the function begins further left than the function
            text = _parsed_out(code, names)
            return None if text is None else _body(home, text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _body(home: str, text: str) -> Body:
    tree = syntax.module(text)
    comments = list(_comments(text))
    talk = [*comments, *_talk(tree)]
    shown = _without(text, talk)
    bare = "".join(_without(text, [*talk, *_annotations(tree, text)]).split()).replace(",)", ")").replace(",]", "]")
    lines = tuple(line.rstrip() for line in shown.splitlines() if line.strip())
    return Body(home, lines, hashlib.sha256(bare.encode()).hexdigest()[:16])


# --- finding the text, without a syntax tree of a whole file ---------------------------------------


def _sliced(code: str, names: list[str]) -> str | None:
    """The text of a function, dedented, decorators included; None where the file has none of this name."""
    lines = code.splitlines()
    start, end, indent = 0, len(lines), -1
    for name in names[:-1]:
        found = _header(lines, start, end, indent, rf"class\s+{name}\b")
        if found is None:
            return None
        indent = _indent(lines[found])
        start, end = found + 1, _end(lines, found, end, indent)
    found = _header(lines, start, end, indent, rf"(async\s+)?def\s+{names[-1]}\b")
    if found is None:
        return None
    last = _end(lines, found, end, _indent(lines[found]))
    first = found
    while first > start and lines[first - 1].lstrip().startswith("@"):
        first -= 1
    return textwrap.dedent("\n".join(lines[first:last])) + "\n"


def _parsed_out(code: str, names: list[str]) -> str | None:
    """The same by the syntax tree of the whole file; not dedented, but under a line that lets it stand."""
    body: list[ast.stmt] = syntax.module(code).body
    found: ast.stmt | None = None
    for name in names:
        found = next((e for e in body if getattr(e, "name", "") == name), None)
        body = found.body if isinstance(found, ast.ClassDef) else []
    if not isinstance(found, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return None
    first = min([found.lineno, *(decorator.lineno for decorator in found.decorator_list)])
    lines = code.splitlines()[first - 1 : found.end_lineno]
    return "\n".join(["if True:"] * bool(found.col_offset) + lines) + "\n"


def _header(lines: list[str], start: int, end: int, above: int, pattern: str) -> int | None:
    """The first line in a range that matches, of those indented least (`above` is what they are nested in)."""
    word = re.compile(rf"\s*{pattern}")
    found = [i for i in range(start, end) if word.match(lines[i]) and _indent(lines[i]) > above]
    return min(found, key=lambda i: (_indent(lines[i]), i), default=None)


def _end(lines: list[str], header: int, end: int, indent: int) -> int:
    """Where the block under a header ends: at a line that is not indented more and does not close a bracket."""
    for i in range(header + 1, end):
        text = lines[i].lstrip()
        if text and _indent(lines[i]) <= indent and not text.startswith((")", "]", "}", "#")):
            return i
    return end


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


# --- what is left out: spans of (first line, column in bytes, last line, column in bytes) ------------

Span = tuple[int, int, int, int]


def _comments(text: str) -> Iterator[Span]:
    lines = text.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            line, column = token.start
            start = len(lines[line - 1][:column].encode())
            yield line, start, line, len(lines[line - 1].encode())


def _talk(tree: ast.Module) -> Iterator[Span]:
    """Docstrings, and statements that only log."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and node.body:
            first = node.body[0]
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                yield _span(first)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            called = node.value.func
            if isinstance(called, ast.Attribute) and isinstance(called.value, ast.Name) and called.value.id == "logger":
                yield _span(node)


def _annotations(tree: ast.Module, text: str) -> Iterator[Span]:
    lines = [line.encode() for line in text.splitlines()]
    for node in ast.walk(tree):
        if isinstance(node, ast.arg) and node.annotation is not None:
            yield node.lineno, node.col_offset + len(node.arg.encode()), *_span(node.annotation)[2:]
        elif isinstance(node, ast.AnnAssign):
            yield *_span(node.target)[2:], *_span(node.annotation)[2:]
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.returns is not None:
            line, column, *end = _span(node.returns)
            arrow = lines[line - 1].rfind(b"->", 0, column)
            yield line, arrow if arrow >= 0 else column, end[0], end[1]


def _span(node: ast.expr | ast.stmt) -> Span:
    return node.lineno, node.col_offset, node.end_lineno or node.lineno, node.end_col_offset or node.col_offset


def _without(text: str, spans: list[Span]) -> str:
    lines = [bytearray(line.encode()) for line in text.splitlines()]
    for first, start, last, end in spans:
        for number in range(first, last + 1):
            line = lines[number - 1]
            begin = start if number == first else 0
            stop = end if number == last else len(line)
            line[begin:stop] = b" " * (stop - begin)
    return "\n".join(line.decode() for line in lines)
