"""The smaller behaviours: overrides, what a failing worker tells, construction, memory, the mask that went away."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

import shims
from shims.behaviours import failures, memory
from shims.behaviours.executor import AdaptedExecutor, explain_failure, single_reply
from shims.behaviours.generator import EngineError, construct
from shims.behaviours.kv_cache import block_size, specs_of_groups
from shims.behaviours.overrides import chosen, overrides
from shims.errors import SpecshimError, WrongStatesError

# --- overrides ------------------------------------------------------------------------------------


def test_an_override_reaches_its_call_and_ends_with_its_context() -> None:
    with overrides(dtype="float32", max_num_seqs=4, block_size=None):
        assert chosen("ModelConfig") == {"dtype": "float32"}
        assert chosen("SchedulerConfig") == {"max_num_seqs": 4}
        assert chosen("CacheConfig") == {}  # None leaves a setting as it is
        with shims.overrides(dtype="bfloat16"):
            assert chosen("ModelConfig") == {"dtype": "bfloat16"}
            assert chosen("SchedulerConfig") == {}
        assert chosen("ModelConfig") == {"dtype": "float32"}
    assert chosen("ModelConfig") == {}


def test_an_override_ends_with_a_context_that_fails() -> None:
    with pytest.raises(KeyError), overrides(dtype="float32"):
        raise KeyError
    assert chosen("ModelConfig") == {}


def test_an_unknown_setting_is_refused_with_the_known_ones() -> None:
    with pytest.raises(TypeError, match=r"dtype(.|\n)*not \['dtypes'\]"), overrides(dtypes="float32"):
        pass


# --- failures of workers --------------------------------------------------------------------------


@pytest.fixture
def vllms_logger() -> Any:
    logger = logging.getLogger("vllm.v1.executor.multiproc_executor")
    before = list(logger.handlers)
    yield logger
    for handler in [h for h in logger.handlers if h not in before]:
        logger.removeHandler(handler)


def _fail_in_the_worker(logger: logging.Logger, text: str) -> None:
    try:
        raise ValueError(text)
    except ValueError:
        logger.exception("WorkerProc failed to start.")


def test_what_a_worker_logs_of_its_failure_reaches_the_parent(
    vllms_logger: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    with failures.collected() as folder:
        assert failures.told(folder) == ""
        failures.listen()
        failures.listen()
        vllms_logger.error("no exception: not kept")
        _fail_in_the_worker(vllms_logger, "the cause")
        told = failures.told(folder)
    assert told.startswith("worker: Traceback")
    assert told.endswith("ValueError: the cause")
    assert "_fail_in_the_worker" in told
    assert not folder.exists()
    _fail_in_the_worker(vllms_logger, "after the parent has gone on")  # nobody to tell: no error of its own
    assert "Logging error" not in capsys.readouterr().err


def test_a_worker_whom_nobody_asked_keeps_nothing(vllms_logger: logging.Logger) -> None:
    before = list(vllms_logger.handlers)
    failures.listen()
    assert vllms_logger.handlers == before


def test_the_end_of_a_long_traceback_is_kept(vllms_logger: logging.Logger) -> None:
    with failures.collected() as folder:
        failures.listen()
        _fail_in_the_worker(vllms_logger, "long " * 5000 + "the end")
        assert failures.told(folder).endswith("the end")
        assert len(failures.told(folder)) < 7000


def test_the_environment_is_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    before = dict(os.environ)
    with failures.collected() as outer, failures.collected() as inner:
        assert outer != inner
        assert os.environ["SPECSHIM_WORKER_FAILURES"] == str(inner)
    assert dict(os.environ) == before


@pytest.mark.parametrize("failure", [AssertionError(), KeyError("x"), RuntimeError("text")], ids=repr)
def test_a_failure_is_sent_with_its_type_and_traceback(failure: Exception) -> None:
    def deep() -> None:
        raise failure

    sent: list[Any] = []
    try:
        deep()
    except Exception as error:
        explain_failure(sent.append, None, (error,), {})
        explain_failure(sent.append, None, (), {"output": error})
    for output in sent:
        assert isinstance(output, RuntimeError)
        assert str(output).startswith(f"{type(failure).__name__}: {str(failure) or '(no message)'}\nin the worker:\n")
        assert "in deep" in str(output)


def test_what_is_no_failure_or_carries_data_is_sent_as_it_is() -> None:
    class Carrier(Exception):
        kv_connector_output = "data"

    carrier, result, sent = Carrier(), {"a": 1}, []
    for output in (carrier, result, None):
        explain_failure(sent.append, None, (output,), {})
    assert sent[0] is carrier
    assert sent[1:] == [result, None]


# --- construction ---------------------------------------------------------------------------------


def _built(failure: Exception | None, log: Callable[[], None] = lambda: None) -> tuple[list[str], Exception | None]:
    """Whether the executor was stopped, and what came out."""
    stopped: list[str] = []

    class Generator:
        executor = SimpleNamespace(shutdown=lambda: stopped.append("stopped"))

    generator = Generator()

    def wrapped(path: str) -> None:
        log()
        if failure is not None:
            raise failure

    try:
        construct(wrapped, generator, ("model",), {})
    except Exception as error:
        return list(stopped), error
    return list(stopped), None  # as it is while somebody holds the generator


def test_a_generator_that_can_be_built_is_left_alone() -> None:
    assert _built(None) == ([], None)


@pytest.mark.parametrize("failure", [ValueError("layer 99"), FileNotFoundError("no model"), WrongStatesError(*"abcd")])
def test_what_says_all_there_is_to_say_passes_as_it_is(failure: Exception) -> None:
    assert _built(failure) == (["stopped"], failure)


@pytest.mark.parametrize("failure", [ValueError(), AssertionError(), RuntimeError("engine"), TimeoutError()], ids=repr)
def test_the_rest_is_explained(failure: Exception) -> None:
    stopped, error = _built(failure)
    assert stopped == ["stopped"]
    assert isinstance(error, EngineError)
    assert error.found.startswith(f"{type(failure).__name__}: {str(failure) or '(no message)'} (at ")
    assert error.__cause__ is failure


def test_a_workers_own_words_come_along(vllms_logger: logging.Logger) -> None:
    def worker() -> None:
        failures.listen()
        _fail_in_the_worker(vllms_logger, "no common block size")

    error = _built(ValueError("WorkerProc initialization failed"), worker)[1]
    assert isinstance(error, EngineError)
    assert "ValueError: no common block size" in error.found


# --- executor, KV cache, memory -------------------------------------------------------------------


def test_the_adapted_executor_is_the_executor_but_for_its_methods() -> None:
    class Executor:
        name = "real"

        def collective_rpc(self, method: str, unique_reply_rank: int | None = None) -> list[str]:
            return [method]

    adapted = AdaptedExecutor(Executor(), {"collective_rpc": single_reply})
    assert adapted.name == "real"
    assert adapted.collective_rpc("x", unique_reply_rank=0) == "x"
    assert adapted.collective_rpc("x") == ["x"]
    with pytest.raises(AttributeError):
        adapted.nothing_like_it  # noqa: B018


def test_specs_and_block_size_are_read_from_the_groups() -> None:
    groups = [
        SimpleNamespace(layer_names=["a", "b"], kv_cache_spec=SimpleNamespace(block_size=64)),
        SimpleNamespace(layer_names=["c"], kv_cache_spec=SimpleNamespace(block_size=16)),
    ]
    specs = specs_of_groups((), {"kv_cache_groups": groups})
    assert {name: spec.block_size for name, spec in specs.items()} == {"a": 64, "b": 64, "c": 16}
    assert block_size(SimpleNamespace(kv_cache_groups=groups)) == 16


@pytest.mark.parametrize("cuda", [True, False])
def test_memory_is_the_gpus_where_there_is_one(cuda: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = SimpleNamespace(
        float32="float32",
        cuda=SimpleNamespace(mem_get_info=lambda *_: (1, 2), is_available=lambda: cuda, empty_cache=lambda: "emptied"),
    )
    monkeypatch.setattr(memory, "_ram", lambda: (3, 4))
    facade = memory.torch_facade(torch)
    assert facade.cuda.mem_get_info() == ((1, 2) if cuda else (3, 4))
    assert facade.float32 == "float32"
    assert facade.cuda.empty_cache() == "emptied"
    assert torch.cuda.mem_get_info() == (1, 2)


def test_without_psutil_the_query_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "psutil", None)
    with pytest.raises(SpecshimError, match="pip install psutil"):
        memory._ram()


# --- the mask that transformers removed -----------------------------------------------------------


@pytest.mark.parametrize("past", [0, 3])
@pytest.mark.parametrize("window", [None, 2])
@pytest.mark.parametrize("padded", [False, True])
def test_the_causal_mask_lets_each_query_see_what_it_may(past: int, window: int | None, padded: bool) -> None:
    torch = pytest.importorskip("torch")
    from shims.behaviours.imports import causal_mask

    batch, query = 2, 4
    keys = past + query
    seen = torch.ones(batch, keys, dtype=torch.long)
    if padded:
        seen[1, :2] = 0
    embeds = torch.zeros(batch, query, 8, dtype=torch.bfloat16)
    mask = causal_mask(seen if padded else None, (batch, query), embeds, past, window)
    assert mask.shape == (batch, 1, query, keys)
    assert mask.dtype == torch.bfloat16
    assert set(mask.unique().tolist()) <= {0.0, torch.finfo(torch.bfloat16).min}
    for b in range(batch):
        for q in range(query):
            at = past + q
            may = [k <= at and (window is None or k > at - window) and bool(seen[b, k]) for k in range(keys)]
            assert (mask[b, 0, q] == 0).tolist() == may
