"""Capture in a worker: each row of states is its own token's, in either model runner, or there is an error.

The model in small (`mini_model`) gives states that say which token at which position they belong to.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from mini_model import (  # noqa: E402
    LAYERS,
    RUNNERS,
    Layer,
    MiniWorker,
    MultimodalModel,
    Partial,
    RunnerV1,
    Stale,
    TextModel,
    Unread,
    states_of,
)
from mini_scheduler import MiniRequest, MiniScheduler, NewRequest, Output  # noqa: E402

from shims.behaviours.capture import (  # noqa: E402
    PROTOCOL,
    get_captured_states,
    reset_capture,
    residual_stream,
    setup_hidden_states_capture,
)
from shims.direct import taps  # noqa: E402
from shims.errors import WrongStatesError  # noqa: E402
from shims.model_parts import adds_residual  # noqa: E402

PROMPTS = {f"req_0_{i}": [(11 * i + j) % 100 for j in range(1 + (7 * i) % 23)] for i in range(13)}
both_runners = pytest.mark.parametrize("kind", RUNNERS)


def worker_of(kind: str, layer_ids: list[int], model: Any = None, rank: int = 0, **settings: Any) -> MiniWorker:
    worker = MiniWorker(RUNNERS[kind](model or TextModel(), **settings), rank)
    setup_hidden_states_capture(worker, layer_ids)
    return worker


def prefill(worker: MiniWorker, scheduler: MiniScheduler, prompts: dict[str, list[int]]) -> dict[str, list[Any]]:
    """As the generator does it: a request is taken as soon as its prompt is through."""
    waiting = {name: MiniRequest(name, prompt) for name, prompt in prompts.items()}
    for request in waiting.values():
        scheduler.add_request(request)
    states: dict[str, list[Any]] = {}
    while waiting:
        step = scheduler.schedule()
        assert step.total_num_scheduled_tokens, "the scheduler is stuck"
        worker.model_runner.execute_model(step)
        through = [
            name for name in step.num_scheduled_tokens if waiting[name].num_computed_tokens == len(prompts[name])
        ]
        scheduler.finish_requests(through, None)
        states.update(get_captured_states(worker, through))
        for name in through:
            del waiting[name]
    return states


def assert_right(states: dict[str, list[Any]], prompts: dict[str, list[int]], layer_ids: list[int]) -> None:
    assert states.keys() == prompts.keys()
    for name, prompt in prompts.items():
        assert [s.tolist() for s in states[name]] == [states_of(prompt, i) for i in layer_ids], name


# --- rows -----------------------------------------------------------------------------------------


@both_runners
@pytest.mark.parametrize("padding", [0, 5])
@pytest.mark.parametrize("budget", [1, 8, 64, 8192])
def test_a_reordered_batch_in_chunks_with_padding(kind: str, padding: int, budget: int) -> None:
    worker = worker_of(kind, [0, 2, LAYERS - 1], padding=padding)
    reset_capture(worker)
    assert_right(prefill(worker, MiniScheduler(budget=budget), PROMPTS), PROMPTS, [0, 2, LAYERS - 1])


@both_runners
def test_a_preempted_request_is_computed_again_and_written_again(kind: str) -> None:
    worker = worker_of(kind, [3])
    reset_capture(worker)
    scheduler = MiniScheduler(share=4, blocks=9, block_size=4)
    prompts = {name: [(i + j) % 100 for j in range(30)] for i, name in enumerate("abc")}
    states = prefill(worker, scheduler, prompts)
    assert len(scheduler.preempted) > 1
    assert_right(states, prompts, [3])


@both_runners
def test_three_rows_of_positions_as_multimodal_models_have_them(kind: str) -> None:
    worker = worker_of(kind, [1], axes=3, padding=2)
    reset_capture(worker)
    assert_right(prefill(worker, MiniScheduler(budget=10), PROMPTS), PROMPTS, [1])


def test_a_text_model_inside_a_multimodal_one() -> None:
    worker = worker_of("v1", [1], MultimodalModel())
    reset_capture(worker)
    assert_right(prefill(worker, MiniScheduler(), PROMPTS), PROMPTS, [1])


def test_positions_given_by_place_are_found() -> None:
    worker = worker_of("v1", [1], TextModel(by_position=True))
    reset_capture(worker)
    assert_right(prefill(worker, MiniScheduler(), PROMPTS), PROMPTS, [1])


@pytest.mark.parametrize(
    "returns", ["pair", "tensor", "no residual", "alone", "stale residual", "residual not taken", "keys and values"]
)
def test_each_way_in_which_a_layer_returns_its_output(returns: str) -> None:
    worker = worker_of("v1", [0, 4], TextModel(returns))
    reset_capture(worker)
    assert_right(prefill(worker, MiniScheduler(budget=16), PROMPTS), PROMPTS, [0, 4])


# The last four are read as half of a state, or as one and a half, where only the first two parts are looked at.
@pytest.mark.parametrize(
    "returns",
    ["mapping", "other shape", "residual in the third place", "residual twice", "parts in a tuple", "wider, in parts"],
)
def test_an_output_of_another_kind_is_refused_with_its_layer(returns: str) -> None:
    worker = worker_of("v1", [0], TextModel(returns))
    reset_capture(worker)
    with pytest.raises(WrongStatesError, match="worker, Layer"):
        prefill(worker, MiniScheduler(), PROMPTS)


def test_layers_that_return_one_devices_share_are_refused_on_several() -> None:
    """Token ids and positions agree there, and nothing is out of range: only the sum over the devices is missing."""
    model = TextModel()
    model.model.layers[2] = Partial("pair")
    setup_hidden_states_capture(MiniWorker(RunnerV1(model)), [2])
    setup_hidden_states_capture(MiniWorker(RunnerV1(model), devices=2), [1, 3])
    with pytest.raises(WrongStatesError, match=r"Partial(.|\n)*one device's share"):
        setup_hidden_states_capture(MiniWorker(RunnerV1(model), devices=2), [2])


@both_runners
def test_an_embedding_that_is_not_called_leaves_the_models_own_token_ids(kind: str) -> None:
    worker = worker_of(kind, [0, 4], Unread(), padding=3)
    reset_capture(worker)
    assert_right(prefill(worker, MiniScheduler(budget=16), PROMPTS), PROMPTS, [0, 4])


def test_layer_ids_come_in_ascending_order_without_repeats() -> None:
    worker = worker_of("v1", [4, 0, 4, 2])
    reset_capture(worker)
    assert_right(prefill(worker, MiniScheduler(), PROMPTS), PROMPTS, [0, 2, 4])


def test_the_states_are_the_callers_own() -> None:
    """A layer may go on writing into what it returned."""
    hidden, residual = torch.ones(2, 3), torch.ones(2, 3)
    taken = [residual_stream(hidden, "Layer"), residual_stream((hidden, None), "Layer")]
    taken.append(residual_stream((hidden, residual), "Layer"))
    hidden += 5
    residual += 5
    assert [t.unique().tolist() for t in taken] == [[1.0], [1.0], [2.0]]


@pytest.mark.parametrize("output", [None, (), [], {}, (None, None), (torch.ones(2, 3), torch.ones(2, 3).double())])
def test_what_is_no_output_of_a_layer_is_refused(output: Any) -> None:
    with pytest.raises(WrongStatesError, match="wanted: a tensor, or"):
        residual_stream(output, "Layer")


def test_a_batch_of_one_in_front_is_looked_through() -> None:
    assert residual_stream((torch.ones(1, 4, 3), torch.ones(1, 4, 3)), "Layer").shape == (4, 3)
    assert residual_stream(torch.ones(1, 4, 3), "Layer").shape == (4, 3)


@pytest.mark.parametrize("output", [torch.ones(4, 5, 3), (torch.ones(2, 4, 3), None), torch.ones(3)])
def test_several_streams_side_by_side_are_refused(output: Any) -> None:
    with pytest.raises(WrongStatesError, match=r"one state a token(.|\n)*no single residual stream"):
        residual_stream(output, "Layer")


# --- whose rows -----------------------------------------------------------------------------------


@both_runners
def test_requests_of_a_warm_up_are_not_the_generators(kind: str) -> None:
    """Model runner V2 warms its kernels up with requests of its own, decode steps among them."""
    worker = worker_of(kind, [1])
    warm_up = Output([NewRequest("warm-up", [1, 2, 3, 4])], {"warm-up": 2}, {"warm-up": 2})
    worker.model_runner.execute_model(warm_up)
    assert not worker._specshim_capture.requests
    reset_capture(worker)
    assert_right(prefill(worker, MiniScheduler(), PROMPTS), PROMPTS, [1])


def test_a_step_without_tokens_and_a_dummy_run_pass_through(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[dict[str, Any]] = []
    monkeypatch.setattr(RunnerV1, "execute_model", lambda self, output, **kwargs: ran.append(kwargs))
    worker = worker_of("v1", [1])
    reset_capture(worker)
    worker.model_runner.execute_model(Output())
    worker.model_runner.execute_model(Output([], {"x": 4}, {"x": 0}), dummy_run=True)
    assert ran == [{}, {"dummy_run": True}]


def test_rows_of_a_failed_call_do_not_reach_the_next() -> None:
    """The same request id again: what was captured of it before the reset is gone."""
    worker = worker_of("v1", [1])
    reset_capture(worker)
    worker.model_runner.execute_model(Output([NewRequest("a", [9, 9, 9, 9])], {"a": 2}, {"a": 0}))
    reset_capture(worker)
    worker.model_runner.execute_model(Output([NewRequest("a", [5, 6, 7, 8])], {"a": 2}, {"a": 2}))
    with pytest.raises(WrongStatesError, match="4 rows of states\n  found:  2 rows"):
        get_captured_states(worker, ["a"])


def test_a_request_from_before_the_reset_is_nobodys() -> None:
    worker = worker_of("v1", [1])
    reset_capture(worker)
    worker.model_runner.execute_model(Output([NewRequest("a", [1, 2, 3])], {"a": 1}, {"a": 0}))
    reset_capture(worker)
    worker.model_runner.execute_model(Output([NewRequest("b", [4])], {"a": 2, "b": 1}, {"a": 1, "b": 0}))
    assert get_captured_states(worker, ["b"])["b"][0].tolist() == states_of([4], 1)


@both_runners
@pytest.mark.parametrize("prompts", [([1, 2, 3], [4, 5, 6]), ([1, 2, 3], [4, 5])])
def test_a_batch_in_another_order_than_the_runner_says_is_refused(kind: str, prompts: tuple[list[int], ...]) -> None:
    worker = worker_of(kind, [1])
    reset_capture(worker)
    runner = worker.model_runner
    forward = runner._forward
    runner._forward = lambda order, output: forward(order[::-1], output)
    step = Output([NewRequest(n, p) for n, p in zip("ab", prompts, strict=True)], {}, {"a": 0, "b": 0})
    step.num_scheduled_tokens = {n: len(p) for n, p in zip("ab", prompts, strict=True)}
    with pytest.raises(WrongStatesError, match=f"request [ab], rows from position(.|\n)*model runner {kind}"):
        runner.execute_model(step)


@pytest.mark.parametrize("order", [["a"], [], ["a", "b", "a"]])
def test_a_batch_whose_rows_do_not_add_up_is_refused(order: list[str]) -> None:
    worker = worker_of("v1", [1])
    reset_capture(worker)
    runner = worker.model_runner
    forward = runner._forward

    def told_wrong(names: list[str], output: Output) -> None:
        runner.input_batch.req_ids = order
        forward(["a", "b"], output)

    runner._forward = told_wrong
    news = [NewRequest("a", [1, 2]), NewRequest("b", [3, 4])]
    with pytest.raises(WrongStatesError, match="worker, one step\n  wanted: 4 rows"):
        runner.execute_model(Output(news, {"a": 2, "b": 2}, {"a": 0, "b": 0}))


def test_after_a_refused_step_the_hooks_listen_to_nothing() -> None:
    worker = worker_of("v1", [1])
    reset_capture(worker)
    runner = worker.model_runner
    forward = runner._forward
    runner._forward = lambda order, output: forward(order[::-1], output)
    step = Output([NewRequest("a", [1]), NewRequest("b", [2])], {"a": 1, "b": 1}, {"a": 0, "b": 0})
    with pytest.raises(WrongStatesError):
        runner.execute_model(step)
    assert worker._specshim_capture._step is None


def test_a_layer_that_did_not_run_is_named() -> None:
    worker = worker_of("v1", [1, 3])
    reset_capture(worker)
    decoder = worker.model_runner.model.model
    decoder.layers = decoder.layers[:3]
    with pytest.raises(WrongStatesError, match=r"no output of layers \[3\]"):
        prefill(worker, MiniScheduler(), {"a": [1, 2]})


@pytest.mark.parametrize(
    ("start", "tokens", "rows"), [(0, 3, 3), (16, 4, 4)], ids=["not yet through", "served from a prefix cache"]
)
def test_missing_rows_are_refused(start: int, tokens: int, rows: int) -> None:
    worker = worker_of("v1", [1])
    reset_capture(worker)
    worker.model_runner.execute_model(Output([NewRequest("a", list(range(20)))], {"a": tokens}, {"a": start}))
    with pytest.raises(WrongStatesError, match=f"20 rows of states\n  found:  {rows} rows\n(.|\n)*prefix caching"):
        get_captured_states(worker, ["a"])


def test_a_request_nobody_sent_is_refused() -> None:
    worker = worker_of("v1", [1])
    reset_capture(worker)
    with pytest.raises(WrongStatesError, match="request ghost"):
        get_captured_states(worker, ["ghost"])


def test_what_was_taken_is_forgotten() -> None:
    worker = worker_of("v1", [1])
    reset_capture(worker)
    prefill(worker, MiniScheduler(), PROMPTS)
    assert not worker._specshim_capture.requests


# --- who captures ---------------------------------------------------------------------------------


@both_runners
def test_the_reply_says_who_captures_and_how(kind: str) -> None:
    worker = MiniWorker(RUNNERS[kind](TextModel()))
    reply = setup_hidden_states_capture(worker, [1])
    assert reply == {
        "protocol": PROTOCOL,
        "rank": 0,
        "runner": kind,
        "runner_class": f"mini_model.Runner{kind.upper()}",
        "model": "TextModel",
    }


def test_only_the_first_rank_records() -> None:
    worker = worker_of("v1", [1], rank=1)
    reset_capture(worker)
    worker.model_runner.execute_model(Output([NewRequest("a", [1, 2])], {"a": 2}, {"a": 0}))
    assert get_captured_states(worker, ["a"]) == {}


def test_a_runner_of_another_kind_is_refused() -> None:
    class Runner:
        model = TextModel()

    with pytest.raises(WrongStatesError, match=r"Runner(.|\n)*VLLM_USE_V2_MODEL_RUNNER"):
        setup_hidden_states_capture(MiniWorker(Runner()), [1])


class PPMissingLayer(torch.nn.Module):
    """As vLLM names the place of a layer that another process has."""


def test_layers_in_another_process_are_refused() -> None:
    model = TextModel()
    model.model.layers[2] = PPMissingLayer()
    with pytest.raises(WrongStatesError, match=r"layers \[2, 9\] are missing of 6(.|\n)*tensor parallel"):
        setup_hidden_states_capture(MiniWorker(RunnerV1(model)), [1, 2, 9])


@pytest.mark.parametrize(("gone", "wanted"), [("layers", "decoder layers, as"), ("embed_tokens", "token embedding")])
def test_a_model_of_another_build_is_refused(gone: str, wanted: str) -> None:
    model = TextModel()
    delattr(model.model, gone)
    with pytest.raises(WrongStatesError, match=wanted):
        setup_hidden_states_capture(MiniWorker(RunnerV1(model)), [1])


def test_the_first_forward_finds_vllms_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the experts of a mixture do on the CPU build of 0.20.2, which make their activations when first called."""
    current: list[str] = []

    @contextmanager
    def set_current_vllm_config(config: str) -> Iterator[None]:
        current.append(config)
        yield
        current.pop()

    monkeypatch.setitem(sys.modules, "vllm.config", SimpleNamespace(set_current_vllm_config=set_current_vllm_config))
    worker = worker_of("v1", [0])
    worker.model_runner.vllm_config = "the configuration"
    seen: list[list[str]] = []
    worker.model_runner.model.register_forward_hook(lambda *_: seen.append(list(current)))
    reset_capture(worker)
    prefill(worker, MiniScheduler(), {"req_0_0": [1, 2, 3]})
    assert seen == [["the configuration"]] and not current


