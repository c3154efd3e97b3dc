"""A vLLM that would not take the direct engine's calls is refused before a model is loaded."""

from __future__ import annotations

import sys
import types
from dataclasses import replace
from importlib.util import find_spec

import pytest

from shims.contract import Call
from shims.direct.agreement import require_agreement
from shims.direct.touchpoints import DIRECT
from shims.errors import DriftError
from shims.touchpoints import Touchpoint

HOME = "specshim_drifting_engine:Engine.add_request"


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> type:
    module = types.ModuleType("specshim_drifting_engine")

    class Engine:
        def add_request(self, request_id: str, prompt: object) -> None: ...

    module.Engine = Engine  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return Engine


def _use(call: Call, home: str = HOME, vllm: str = "") -> Touchpoint:
    return Touchpoint("one", home, "call", "shims/direct/engine.py", "use", (("", call),), "", vllm)


def test_a_call_that_binds_is_taken(engine: type) -> None:
    require_agreement([_use(Call(2)), _use(Call(1, ("prompt",)))])


@pytest.mark.parametrize(
    ("use", "words"),
    [
        (_use(Call(3)), "takes at most 2 positional"),
        (_use(Call(2, ("priority",))), "does not know priority"),
        (_use(Call(1)), "requires prompt"),
        (_use(Call(0), f"{HOME}_to"), "is not there"),
        (_use(Call(0), "specshim_no_such_module:Engine"), "is not there"),
    ],
)
def test_another_shape_is_refused_with_the_way_out(engine: type, use: Touchpoint, words: str) -> None:
    with pytest.raises(DriftError) as refused:
        require_agreement([use])
    assert words in str(refused.value) and use.home in str(refused.value) and "--engine stock" in str(refused.value)


def test_a_use_of_other_releases_is_passed_over(engine: type) -> None:
    require_agreement([_use(Call(3), vllm="<0.1")])


@pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM")
def test_this_vllm_takes_every_call_and_a_drifted_one_is_seen() -> None:
    require_agreement()
    for touchpoint in DIRECT:
        if (call := touchpoint.call_for(None)) is not None:
            drifted = replace(touchpoint, calls=(("", call.adding("a_keyword_of_tomorrow")),), vllm="")
            with pytest.raises(DriftError, match="a_keyword_of_tomorrow"):
                require_agreement([drifted])
