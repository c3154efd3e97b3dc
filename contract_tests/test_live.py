"""The acceptance cases on the vLLM of this environment; skipped where there is none.

Each run is a process of its own, since a generator keeps its engine for as long as it lives.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from contract_tests.live.models import make
from shims.guardian import below, identity

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


_GENERATOR = """
import sys, time
import shims
from shims.direct.generator import VllmHiddenStatesGenerator
with shims.overrides(dtype="float32"):
    generator = VllmHiddenStatesGenerator(sys.argv[1], layer_ids=[1], max_model_len=64, gpu_memory_utilization=0.1)
"""


def test_a_killed_process_takes_the_direct_engine_with_it(tmp_path: Path) -> None:
    """A notebook whose kernel is killed: its engine would keep the device's memory."""
    code = _GENERATOR + "print('loaded', flush=True); time.sleep(600)"
    command = [sys.executable, "-c", code, str(make("llama", tmp_path))]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert any("loaded" in line for line in process.stdout)
    engine = below(process.pid)
    assert engine
    process.kill()
    process.wait()
    ends = time.monotonic() + 100
    while any(identity(pid) == start for pid, start in engine.items()) and time.monotonic() < ends:
        time.sleep(0.1)
    assert not [pid for pid, start in engine.items() if identity(pid) == start]


_PLANTED = """
from shims.direct.worker import CaptureWorker
class Planted(CaptureWorker):
    def execute_model(self, scheduler_output):
        if scheduler_output.total_num_scheduled_tokens == 7:
            raise ZeroDivisionError("planted in the worker")
        return super().execute_model(scheduler_output)
"""


def test_what_fails_in_a_worker_amid_a_run_is_named(tmp_path: Path) -> None:
    (tmp_path / "planted.py").write_text(_PLANTED)
    code = """
import sys
from shims.direct.engine import DirectEngine, DirectOptions
from shims.direct.spool import folder
spool = folder(1 << 20)
engine = DirectEngine(DirectOptions(
    sys.argv[1], [1], "shims.direct.spool:Spool", {"folder": spool.name}, max_model_len=64, dtype="float32",
    gpu_memory_utilization=0.1, more={"worker_cls": "planted.Planted"},
))
for rows in ([("right", [5] * 6)], [("wrong", [5] * 7)]):
    for settled in engine.run(rows):
        print(settled.done, flush=True)
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-c", code, str(make("llama", tmp_path))]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 1
    assert "['right']" in done.stdout
    message = done.stderr[done.stderr.index("shims.errors.SpecshimError") :]
    assert "ZeroDivisionError: planted in the worker" in message, message
    assert "finished rows are kept" in message
