"""Each kind of change gets its name, and no other."""

from __future__ import annotations

from dataclasses import replace

import pytest

from contract_tests.gate.changes import KINDS, Change, changes
from contract_tests.readers.found import ABSENT, FOUND, OPAQUE, UNREAD, Found, parsed

_HOME = "vllm.m:f"


def _function(*parts: str, home: str = _HOME, fields: bool = False) -> Found:
    signature, defaults = parsed(list(parts))
    return Found(FOUND, "function", home, signature, tuple(defaults.items()), fields=fields)


_CASES = {
    "removed": (_function("a"), Found(ABSENT, detail="gone"), Change("removed", "f", "gone")),
    "added": (Found(ABSENT, detail="x"), _function("a"), Change("added", "f")),
    "opaque": (_function("a"), Found(OPAQUE, home=_HOME, detail="wrapped"), Change("unreadable", "f", "wrapped")),
    "unread": (_function("a"), Found(UNREAD, home=_HOME, detail="new"), Change("unreadable", "f", "new")),
    "shape": (
        _function("a"),
        replace(_function("a"), shape=OPAQUE, detail="d"),
        Change("unreadable", "f", "d"),
    ),
    "parameter gone": (_function("a", "b"), _function("a"), Change("parameter removed", "b")),
    "required": (_function("a"), _function("a", "b"), Change("parameter added, required", "b")),
    "optional": (_function("a"), _function("a", "b=1"), Change("parameter added, optional", "b")),
    "any keyword": (_function("a"), _function("a", "**kw"), Change("parameter added, optional", "**kw")),
    "alike": (
        _function("available_memory", "b"),
        _function("b", "available_mem"),
        Change("parameter renamed", "available_memory", "-> available_mem"),
    ),
    "in its place": (
        _function("a", "memory"),
        _function("a", "blocks"),
        Change("parameter renamed", "memory", "-> blocks"),
    ),
    "became required": (_function("a=None"), _function("a"), Change("became required", "a", "was None")),
    "became optional": (_function("a"), _function("a=None"), Change("became optional", "a", "default None")),
    "default": (_function("a=1"), _function("a=2"), Change("default changed", "a", "1 -> 2")),
    "keyword-only": (
        _function("a", "b"),
        _function("a", "*", "b"),
        Change("became keyword-only", "b", "was positional_or_keyword"),
    ),
    "positional-only": (
        _function("a"),
        _function("a", "/"),
        Change("became positional-only", "a", "was positional_or_keyword"),
    ),
    "by name again": (
        _function("*", "a"),
        _function("a"),
        Change("parameter kind changed", "a", "was keyword_only"),
    ),
    "order": (_function("a", "b"), _function("b", "a"), Change("order changed", "f", "a, b -> b, a")),
    "async": (_function("a"), replace(_function("a"), is_async=True), Change("became async", "f")),
    "not async": (replace(_function("a"), is_async=True), _function("a"), Change("no longer async", "f")),
    "abstract": (
        replace(_function(), abstract=("x",)),
        replace(_function(), abstract=("x", "y")),
        Change("abstract method added", "y"),
    ),
    "concrete": (
        replace(_function(), abstract=("x",)),
        replace(_function(), abstract=()),
        Change("abstract method gone", "x"),
    ),
    "choice gone": (
        replace(_function(), text="Literal['a', 'b']"),
        replace(_function(), text="Literal['a']"),
        Change("choice removed", "'b'"),
    ),
    "choice new": (
        replace(_function(), text="Literal['a']"),
        replace(_function(), text="Literal['a', 'b']"),
        Change("choice added", "'b'"),
    ),
    "another home": (
        _function("a"),
        _function("a", home="vllm.n:f"),
        Change("defined elsewhere", "f", "vllm.m -> vllm.n"),
    ),
    "field": (_function("a", fields=True), _function("a", "b=1", fields=True), Change("field added, optional", "b")),
    "field gone": (_function("a", "b", fields=True), _function("a", fields=True), Change("field removed", "b")),
    "field required": (
        _function("a", fields=True),
        _function("a", "b", fields=True),
        Change("field added, required", "b"),
    ),
    "field renamed": (
        _function("block_size", fields=True),
        _function("blocks_size", fields=True),
        Change("field renamed", "block_size", "-> blocks_size"),
    ),
    "another object": (
        _function(),
        replace(_function(), kind="class"),
        Change("became another kind of object", "f", "function -> class"),
    ),
}


@pytest.mark.parametrize("name", _CASES)
def test_one_difference_has_one_name(name: str) -> None:
    before, after, expected = _CASES[name]
    assert changes(before, after) == [expected]


def test_every_kind_is_produced_somewhere() -> None:
    """Those of moves and bodies are made where sources are at hand."""
    elsewhere = {"moved", "renamed", "body changed", "namesake differs"}
    assert {change.kind for *_, change in _CASES.values()} == set(KINDS) - elsewhere


def test_nothing_changed_is_nothing() -> None:
    for found in (_function("a", "b=1", "*", "c"), Found(ABSENT, detail="x"), Found(UNREAD, detail="y")):
        assert changes(found, found) == []


def test_what_can_break_comes_first() -> None:
    found = changes(_function("a", "b=1"), _function("b=2", "c"))
    assert [change.can_break for change in found] == sorted((change.can_break for change in found), reverse=True)
    assert found[0].can_break and not found[-1].can_break


def test_a_name_that_is_defined_elsewhere_but_still_offered_breaks_nobody() -> None:
    assert not any(change.can_break for change in changes(_function("a"), _function("a", home="vllm.other:f")))
