"""What a verb says it does to a call (`reshape`, for the checks) is what it does to one (`apply`, at run time)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("hypothesis")
from hypothesis import given
from hypothesis import strategies as st

from shims.contract import Call
from shims.verbs import (
    Compute,
    Drop,
    Fill,
    Moved,
    Provide,
    Rename,
    Replace,
    Substitute,
    Verb,
    Wrap,
    adapted,
    load,
    reshape,
)

NAMES = st.sampled_from(("alpha", "beta", "gamma", "delta"))


def compute(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, int, list[str]]:
    return "computed", len(args), sorted(kwargs)


def note(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return "noted", instance, wrapped(*args, **kwargs)


def mark(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return "marked", instance, wrapped(*args, **kwargs)


VERBS = st.one_of(
    st.builds(Drop, NAMES),
    st.builds(Rename, NAMES, NAMES),
    st.builds(Fill, NAMES, st.just("filled")),
    st.builds(Compute, NAMES, st.just(f"{__name__}:compute")),
)
ARGUMENTS = st.lists(st.integers(), max_size=3).map(tuple)
KEYWORDS = st.dictionaries(NAMES, st.just("given"))


def received(*args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return args, kwargs


@given(st.lists(VERBS, max_size=5), ARGUMENTS, KEYWORDS)
def test_a_call_arrives_in_the_shape_that_was_checked(verbs: list[Verb], args: tuple[int, ...], kwargs: Any) -> None:
    """Else a signature could confirm a call that is never made."""
    shape = reshape(Call(len(args), tuple(kwargs)), verbs)
    got_args, got_kwargs = adapted(verbs)(received, None, args, kwargs)
    assert len(got_args) == shape.positional
    assert set(got_kwargs) == set(shape.keywords)
    assert len(shape.keywords) == len(set(shape.keywords))


@given(VERBS, ARGUMENTS, KEYWORDS)
def test_a_verb_touches_its_own_keyword_only(verb: Any, args: tuple[int, ...], kwargs: dict[str, Any]) -> None:
    before = dict(kwargs)
    got_args, got = adapted([verb])(received, None, args, kwargs)
    assert kwargs == before  # the caller's own dictionary
    assert got_args == args
    own = {verb.keyword, getattr(verb, "name", verb.keyword)}
    assert {k: v for k, v in got.items() if k not in own} == {k: v for k, v in before.items() if k not in own}


@given(NAMES, ARGUMENTS, KEYWORDS)
def test_what_each_verb_does_to_its_keyword(name: str, args: tuple[int, ...], kwargs: dict[str, Any]) -> None:
    def after(verb: Verb) -> Any:
        return verb.apply(args, kwargs).get(name)

    assert after(Drop(name)) is None
    renamed = Rename(name, "epsilon").apply(args, kwargs)
    assert (renamed.get("epsilon"), name in renamed) == (kwargs.get(name), False)
    assert Rename("epsilon", name).apply(args, {"epsilon": "old", **kwargs})[name] == kwargs.get(name, "old")
    assert after(Fill(name, "filled")) == kwargs.get(name, "filled")  # what the caller gives counts
    assert after(Compute(name, f"{__name__}:compute")) == ("computed", len(args), sorted(kwargs))


@given(st.lists(VERBS, max_size=4), KEYWORDS, st.dictionaries(NAMES, st.just("overridden")))
def test_an_override_wins(verbs: list[Verb], kwargs: dict[str, Any], override: dict[str, str]) -> None:
    """Over the caller and over the verbs: also over one that drops the keyword."""
    got = adapted(verbs, lambda: override)(received, None, (), kwargs)[1]
    assert {name: got[name] for name in override} == override


@given(st.permutations([Drop("alpha"), Wrap(f"{__name__}:note"), Fill("beta", 1)]))
def test_wrapping_code_sees_the_call_reshaped_wherever_it_stands(verbs: list[Verb]) -> None:
    got = adapted(verbs)(received, "owner", (1,), {"alpha": 0})
    assert got == ("noted", "owner", ((1,), {"beta": 1}))


def test_two_wraps_nest_the_later_outside() -> None:
    both: list[Verb] = [Wrap(f"{__name__}:note"), Wrap(f"{__name__}:mark")]
    assert adapted(both)(received, None, (), {}) == ("marked", None, ("noted", None, ((), {})))


@pytest.mark.parametrize("verb", [Moved("a:b"), Provide("a:b"), Wrap("a:b"), Substitute("a:b"), Replace("a:b")])
def test_the_other_verbs_leave_a_call_alone_and_load_nothing_to_say_so(verb: Verb) -> None:
    call = Call(1, ("alpha",))
    assert verb.reshape(call) == call
    assert verb.apply((), {"alpha": 1}) == {"alpha": 1}
    assert "b" in verb.describe()


def test_the_base_verb_has_nothing_to_say() -> None:
    with pytest.raises(NotImplementedError):
        Verb().describe()


def test_a_reference_is_a_module_and_a_name() -> None:
    assert load("shims.verbs:Drop") is Drop
    with pytest.raises(AttributeError, match="nothing_like_it"):
        load("shims.verbs:nothing_like_it")