def test_a_layer_behind_a_decorator_adds_its_residual_as_most_do() -> None:
    """Its parameters say nothing then: taken for a layer without a residual, half of each state would be left out."""

    class Decorated(torch.nn.Module):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return Layer("pair")(*args, **kwargs)

    assert adds_residual(Decorated()) and adds_residual(Layer("pair")) and not adds_residual(Stale("tensor"))


class Scaled(Layer):
    """As DeepSeek's layers: in float16 they divide the stream, lest it overflow."""

    def __init__(self, factor: float) -> None:
        super().__init__("pair")
        self.routed_scaling_factor = factor
        self.norm = torch.nn.LayerNorm(4)

    def forward(self, positions: Any, hidden_states: Any, residual: Any) -> Any:
        if hidden_states.dtype == torch.float16:
            hidden_states = hidden_states / self.routed_scaling_factor
        return super().forward(positions, hidden_states, residual)


@pytest.mark.parametrize("engine", ["stock", "direct"])
def test_a_stream_that_float16_divides_is_refused(engine: str) -> None:
    def capture(factor: float, dtype: torch.dtype) -> None:
        model = TextModel()
        model.model.layers[2] = Scaled(factor)
        model.to(dtype)
        if engine == "stock":
            setup_hidden_states_capture(MiniWorker(RunnerV1(model)), [2, 3])
        else:
            taps.attach(model, [0, 3], lambda *_: None)

    capture(2.5, torch.bfloat16)
    capture(1.0, torch.float16)
    with pytest.raises(WrongStatesError, match=r"routed_scaling_factor` \(2.5\)(.|\n)*bfloat16"):
        capture(2.5, torch.float16)
