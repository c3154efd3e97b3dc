"""`binds` is what Python does: it is what every verdict rests on."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("hypothesis")
from hypothesis import given
from hypothesis import strategies as st

from shims.contract import Call, Parameter, Signature, binds, misfits

NAMES = ("a", "b", "c", "d", "e", "f")
KINDS = ("positional_only", "positional_or_keyword", "var_positional", "keyword_only", "var_keyword")


@st.composite
def signatures(draw: st.DrawFn) -> inspect.Signature:
    """Any signature that Python allows, with up to six parameters."""
    names = draw(st.permutations(NAMES))[: draw(st.integers(0, len(NAMES)))]
    parameters: list[inspect.Parameter] = []
    optional = False
    for name, kind in zip(names, sorted(draw(st.integers(0, 4)) for _ in names), strict=True):
        variable = kind in (2, 4)
        if variable and any(p.kind == kind for p in parameters):
            continue
        default = inspect.Parameter.empty if variable or not draw(st.booleans()) else 0
        if kind < 2:  # after one with a default, all by position have one
            optional = optional or default == 0
            default = 0 if optional else inspect.Parameter.empty
        parameters.append(inspect.Parameter(name, inspect._ParameterKind(kind), default=default))
    return inspect.Signature(parameters)


CALLS = st.builds(Call, st.integers(0, 7), st.lists(st.sampled_from((*NAMES, "g")), unique=True, max_size=7).map(tuple))


def function_of(signature: inspect.Signature) -> Callable[..., None]:
    function: Callable[..., None] = eval(f"lambda {str(signature)[1:-1]}: None")
    return function


def ours(signature: inspect.Signature) -> Signature:
    found = Signature.of(function_of(signature))
    assert found is not None
    return found


def python_accepts(signature: inspect.Signature, call: Call) -> bool:
    """By calling: `inspect.Signature.bind` of some Pythons refuses f(b=1) for `def f(a=0, b=0, /, **rest)`."""
    try:
        function_of(signature)(*range(call.positional), **dict.fromkeys(call.keywords))
    except TypeError:
        return False
    return True


@given(signatures(), CALLS)
def test_binds_is_what_python_does(signature: inspect.Signature, call: Call) -> None:
    assert binds(ours(signature), call) == python_accepts(signature, call), misfits(ours(signature), call)


@given(signatures())
def test_each_parameter_is_read_with_its_kind(signature: inspect.Signature) -> None:
    read = ours(signature)
    assert [(p.name, KINDS.index(p.kind)) for p in read.parameters] == [
        (p.name, int(p.kind)) for p in signature.parameters.values()
    ]


@given(signatures(), CALLS, st.sampled_from(NAMES))
def test_a_keyword_left_out_or_added_changes_that_keyword_alone(
    signature: inspect.Signature, call: Call, name: str
) -> None:
    assert name not in call.without(name).keywords
    assert name in call.adding(name).keywords
    assert call.adding(name).without(name).keywords == call.without(name).keywords


def test_each_reason_is_named() -> None:
    def function(a: int, /, b: int, *, c: int) -> None: ...

    signature = Signature.of(function)
    assert signature is not None
    assert misfits(signature, Call(3, ("b", "z"))) == [
        "takes at most 2 positional arguments, the call gives 3",
        "b is given twice",
        "does not know z",
        "requires c",
    ]


def test_self_is_no_parameter_and_c_code_has_no_signature() -> None:
    class Owner:
        def method(self, a: int) -> None: ...

    assert Signature.of(Owner.method) == Signature((Parameter("a"),))
    assert Signature.of(dict) is None


@pytest.mark.parametrize(
    ("call", "text"), [(Call(), "()"), (Call(2, ("a",)), "(…, …, a=)"), (Call(0, ("a", "b")), "(a=, b=)")]
)
def test_a_call_reads_as_a_call(call: Call, text: str) -> None:
    assert str(call) == text


def test_a_signature_reads_as_python_writes_it() -> None:
    def function(a: int, b: int = 0, *rest: Any, c: int, **more: Any) -> None: ...

    def keywords(*, c: int) -> None: ...

    assert str(Signature.of(function)) == "(a, b=…, *rest, c, **more)"
    assert str(Signature.of(keywords)) == "(*, c)"
