"""The direct engine's worker side: each row that reaches the sink is whole and its own, or nothing is written.

The model in small (`mini_model`) gives states that say which token at which position they belong to;
native id k is the state after layer k - 1. (Token t at position p after layer 0 is [t, 1, p]: prompts here
avoid t = p = 1, whose equal components count as a fault.)
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from mini_model import (  # noqa: E402
    LAYERS,
    RUNNERS,
    BatchedModel,
    MiniWorker,
    MultimodalModel,
    Partial,
    RenamedModel,
    TextModel,
    states_of,
)
from mini_scheduler import MiniRequest, MiniScheduler, NewRequest, Output  # noqa: E402

from shims.direct import taps  # noqa: E402
from shims.direct.staging import HOST_BUFFERS  # noqa: E402
from shims.direct.stream import MARK, Stream  # noqa: E402
from shims.errors import WrongStatesError  # noqa: E402

BUDGET = 32
PROMPTS = {f"{i}": [(11 * i + j) % 100 for j in range(1 + (7 * i) % 23)] for i in range(13)}
both_runners = pytest.mark.parametrize("kind", RUNNERS)


class Kept:
    """A sink that keeps the rows."""

    def __init__(self) -> None:
        self.rows: dict[str, tuple[list[int], Any]] = {}

    def write(self, row_id: str, token_ids: Any, states: Any) -> None:
        assert row_id not in self.rows, "written twice"
        self.rows[row_id] = token_ids.tolist(), states.clone()


@pytest.fixture(autouse=True)
def no_receiver_left() -> Iterator[None]:
    yield
    taps._receiver = None


def _config() -> Any:
    return SimpleNamespace(scheduler_config=SimpleNamespace(max_num_batched_tokens=BUDGET + 8))


def open_stream(kind: str, native_ids: list[int], sink: Any, model: Any = None, **settings: Any) -> Stream:
    worker: Any = MiniWorker(RUNNERS[kind](model or TextModel(), **settings))
    worker.vllm_config = _config()
    stream = Stream(worker, native_ids)
    stream.open(sink)
    stream.runner = worker.model_runner  # type: ignore[attr-defined]
    return stream


def run_step(stream: Any, output: Output) -> None:
    with stream.step(output):
        stream.runner.execute_model(output)


def prefill(stream: Stream, prompts: dict[str, list[int]], **settings: Any) -> None:
    """As vLLM's engine does it: step after step, until each prompt is through."""
    scheduler = MiniScheduler(budget=BUDGET, **settings)
    waiting = {name + MARK: MiniRequest(name + MARK, prompt) for name, prompt in prompts.items()}
    for request in waiting.values():
        scheduler.add_request(request)
    while waiting:
        output = scheduler.schedule()
        assert output.total_num_scheduled_tokens, "the scheduler is stuck"
        run_step(stream, output)
        through = [
            n for n in output.num_scheduled_tokens if waiting[n].num_computed_tokens == len(waiting[n].prompt_token_ids)
        ]
        scheduler.finish_requests(through, None)
        for name in through:
            del waiting[name]


def settled(stream: Stream) -> dict[str, Any]:
    """Everything that was told until nothing is under way."""
    told: dict[str, Any] = {"done": [], "faults": {}}
    ends = time.monotonic() + 60
    while time.monotonic() < ends:
        reply = stream.poll()
        told["done"] += reply["done"]
        told["faults"].update(reply["faults"])
        if not reply["under_way"]:
            return {**reply, **told}
        time.sleep(0.005)
    pytest.fail("never settled")


def assert_right(rows: dict[str, tuple[list[int], Any]], prompts: dict[str, list[int]], native_ids: list[int]) -> None:
    assert rows.keys() == prompts.keys()
    for name, prompt in prompts.items():
        ids, states = rows[name]
        assert ids == prompt, name
        for slot, native in enumerate(native_ids):
            assert states[:, slot].tolist() == states_of(prompt, native - 1), (name, native)


@both_runners
@pytest.mark.parametrize("settings", [{}, {"share": 3}, {"blocks": 6, "block_size": 8}, {"places": 2}])
def test_each_row_is_its_own_however_the_steps_are_cut(kind: str, settings: dict[str, int]) -> None:
    sink, ids = Kept(), [1, 4, LAYERS]
    stream = open_stream(kind, ids, sink, padding=3)
    prefill(stream, PROMPTS, **settings)
    told = settled(stream)
    assert sorted(told["done"]) == sorted(PROMPTS) and told["fatal"] is None and not told["incomplete"]
    assert_right(sink.rows, PROMPTS, ids)


@both_runners
def test_native_zero_is_what_goes_into_the_first_layer(kind: str) -> None:
    sink = Kept()
    stream = open_stream(kind, [0, 1], sink)
    prefill(stream, {"7": [5, 6, 7]})
    settled(stream)
    assert sink.rows["7"][1][:, 0].tolist() == [[5.0, 0, 0], [6.0, 0, 0], [7.0, 0, 0]]


