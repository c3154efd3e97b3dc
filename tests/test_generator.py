"""`generate` in the parent: what it asks of the scheduler, what it refuses, and what a failure leaves behind."""

from __future__ import annotations

import gc
import subprocess
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from mini_model import VOCABULARY, MiniWorker, RunnerV1, TextModel, states_of  # noqa: E402
from mini_scheduler import MiniRequest, MiniScheduler  # noqa: E402

from shims.behaviours import capture  # noqa: E402
from shims.behaviours.generator import (  # noqa: E402
    EngineError,
    collected,
    construct,
    generate,
    setup_capture,
    tell_blocks,
    worker_receipts,
)
from shims.errors import WrongStatesError  # noqa: E402

MAX_MODEL_LEN = 48


class Worker(MiniWorker):
    _setup_hidden_states_capture = capture.setup_hidden_states_capture
    _reset_capture = capture.reset_capture
    _get_captured_states = capture.get_captured_states


class Executor:
    """One worker in this process; `failure` is raised by the named method, once."""

    def __init__(self) -> None:
        self.worker = Worker(RunnerV1(TextModel()))
        self.failure: tuple[str, Exception] | None = None

    def _maybe_fail(self, name: str) -> None:
        if self.failure is not None and self.failure[0] == name:
            failure, self.failure = self.failure[1], None
            raise failure

    def collective_rpc(self, method: str, args: tuple[Any, ...] = (), unique_reply_rank: int | None = None) -> Any:
        self._maybe_fail(method)
        reply = getattr(self.worker, method)(*args)
        return [reply] if unique_reply_rank is None else reply

    def execute_model(self, step: Any) -> None:
        self._maybe_fail("execute_model")
        self.worker.model_runner.execute_model(step)

    def sample_tokens(self, output: Any) -> None:
        self._maybe_fail("sample_tokens")


class Generator:
    """The attributes of speculators' generator that the shims read."""

    def __init__(self, layer_ids: list[int], **scheduling: Any) -> None:
        self.layer_ids, self._request_counter = layer_ids, 0
        self.tokenizer = SimpleNamespace(eos_token_id=1)
        self.executor, self.scheduler = Executor(), MiniScheduler(**scheduling)
        model_config = SimpleNamespace(max_model_len=MAX_MODEL_LEN, get_vocab_size=lambda: VOCABULARY)
        cache_config = SimpleNamespace(num_gpu_blocks=scheduling.get("blocks", 1000))
        self.vllm_config = SimpleNamespace(model_config=model_config, cache_config=cache_config)
        setup_capture(self)


def _request(request_id: str, prompt_token_ids: list[int], **rest: Any) -> MiniRequest:
    return MiniRequest(request_id, prompt_token_ids)


