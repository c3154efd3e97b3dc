"""The acceptance cases on the vLLM of this environment; skipped where there is none.

Each run is a process of its own, since a generator keeps its engine for as long as it lives.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.live,
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None or importlib.util.find_spec("speculators") is None,
        reason="needs vllm and speculators",
    ),
]

OLDER = os.environ.get("SPECSHIM_OLDER_SPECULATORS")


def run(out: Path, *arguments: str, older: bool = False) -> list[dict[str, str]]:
    """The outcomes of one live run."""
    environment = {k: v for k, v in os.environ.items() if k != "SHIMS_DISABLE"}
    if older:
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [OLDER, environment.get("PYTHONPATH")]))
    command = [sys.executable, "-m", "contract_tests.live.run", "--out", str(out), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900, check=False)
    assert out.is_file(), done.stdout[-3000:] + done.stderr[-6000:]
    cases: list[dict[str, str]] = json.loads(out.read_text())["cases"]
    return cases


def failures(cases: list[dict[str, str]]) -> list[str]:
    return [f"{c['model']} {c['case']}: {c['reason']}" for c in cases if c["outcome"] != "pass"]


def generators() -> list[object]:
    """The installed speculators, and a second one where the session has put one beside it."""
    no_older = pytest.mark.skipif(OLDER is None, reason="no second speculators (SPECSHIM_OLDER_SPECULATORS)")
    return [pytest.param(False, id="installed"), pytest.param(True, id="older", marks=no_older)]


@pytest.mark.parametrize("older", generators())
def test_every_row_is_its_own_and_right_with_the_shims(tmp_path: Path, older: bool) -> None:
    cases = run(tmp_path / "outcomes.json", "--models", "llama,marker", older=older)
    assert len(cases) >= 8
    assert failures(cases) == []


@pytest.mark.parametrize("older", generators())
def test_the_same_cases_fail_without_the_shims(tmp_path: Path, older: bool) -> None:
    cases = run(tmp_path / "outcomes.json", "--models", "llama", "--without-shims", older=older)
    assert any(c["case"] == "identity" and c["outcome"] == "fail" for c in cases), cases


def test_the_direct_engine_is_right(tmp_path: Path) -> None:
    cases = run(tmp_path / "outcomes.json", "--models", "llama,marker", "--engine", "direct")
    assert len(cases) >= 8
    assert failures(cases) == []


UNINSTALL = """
import importlib, inspect, sys
names = {
    "speculators.data_generation.vllm_hidden_states_generator": None,
    "speculators.data_generation.custom_worker": None,
    "vllm.v1.executor.multiproc_executor": None,
    "vllm.v1.core.kv_cache_utils": None,
    "vllm.config": None,
    "transformers.configuration_utils": None,
}
def look():
    seen = {}
    for name in names:
        module = importlib.import_module(name)
        for key, value in vars(module).items():
            seen[name, key] = value
            if inspect.isclass(value) and value.__module__ == name:
                seen.update({(name, key, k): v for k, v in vars(value).items() if not k.startswith("__")})
                seen[name, key, "__init__"] = vars(value).get("__init__")
    return seen
import shims
order = sys.argv[1]
if order == "after":
    shims.uninstall()
    before = look()
    shims.install()
else:
    look()
    shims.uninstall()
    before = look()
    shims.install()
assert shims.report().state == "adapted", shims.report().render()
changed = {k for k, v in look().items() if before.get(k, None) is not v}
assert len(changed) > 10, changed
assert shims.uninstall() == []
after = look()
left = [k for k in before if after[k] is not before[k]] + [k for k in after if k not in before]
assert left == [], left
print("restored", len(changed))
"""


@pytest.mark.parametrize("order", ["before", "after"])
def test_uninstall_restores_every_object_by_identity(order: str) -> None:
    done = subprocess.run([sys.executable, "-c", UNINSTALL, order], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "restored" in done.stdout


def test_an_adaptation_whose_target_moved_is_refused_at_first_use() -> None:
    """vLLM's Request grows a parameter that no row fills: the generator says so before it loads a model."""
    code = """
import vllm.v1.request as r
real = r.Request.__init__
def __init__(self, request_id, prompt_token_ids, sampling_params, pooling_params, eos_token_id, brand_new, **kw): ...
r.Request.__init__ = __init__
import shims
from speculators.data_generation.vllm_hidden_states_generator import VllmHiddenStatesGenerator
print(shims.report().state)
VllmHiddenStatesGenerator("/nonexistent", layer_ids=[1])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "drifted" in done.stdout
    assert done.returncode == 1
    message = done.stderr[done.stderr.index("DriftError") :]
    assert "vllm.v1.request:Request" in message
    assert "requires brand_new" in message
    assert all(word in message for word in ("wanted:", "found:", "next:"))