@both_runners
def test_a_language_model_in_a_wrapper_with_three_axes_of_positions(kind: str) -> None:
    sink = Kept()
    stream = open_stream(kind, [2], sink, MultimodalModel(), axes=3)
    prefill(stream, PROMPTS)
    settled(stream)
    assert_right(sink.rows, PROMPTS, [2])


@pytest.mark.parametrize("returns", ["tensor", "no residual", "alone", "stale residual", "residual not taken"])
@pytest.mark.parametrize("by_position", [True, False])
def test_layers_that_return_other_things(returns: str, by_position: bool) -> None:
    sink = Kept()
    stream = open_stream("v1", [0, 3], sink, TextModel(returns, by_position))
    prefill(stream, {"0": [1, 2, 3]})
    assert settled(stream)["done"] == ["0"]
    assert sink.rows["0"][1][:, 1].tolist() == states_of([1, 2, 3], 2)


@pytest.mark.parametrize(
    ("path", "embedding"),
    [
        ("transformer.h", "wte"),  # GPT-2, Falcon
        ("transformer.h", "word_embeddings"),  # Bloom
        ("transformer.blocks", "wte"),  # MPT
        ("gpt_neox.layers", "embed_in"),
        ("model.decoder.layers", "embed_tokens"),  # OPT
        ("backbone.layers", "embeddings"),  # Mamba
    ],
)
def test_layers_under_other_names(path: str, embedding: str) -> None:
    sink = Kept()
    stream = open_stream("v1", [0, 1, 3], sink, RenamedModel(path, embedding))
    prefill(stream, {"0": [5, 2, 3]})
    assert settled(stream)["done"] == ["0"]
    for slot, native in enumerate([1, 3], start=1):
        assert sink.rows["0"][1][:, slot].tolist() == states_of([5, 2, 3], native - 1)


def test_a_model_that_runs_a_batch_of_one() -> None:
    sink = Kept()
    stream = open_stream("v1", [1, 3], sink, BatchedModel(), padding=3)
    prefill(stream, PROMPTS)
    assert sorted(settled(stream)["done"]) == sorted(PROMPTS)
    assert_right(sink.rows, PROMPTS, [1, 3])


def test_what_the_engine_does_for_itself_is_not_written() -> None:
    """Warm-up before the sink is open, and requests that are not ours afterwards."""
    sink = Kept()
    worker: Any = MiniWorker(RUNNERS["v1"](TextModel()))
    worker.vllm_config = _config()
    stream: Any = Stream(worker, [1])
    stream.runner = worker.model_runner
    warm = Output([NewRequest("warmup", [1, 2])], {"warmup": 2}, {"warmup": 0})
    run_step(stream, warm)
    stream.open(sink)
    run_step(stream, warm)
    prefill(stream, {"0": [4, 5]})
    assert settled(stream)["done"] == ["0"] and list(sink.rows) == ["0"]


@both_runners
def test_a_runner_that_orders_its_batch_in_an_unknown_way_is_found_out(kind: str) -> None:
    sink = Kept()
    stream: Any = open_stream(kind, [1], sink)
    forward = stream.runner._forward
    stream.runner._forward = lambda order, output: forward(order[::-1], output)
    prefill(stream, {"1": [1, 2, 3], "2": [4, 5, 6]})
    told = settled(stream)
    assert told["fatal"] and "token ids" in told["fatal"][1] and not told["done"]
    assert not sink.rows


def test_tokens_that_never_passed_through_are_not_made_up() -> None:
    """A prefix cache: the rest of a prompt passes, its beginning does not."""
    sink = Kept()
    stream = open_stream("v1", [1], sink)
    prompt = list(range(50, 70))
    prefill(stream, {"0": prompt, "1": prompt}, prefix_caching=True, places=1)
    told = settled(stream)
    assert told["done"] == ["0"] and told["incomplete"] == 1
    assert list(sink.rows) == ["0"]


def test_an_ended_request_is_forgotten() -> None:
    stream = open_stream("v1", [1], Kept())
    run_step(stream, Output([NewRequest("0@", [1, 2, 3])], {"0@": 2}, {"0@": 0}))
    other = Output([NewRequest("1@", [7])], {"1@": 1}, {"1@": 0}, {"0@"})
    run_step(stream, other)
    told = settled(stream)
    assert told["done"] == ["1"] and not told["incomplete"]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 3.0])
def test_states_that_cannot_be_right_are_told_and_not_written(value: float) -> None:
    sink, model = Kept(), TextModel()
    stream = open_stream("v1", [2], sink, model)
    with torch.no_grad():
        model.model.embed_tokens.weight[50] = value
    if value == 3.0:  # one vector of equal components
        model.model.layers[0].register_forward_hook(lambda *_: (torch.zeros(3, 3), torch.full((3, 3), 3.0)))
        model.model.layers[1].register_forward_hook(
            lambda *_: (torch.zeros(3, 3), torch.full((3, 3), 3.0)), prepend=True
        )
    prefill(stream, {"0": [1, 50, 2]})
    told = settled(stream)
    assert list(told["faults"]) == ["0"] and not told["done"] and not sink.rows
    assert ("constant" if value == 3.0 else "NaN or Inf") in told["faults"]["0"]


