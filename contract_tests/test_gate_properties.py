"""What must hold of any two signatures, any call, and any text."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("hypothesis")
from hypothesis import given, settings
from hypothesis import strategies as st

from contract_tests.gate.bumps import said_in
from contract_tests.gate.changes import KINDS, changes, misplaced
from contract_tests.readers.found import FOUND, Found
from shims.contract import Call, Parameter, Signature, binds

_NAMES = ("alpha", "beta", "gamma", "delta", "epsilon")
_KINDS = ("positional_only", "positional_or_keyword", "var_positional", "keyword_only", "var_keyword")


@st.composite
def signatures(draw: st.DrawFn) -> Signature:
    """One that Python would accept."""
    names = draw(st.lists(st.sampled_from(_NAMES), unique=True, max_size=5))
    kinds = sorted(draw(st.lists(st.sampled_from(_KINDS), min_size=len(names), max_size=len(names))), key=_KINDS.index)
    seen_default = False
    parameters: list[Parameter] = []
    for name, kind in zip(names, kinds, strict=True):
        if kind.startswith("var_"):
            if all(p.kind != kind for p in parameters):
                parameters.append(Parameter(name, kind))
            continue
        optional = draw(st.booleans())
        if kind != "keyword_only":
            optional = seen_default = optional or seen_default
        parameters.append(Parameter(name, kind, not optional))
    return Signature(tuple(parameters))


_CALLS = st.builds(
    lambda count, names: Call(count, tuple(names)), st.integers(0, 4), st.lists(st.sampled_from(_NAMES), unique=True)
)


def _found(signature: Signature) -> Found:
    return Found(FOUND, "function", "vllm.m:f", signature)


@settings(max_examples=500, deadline=None)
@given(signatures(), signatures(), _CALLS)
def test_a_call_that_no_longer_binds_has_a_change_that_can_break_it(
    before: Signature, after: Signature, call: Call
) -> None:
    found = changes(_found(before), _found(after))
    assert all(change.kind in KINDS for change in found)
    # What went into **kwargs before may meet a new name now; nobody can tell what it meant there.
    if binds(before, call) and not binds(after, call) and not before.takes_any_keyword:
        assert any(change.can_break for change in found), (str(before), str(after), str(call))


@settings(max_examples=300, deadline=None)
@given(signatures(), signatures())
def test_nothing_changed_only_where_both_are_the_same(before: Signature, after: Signature) -> None:
    assert (changes(_found(before), _found(after)) == []) == (before == after)


@settings(max_examples=300, deadline=None)
@given(signatures(), _CALLS)
def test_arguments_of_the_same_signature_are_never_misplaced(signature: Signature, call: Call) -> None:
    assert misplaced(signature, signature, call) == ""


@settings(max_examples=300, deadline=None)
@given(st.text(st.characters(codec="utf-8"), max_size=300), st.integers(0, 20))
def test_no_text_is_too_odd_to_be_a_diff(text: str, line: int) -> None:
    for given_text in (text, f"+++ b/r.txt\n@@ -1 +{line} @@\n+{text}", f"@@ -1 +1 @@\n+vllm{text}"):
        list(said_in(given_text))


@given(
    st.sampled_from(("==", ">=", "~=", "<")), st.sampled_from(("0.33.0", "0.32", "1.0rc1", "0.33.0+cu130")), st.data()
)
def test_a_requirement_is_read_wherever_it_stands(operator: str, version: str, data: Any) -> None:
    before = data.draw(st.sampled_from(("", '    "', "RUN pip install ", "- ", "torch>=2 ", "'")))
    after = data.draw(st.sampled_from(("", '",', " ; python_version<'3.14'", " \\", "  # why", "'")))
    text = f"+++ b/r.txt\n@@ -1 +1 @@\n+{before}vllm{operator}{version}{after}\n"
    assert [new.what for _, new in said_in(text)] == [f"{operator}{version}"]
