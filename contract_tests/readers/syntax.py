"""The only place that turns text into syntax trees.

CPython 3.11 counts the depth of a syntax tree for the whole process: two threads that parse at the same
time may both end in SystemError. So one parses at a time.
"""

from __future__ import annotations

import ast
import threading
import warnings
from pathlib import PurePosixPath
from typing import Any

import griffe

_lock = threading.Lock()


def module(code: str) -> ast.Module:
    """Raises: SyntaxError."""
    with _lock, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the judged code's escapes and comparisons
        return ast.parse(code)


def expression(text: str) -> ast.expr | None:
    """The tree of an expression, None where the text is none."""
    try:
        with _lock:
            return ast.parse(text, mode="eval").body
    except SyntaxError:
        return None


def literal(text: str) -> Any:
    """The value of a literal, None where the text is none."""
    tree = expression(text)
    try:
        return None if tree is None else ast.literal_eval(tree)
    except (ValueError, TypeError):
        return None


def outline(name: str, path: PurePosixPath, code: str) -> Any:
    """griffe's model of a module. Raises: SyntaxError."""
    with _lock:
        return griffe.visit(name, filepath=path, code=code)