def test_a_sink_that_fails_ends_the_writing_and_says_where() -> None:
    """A row whose writing was under way meanwhile is told of, since it is stored."""
    room = threading.Semaphore(1)  # several threads write: one of them finds room, whichever comes first

    class Full(Kept):
        def write(self, row_id: str, token_ids: Any, states: Any) -> None:
            if not room.acquire(blocking=False):
                raise OSError(28, "No space left on device", "/data/row")
            while stream.poll()["fatal"] is None:
                time.sleep(0.001)
            super().write(row_id, token_ids, states)

    sink = Full()
    stream = open_stream("v1", [1], sink)
    prefill(stream, PROMPTS)
    told = settled(stream)
    assert told["fatal"][0] == "/data/row" and "No space left" in told["fatal"][2]
    assert told["sink"] == [*told["fatal"], 28]
    assert told["done"] == list(sink.rows) and len(sink.rows) == 1


def test_a_slow_sink_slows_the_steps_down() -> None:
    """No more steps are taken in than there are buffers, so memory does not grow with the data."""
    gate, began = threading.Event(), []

    class Slow(Kept):
        def write(self, row_id: str, token_ids: Any, states: Any) -> None:
            gate.wait(120)
            super().write(row_id, token_ids, states)

    sink = Slow()
    stream = open_stream("v1", [1], sink)
    prompts = {str(i): [50 + i] * BUDGET for i in range(HOST_BUFFERS + 4)}

    def run() -> None:
        for name, prompt in prompts.items():
            began.append(name)
            run_step(stream, Output([NewRequest(name + MARK, prompt)], {name + MARK: BUDGET}, {name + MARK: 0}))

    thread = threading.Thread(target=run)
    thread.start()
    ends = time.monotonic() + 60
    while len(began) <= HOST_BUFFERS and time.monotonic() < ends:
        time.sleep(0.005)
    thread.join(1)
    assert thread.is_alive() and len(began) == HOST_BUFFERS + 1 and not sink.rows
    gate.set()
    thread.join(60)
    assert sorted(settled(stream)["done"]) == sorted(prompts)
    assert_right(sink.rows, prompts, [1])


def test_a_layer_that_does_not_run_is_noticed() -> None:
    model = TextModel()
    stream = open_stream("v1", [1, 2], Kept(), model)
    model.model.layers = model.model.layers[:1]
    prefill(stream, {"0": [1, 2]})
    told = settled(stream)
    assert "1 states of 2" in told["fatal"][2] and not told["done"]


def test_a_layer_that_gives_fewer_rows_than_the_step_has_is_refused() -> None:
    """The rest of the device's buffer is of an earlier step, and would go out with this step's token ids."""
    sink, model = Kept(), TextModel()
    stream = open_stream("v1", [LAYERS], sink, model)
    model.model.layers[-1].register_forward_hook(
        lambda module, inputs, output: tuple(part[:-1] for part in output), prepend=True
    )
    prefill(stream, {"0": [5, 6, 7, 8]})
    fatal = settled(stream)["fatal"]
    assert "4 rows of a step" in fatal[1] and fatal[2] == "3 rows" and not sink.rows


def test_layers_that_return_one_devices_share_are_refused_on_several() -> None:
    model = TextModel()
    model.model.layers[2] = Partial("pair")
    worker: Any = MiniWorker(RUNNERS["v1"](model), devices=2)
    worker.vllm_config = _config()
    with pytest.raises(WrongStatesError, match="one device's share"):
        Stream(worker, [3])


def test_devices_that_capture_nothing_have_the_same_hooks() -> None:
    """Else the devices compile other graphs, and a sum over them that one fuses and the other does not never ends."""
    model, other = TextModel(), TextModel()
    open_stream("v1", [2, 4], Kept(), model)
    taps.attach(other, [2, 4], None, 2)
    hooked = [[len(layer._forward_hooks) for layer in each.model.layers] for each in (model, other)]
    assert hooked[0] == hooked[1] and sum(hooked[0]) == 2
    other(input_ids=torch.tensor([1, 2]), positions=torch.tensor([0, 1]))


def test_layers_that_are_elsewhere_are_refused() -> None:
    with pytest.raises(WrongStatesError, match="tensor parallel only"):
        open_stream("v1", [LAYERS + 1], Kept())


def test_the_same_hooks_serve_a_compiled_model() -> None:
    """The op survives the compiler, with and without a residual; `eager` as back end, since it is there everywhere."""
    sink, model = Kept(), TextModel()
    stream = open_stream("v1", [1, LAYERS], sink, model)
    model.model.forward = torch.compile(model.model.forward, backend="aot_eager", dynamic=True, fullgraph=True)
    prefill(stream, PROMPTS)
    settled(stream)
    assert_right(sink.rows, PROMPTS, [1, LAYERS])
