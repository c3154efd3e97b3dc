"""The generator from construction to states, on releases of vLLM in small (`mini/`): each row that runs code has a
case here that fails without it. Real vLLM is run by `nox -s live`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from mini_stack import Done, Forks, forks, install

pytest.importorskip("torch")
pytest.importorskip("psutil")

CHAIN = """
import shims
from mini_model import states_of
from speculators.data_generation.vllm_hidden_states_generator import VllmHiddenStatesGenerator
layer_ids = [4, 1, 4, 0]
with shims.overrides(**settings):
    generator = VllmHiddenStatesGenerator("model", layer_ids=layer_ids)
batch = [[(7 * i + j) % 100 for j in range(3 + i % 20)] for i in range(40)]
shared = [list(range(32)) + [i] * (i + 1) for i in range(4)]
for prompts in ([[5]], batch[:13], batch[12::-1], batch, shared, shared, batch[:13]):
    for prompt, result in zip(prompts, generator.generate(prompts), strict=True):
        assert result["input_ids"].tolist() == prompt
        for layer, states in zip(layer_ids, result["hidden_states"], strict=True):
            assert states.tolist() == states_of(prompt, layer), (prompt, layer, states.tolist())
report = shims.report()
print(report.state, report.workers[0]["runner"], sorted(report.applied))
"""
GENERATORS = ("0.3.0", "0.4.0.1")
# Each release after which a row begins or ends, with a transformers of its time.
RELEASES = {
    "0.11.0": "4.57.6",
    "0.11.2": "4.57.6",
    "0.12.0": "4.57.6",
    "0.16.0": "4.57.6",
    "0.17.0": "5.19.0",
    "0.30.0": "5.24.0",
    "0.32.0": "5.19.0",
    "0.33.0": "5.24.0",
}


@pytest.fixture(scope="module")
def beside_torch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forks]:
    with forks(tmp_path_factory.mktemp("forks")) as found:
        yield found


def _chain(
    beside_torch: Forks, folder: Path, vllm: str, speculators: str, code: str = "settings = {}\n" + CHAIN, **env: str
) -> Done:
    path = install(folder, vllm=vllm, speculators=speculators, transformers=RELEASES[vllm])
    return beside_torch.run(code, path, env)


@pytest.mark.parametrize("speculators", GENERATORS)
@pytest.mark.parametrize("vllm", RELEASES)
def test_every_row_is_its_own(beside_torch: Forks, tmp_path: Path, vllm: str, speculators: str) -> None:
    done = _chain(beside_torch, tmp_path, vllm, speculators)
    assert done.says().startswith("adapted v1")


@pytest.mark.parametrize("speculators", GENERATORS)
def test_model_runner_v2(beside_torch: Forks, tmp_path: Path, speculators: str) -> None:
    done = _chain(beside_torch, tmp_path, "0.32.0", speculators, MINI_RUNNER="v2")
    assert done.says().startswith("adapted v2")


@pytest.mark.parametrize("speculators", GENERATORS)
def test_prompts_past_the_budget_of_a_step(beside_torch: Forks, tmp_path: Path, speculators: str) -> None:
    code = "settings = {'max_num_batched_tokens': 8}\n" + CHAIN
    done = _chain(beside_torch, tmp_path, "0.11.0", speculators, code)
    assert done.says().startswith("adapted")


@pytest.mark.parametrize("speculators", GENERATORS)
def test_the_scheduler_counts_the_blocks_of_the_cache(beside_torch: Forks, tmp_path: Path, speculators: str) -> None:
    done = _chain(beside_torch, tmp_path, "0.16.0", speculators, MINI_BLOCK="64")
    assert done.says().startswith("adapted")


def test_the_workers_end_once_and_with_the_generator(beside_torch: Forks, tmp_path: Path) -> None:
    code = f"settings = {{}}\n{CHAIN}\nimport gc\ndel generator\ngc.collect()\n"
    assert _chain(beside_torch, tmp_path, "0.32.0", "0.4.0.1", code).says().count("shut down") == 1


BUILD = """
import shims
from speculators.data_generation.vllm_hidden_states_generator import VllmHiddenStatesGenerator
try:
    VllmHiddenStatesGenerator("model", layer_ids=[1])
except Exception as error:
    print(type(error).__name__, error)
"""


def test_a_bare_assertion_while_building_is_told_and_stops_the_workers(beside_torch: Forks, tmp_path: Path) -> None:
    said = _chain(beside_torch, tmp_path, "0.16.0", "0.4.0.1", BUILD, MINI_FAILS="1").says()
    assert said.startswith("shut down\nEngineError building the generator")
    assert "AssertionError: (no message)" in said
    assert "in initialize_from_config" in said


def test_a_worker_without_the_shims_is_refused(beside_torch: Forks, tmp_path: Path) -> None:
    said = _chain(beside_torch, tmp_path, "0.16.0", "0.4.0.1", BUILD, MINI_STRANGER="1").says()
    assert "WrongStatesError worker processes [0] of 1" in said
    assert "VLLM_PLUGINS" in said


FAILING_WORKER = """
import shims
from speculators.data_generation.vllm_hidden_states_generator import VllmHiddenStatesGenerator
generator = VllmHiddenStatesGenerator("model", layer_ids=[1])
def deep_in_the_worker(output):
    raise AssertionError
generator.executor._worker.model_runner.execute_model = deep_in_the_worker
try:
    generator.generate([[1, 2, 3]])
except Exception as error:
    print(type(error).__name__, error)
print("left", len(generator.scheduler.waiting) + len(generator.scheduler.running))
"""


def test_a_bare_assertion_in_a_worker_arrives_with_its_traceback(beside_torch: Forks, tmp_path: Path) -> None:
    said = _chain(beside_torch, tmp_path, "0.16.0", "0.4.0.1", FAILING_WORKER).says()
    assert said.startswith("EngineError prefill of 1 prompts")
    assert "AssertionError: (no message)" in said
    assert "deep_in_the_worker" in said
    assert said.endswith("left 0\n")


REMOTE_CODE = """
import shims
from speculators.data_generation.vllm_hidden_states_generator import VllmHiddenStatesGenerator
for asked in (True, False):
    with shims.overrides(trust_remote_code=asked):
        generator = VllmHiddenStatesGenerator("model", layer_ids=[1])
    model = generator.vllm_config.model_config
    print("model", model.remote_code is asked)
    print("configuration", generator.config.remote_code is asked)
    print("tokenizer", generator.tokenizer.remote_code is asked)
"""


@pytest.mark.parametrize("what", ["model", "configuration", "tokenizer"])
def test_remote_code_runs_only_where_it_was_asked_for(beside_torch: Forks, tmp_path: Path, what: str) -> None:
    said = _chain(beside_torch, tmp_path, "0.16.0", "0.4.0.1", REMOTE_CODE).says()
    assert said.count(f"{what} True") == 2


def test_without_the_shims_the_same_chain_is_wrong(beside_torch: Forks, tmp_path: Path) -> None:
    code = "settings = {}\n" + CHAIN
    done = _chain(beside_torch, tmp_path, "0.16.0", "0.4.0.1", code, SHIMS_DISABLE="1")
    assert done.code == 1
