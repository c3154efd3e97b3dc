"""What consumers' own source uses is declared; no network (the uses are recorded, `test_static` keeps them fresh)."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from contract_tests.consumers import CALLED_BY_VLLM, CONSUMERS, DEFINED
from contract_tests.declared import undeclared
from contract_tests.homes import GENERATORS
from contract_tests.recorded import recorded_uses
from contract_tests.uses import UNKNOWN, Use, uses_in
from shims.contract import Call
from shims.direct.touchpoints import DIRECT, ENGINE_KEYWORDS
from shims.touchpoints import TOUCHPOINTS, used_by

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("speculators", GENERATORS)
def test_every_use_is_declared(speculators: str) -> None:
    assert not list(undeclared(recorded_uses()[f"speculators {speculators}"], speculators))


def test_every_use_of_hs_connectors_is_declared() -> None:
    declared = {t.home.replace(":", ".") for t in (*CONSUMERS, *TOUCHPOINTS)}
    modules = {t.module for t in CONSUMERS}
    for use in recorded_uses()["hs-connectors 0.9.0"]:
        if not use.name.startswith(UNKNOWN):
            assert use.name in declared or use.name in modules, use


def test_every_use_of_the_direct_engine_is_declared() -> None:
    calls = {t.home.replace(":", "."): t.call_for(None) for t in (*TOUCHPOINTS, *DIRECT)}
    # Names that `vllm` hands on, and an object made at run time: they are declared where they are defined.
    homes = {
        "vllm.LLM": "vllm.entrypoints.llm.LLM",
        "vllm.SamplingParams": "vllm.sampling_params.SamplingParams",
        "vllm.platforms.current_platform": "vllm.platforms.interface.Platform",
    }
    seen = set()
    for file in sorted((ROOT / "shims" / "direct").glob("*.py")):
        for use in uses_in(file.read_text(encoding="utf-8"), file.name, ["vllm"]):
            if use.name.startswith(UNKNOWN):
                continue
            name = use.name.removesuffix(".__dataclass_fields__")
            for short, home in homes.items():
                name = home + name.removeprefix(short) if f"{name}.".startswith(f"{short}.") else name
            assert name in calls or any(declared.startswith(f"{name}.") for declared in calls), use
            assert use.call is None or calls[name] in (None, use.call), use
            seen.add(name)
    assert {"vllm.entrypoints.llm.LLM", "vllm.config.set_current_vllm_config"} <= seen


def test_the_keywords_declared_for_the_engine_are_those_it_gives() -> None:
    code = ast.parse((ROOT / "shims" / "direct" / "engine.py").read_text(encoding="utf-8"))
    load = next(n for n in ast.walk(code) if isinstance(n, ast.FunctionDef) and n.name == "_load")
    texts = {n.value for n in ast.walk(load) if isinstance(n, ast.Constant) and isinstance(n.value, str)}
    assert set(ENGINE_KEYWORDS) <= texts
    settings = next(n.value for n in ast.walk(load) if isinstance(n, ast.AnnAssign) and isinstance(n.value, ast.Dict))
    assert {k.value for k in settings.keys if isinstance(k, ast.Constant)} <= set(ENGINE_KEYWORDS)


def test_every_override_has_a_signature() -> None:
    assert {t.key for t in CONSUMERS if t.kind == "override"} == set(CALLED_BY_VLLM)
    assert "get_finished" in DEFINED


@pytest.mark.parametrize("speculators", GENERATORS)
def test_a_use_without_a_touchpoint_is_found(speculators: str) -> None:
    uses = recorded_uses()[f"speculators {speculators}"]
    for touchpoint in used_by(speculators):
        own_seam = touchpoint.seam == "use" and touchpoint.used_in.startswith("shims")
        if own_seam or touchpoint.package != "vllm" or touchpoint.kind != "call":
            continue
        made = [use for use in uses if use.name == touchpoint.home.replace(":", ".")]
        rest = [t for t in TOUCHPOINTS if t.home != touchpoint.home]
        assert not made or list(undeclared(made, speculators, rest)), touchpoint.key


def test_another_shape_than_the_declared_one_is_found() -> None:
    name = "vllm.v1.request.Request"
    more = Use(name, Call(0, ("request_id", "novelty")), "data_generation/vllm_hidden_states_generator.py", 1)
    positional = Use(name, Call(2), "data_generation/vllm_hidden_states_generator.py", 2)
    assert len(list(undeclared([more, positional], "0.4.0.1"))) == 2


def test_uses_are_followed_through_objects() -> None:
    code = """
from typing import TYPE_CHECKING
import vllm.config as c
from vllm.engine import Engine as E, Status
if TYPE_CHECKING:
    from vllm.types import OnlyTyped

class Holder:
    def __init__(self) -> None:
        self.engine = E(model="x")
        self.config = self.make()
        self.config.cache.blocks = 3

    def make(self) -> E:
        return c.build(1, deep=True)

    def go(self, config: E, *rest):
        if (step := self.engine.step(1)).tokens > 0:
            self.engine.finish(["a"], Status.DONE)
        return self.make().size, config.size, self.engine.all(*rest)
"""
    found = {(use.name, use.call) for use in uses_in(code, "f.py", ["vllm"])}
    assert ("vllm.engine.Engine", Call(0, ("model",))) in found
    assert ("vllm.engine.Engine.step", Call(1)) in found
    assert ("vllm.engine.Engine.finish", Call(2)) in found
    assert ("vllm.engine.Engine.all", None) in found
    assert ("vllm.engine.Status.DONE", None) in found
    assert ("vllm.config.build", Call(1, ("deep",))) in found
    assert ("vllm.engine.Engine.cache", None) in found
    assert {("?.blocks", None), ("?.tokens", None)} <= found
    assert not any("OnlyTyped" in name for name, _ in found)