@pytest.fixture(autouse=True)
def globals_of_the_generator(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the generator's module imports of vLLM."""
    module = ModuleType("generator_in_small")
    vars(module).update(
        Request=_request,
        SamplingParams=lambda **settings: settings,
        RequestStatus=SimpleNamespace(FINISHED_ABORTED="aborted"),
    )
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(Generator, "__module__", module.__name__)
    monkeypatch.setattr("shims.behaviours.generator.worker_receipts", worker_receipts)


def assert_right(results: list[dict[str, Any]], prompts: list[list[int]], layer_ids: list[int]) -> None:
    for prompt, result in zip(prompts, results, strict=True):
        assert result["input_ids"].tolist() == prompt
        assert result["input_ids"].dtype == torch.long
        assert result["loss_mask"] is None
        assert [s.tolist() for s in result["hidden_states"]] == [states_of(prompt, i) for i in layer_ids]


def _prompts(count: int) -> list[list[int]]:
    return [[(3 * i + j) % VOCABULARY for j in range(1 + i % 40)] for i in range(count)]


# --- construction ---------------------------------------------------------------------------------


class Stopped(Executor):
    """Counts how often it is shut down, and what its workers were told."""

    def __init__(self) -> None:
        super().__init__()
        self.ended, self.told = 0, list[tuple[Any, ...]]()

    def shutdown(self) -> None:
        self.ended += 1

    def collective_rpc(self, method: str, args: tuple[Any, ...] = (), unique_reply_rank: int | None = None) -> Any:
        if method == "initialize_cache":
            self.told.append(args)
            return [None]
        return super().collective_rpc(method, args, unique_reply_rank)


def _constructed(build: Any = construct) -> tuple[Generator, Stopped]:
    generator, executor = Generator([1], blocks=77), Stopped()
    build(lambda: setattr(generator, "executor", executor), generator, (), {})
    return generator, executor


def test_the_workers_end_with_the_generator_once() -> None:
    """speculators' own `__del__` fails where the interpreter has taken its modules away, and says so in a traceback."""
    generator, executor = _constructed()
    collected(generator)
    assert not executor.ended
    del generator
    gc.collect()
    assert executor.ended == 1


def test_the_workers_end_before_the_interpreters_modules_go() -> None:
    program = (
        "import logging, weakref; from shims.behaviours import generator as g\n"
        "class Executor:\n    def shutdown(self): logging.warning('ended')\n"
        "class Generator: pass\n"
        "kept = Generator(); g.construct(lambda: setattr(kept, 'executor', Executor()), kept, (), {})\n"
        "kept.itself = kept\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0 and ended.stderr.strip().endswith("ended") and "Traceback" not in ended.stderr


def test_workers_are_told_how_many_blocks_there_are() -> None:
    _, executor = _constructed(tell_blocks)
    assert executor.told == [(77, 0)]


# --- results --------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 11, 33, 100])
@pytest.mark.parametrize("budget", [16, 8192])
def test_results_come_in_the_order_of_the_prompts(count: int, budget: int) -> None:
    """Past ten, ids sort otherwise as text than as numbers; past 32, not all requests find a place at once."""
    generator = Generator([1], budget=budget)
    for _ in range(2):
        assert_right(generate(generator, _prompts(count)), _prompts(count), [1])
    assert not generator.scheduler.running + generator.scheduler.waiting


@pytest.mark.parametrize("layer_ids", [[4, 1], [1, 1], [5, 0, 5, 2]])
def test_states_come_in_the_order_of_the_layer_ids_repeats_included(layer_ids: list[int]) -> None:
    assert_right(generate(Generator(layer_ids), _prompts(3)), _prompts(3), layer_ids)


def test_the_same_prompt_twice_and_a_tensor_of_prompts() -> None:
    prompts = [[1, 2, 3], [1, 2, 3], [4, 5, 6]]
    assert_right(generate(Generator([0]), prompts), prompts, [0])
    assert_right(generate(Generator([0]), torch.tensor(prompts)), prompts, [0])
    assert_right(generate(Generator([0]), [torch.tensor(p) for p in prompts]), prompts, [0])


def test_a_cache_smaller_than_the_batch_only_takes_longer() -> None:
    generator = Generator([1], blocks=6, block_size=8, budget=10)
    assert_right(generate(generator, _prompts(20)), _prompts(20), [1])


def test_no_two_calls_share_a_request_id() -> None:
    """vLLM may still hold blocks of a request that has just ended."""
    generator = Generator([1])
    for _ in range(3):
        generate(generator, _prompts(4))
    assert len(set(generator.scheduler.finished)) == 12


def test_long_prompts_are_cut_with_a_warning_ids_and_states_alike(caplog: pytest.LogCaptureFixture) -> None:
    prompts = [list(range(60)), [1, 2], list(range(MAX_MODEL_LEN))]
    with caplog.at_level("WARNING", logger="specshim"):
        results = generate(Generator([1]), prompts)
    assert_right(results, [prompt[: MAX_MODEL_LEN - 1] for prompt in prompts], [1])
    assert [r.getMessage() for r in caplog.records] == ["2 of 3 prompts are cut to 47 tokens (max_model_len - 1)"]


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompts", "words"),
    [
        ([], "cannot be empty"),
        (torch.zeros(0, 3, dtype=torch.long), "cannot be empty"),
        ([[1], []], "prompt 1 is empty"),
        ([[1, 2], [3, VOCABULARY]], f"prompt 1 holds token id {VOCABULARY}: the model's vocabulary is 0 to 99"),
        ([[-1]], "prompt 0 holds token id -1"),
    ],
)
def test_bad_prompts_are_refused_before_anything_is_sent(prompts: Any, words: str) -> None:
    generator = Generator([1])
    with pytest.raises(ValueError, match=words):
        generate(generator, prompts)
    assert not generator.scheduler.waiting
    assert_right(generate(generator, [[1]]), [[1]], [1])


def test_a_prompt_that_the_cache_cannot_hold_is_refused_naming_the_cache() -> None:
    generator = Generator([1], blocks=2, block_size=8)
    with pytest.raises(WrongStatesError) as caught:
        generate(generator, [[1, 2], list(range(40))])
    assert "the longest has 40 tokens" in caught.value.wanted
    assert "the KV cache holds 2 blocks" in caught.value.found
    assert "gpu_memory_utilization" in caught.value.next_step
    assert_right(generate(generator, [[7, 8]]), [[7, 8]], [1])


def test_tokens_from_a_prefix_cache_are_refused_not_left_out() -> None:
    generator = Generator([1], prefix_caching=True, block_size=4)
    shared = list(range(10))
    with pytest.raises(WrongStatesError, match="prefix caching must be off"):
        generate(generator, [shared, [*shared, 1]])


@pytest.mark.parametrize("method", ["_reset_capture", "execute_model", "sample_tokens", "_get_captured_states"])
@pytest.mark.parametrize("failure", [AssertionError(), TimeoutError(), RuntimeError("worker died")], ids=repr)
def test_a_failure_is_told_and_its_requests_are_released(method: str, failure: Exception) -> None:
    """Never an empty message; and the next call must not meet this one's requests."""
    generator = Generator([1])
    generator.executor.failure = (method, failure)
    with pytest.raises(EngineError) as caught:
        generate(generator, _prompts(5))
    assert caught.value.where == "prefill of 5 prompts"
    assert type(failure).__name__ in caught.value.found
    assert str(failure) or "(no message)" in caught.value.found
    assert "in _maybe_fail" in caught.value.found
    assert caught.value.__cause__ is failure
    assert not generator.scheduler.running + generator.scheduler.waiting
    assert_right(generate(generator, _prompts(5)), _prompts(5), [1])


def test_a_failure_while_requests_are_released_does_not_hide_the_first(caplog: pytest.LogCaptureFixture) -> None:
    generator = Generator([1])
    generator.executor.failure = ("execute_model", RuntimeError("the first"))
    generator.scheduler.finish_requests = None  # type: ignore[method-assign,assignment]
    with pytest.raises(EngineError, match="the first"), caplog.at_level("WARNING", logger="specshim"):
        generate(generator, [[1]])
    assert "could not be released" in caplog.text


def test_states_of_another_length_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = Generator([1])
    short = staticmethod(lambda worker, ids: {i: [torch.zeros(1, 3)] for i in ids})
    monkeypatch.setattr(Worker, "_get_captured_states", lambda self, ids: short(self, ids))
    with pytest.raises(WrongStatesError, match="2 rows a layer"):
        generate(generator, [[1, 2]])


# --- workers --------------------------------------------------------------------------------------


def test_what_the_workers_confirmed_is_kept_for_the_report() -> None:
    Generator([1])
    assert [(r["rank"], r["runner"], r["model"]) for r in worker_receipts] == [(0, "v1", "TextModel")]


@pytest.mark.parametrize("reply", [None, {}, {"protocol": 0}, "ok"])
def test_a_worker_that_does_not_confirm_is_refused(reply: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Worker, "_setup_hidden_states_capture", lambda self, layer_ids: reply)
    with pytest.raises(WrongStatesError, match=r"worker processes \[0\] of 1"):
        Generator([1])
