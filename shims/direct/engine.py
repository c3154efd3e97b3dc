"""vLLM's `LLM` for prefill only: rows of token ids in, the ids of durable rows out."""

from __future__ import annotations

import contextlib
import json
import logging
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from shims.behaviours import failures
from shims.behaviours.generator import worker_receipts
from shims.direct.agreement import require_agreement
from shims.direct.text_only import text_only
from shims.direct.watch import died, lost, watched
from shims.errors import SinkError, SpecshimError, UsageError, WrongStatesError
from shims.guardian import guarding
from shims.precision import keep_float32
from shims.spawning import spawn_workers
from shims.versions import detect, within

# Raised when the hooks trace to another graph on any device: what an older specshim left in vLLM's compile cache is not
# taken for one of these. 2: devices that capture nothing are hooked, too.
_TRACED = 2
_WORKER = "shims.direct.worker.CaptureWorker"
# Known to the engine ahead of its turn, so that it never waits for us.
_WINDOW = 512
# Seconds. The worker answers between two steps, and the device waits meanwhile: not often.
_POLL_EVERY = 2.0
# Seconds, once there are no steps left: what the last rows' writers need is seen soon.
_POLL_AT_END = 0.02
# Characters of what a worker wrote, where it failed amid a run: the frames are vLLM's, the end says why.
_AMID_A_RUN = 1000


@dataclass(frozen=True)
class DirectOptions:
    """What to load and what to take.

    Args:
        model: folder or name of the model.
        native_ids: states to take, ascending and distinct: k is R after k layers, 0 the embeddings.
        sink: `module:callable` that makes a `shims.direct.stream.Sink` in the worker, of `sink_settings`.
        max_model_len: longest row in tokens, plus the one that vLLM samples.
        dtype: `auto`, `float32`, `bfloat16`, `float16`.
        enforce_eager: None: compiled on an accelerator, eager on a CPU, where compiling takes minutes.
        max_num_batched_tokens: tokens of one step; None leaves it to vLLM.
        more: further keywords of `vllm.LLM`.
    """

    model: str
    native_ids: Sequence[int]
    sink: str
    sink_settings: dict[str, Any]
    max_model_len: int | None = None
    dtype: str = "auto"
    tensor_parallel_size: int = 1
    gpu_memory_utilization: float = 0.8
    trust_remote_code: bool = False
    enforce_eager: bool | None = None
    max_num_batched_tokens: int | None = None
    more: dict[str, Any] = field(default_factory=dict)


@dataclass
class Settled:
    """What became of rows since the last time: ids of those that are durable; id -> fault of those that are not."""

    done: list[str]
    faults: dict[str, str]


class DirectEngine:
    """A loaded model whose rows go straight from the worker to the sink.

    Raises:
        UsageError: options that vLLM cannot serve.
        SpecshimError: the model does not load; the worker's own words are in the message.
    """

    def __init__(self, options: DirectOptions) -> None:
        ids = list(options.native_ids)
        if not ids or ids != sorted(set(ids)) or ids[0] < 0:
            raise UsageError("native_ids", "ascending, distinct, from 0 on", str(ids), "sort them and drop repeats")
        self._words = failures.opened()
        try:
            self._llm: Any = _load(options, Path(self._words.name))
        except BaseException:
            self._words.cleanup()
            raise
        self._engine = self._llm.llm_engine
        self._in_engine: set[str] = set()
        self._serial = 0
        # From 0.17 on a prompt that says what it is goes through as it is; others are rendered first, and deprecated:
        # https://github.com/vllm-project/vllm/blob/v0.17.0/vllm/v1/engine/input_processor.py
        # Without a range once 0.16 is no longer among the known releases.
        self._kind = {"type": "token"} if within(detect().vllm, ">=0.17") else {}
        replies = self._llm.collective_rpc("specshim_open", args=(options.sink, options.sink_settings))
        self.workers: list[dict[str, Any]] = replies
        worker_receipts[:] = replies
        ranks = {reply["pid"]: reply["rank"] for reply in replies}
        self._names = {pid: f"vLLM's worker of rank {rank}, process {pid}" for pid, rank in ranks.items()}

    def run(self, rows: Iterable[tuple[str, Sequence[int]]]) -> Iterator[Settled]:
        """Prefill rows in the engine's own order; ends when all of them are settled.

        Args:
            rows: (row id, token ids). Ids are distinct within a run and hold no `@`; taken as the engine
                needs them, so that a generator may be endless.

        Yields:
            What was settled, every two seconds or so.

        Raises:
            WrongStatesError: a row could not be proved whole and its own; nothing of it was written.
            SinkError: a row could not be stored. Rows told before are durable.
            SpecshimError: the engine failed; likewise.
        """
        with watched(self._names) as first, _told(Path(self._words.name), self._names, first):
            yield from self._run(iter(rows))

    def _run(self, rows: Iterator[tuple[str, Sequence[int]]]) -> Iterator[Settled]:
        waiting: set[str] = set()
        more, polled = True, time.monotonic()
        while more or self._in_engine:
            while more and len(self._in_engine) < _WINDOW:
                row = next(rows, None)
                if row is None:
                    more = False
                    break
                waiting.add(row[0])
                self._add(*row)
            if self._in_engine:
                for output in self._engine.step():
                    if output.finished:
                        self._in_engine.discard(output.request_id)
            if time.monotonic() - polled > _POLL_EVERY:
                yield self._poll(waiting)[0]
                polled = time.monotonic()
        pause = 0.002
        while waiting:
            settled, left = self._poll(waiting)
            yield settled
            if waiting and not left:
                raise WrongStatesError(
                    f"rows {', '.join(sorted(waiting)[:5])}{' …' if len(waiting) > 5 else ''}",
                    "every token of a row to pass through the model",
                    f"{len(waiting)} rows that the engine finished and the worker has not whole",
                    "tokens served from a cache never pass through the model: prefix caching must be off",
                )
            if waiting:
                time.sleep(pause)
                pause = min(pause * 2, _POLL_AT_END)

    def _add(self, row_id: str, token_ids: Sequence[int]) -> None:
        from vllm import SamplingParams

        # A serial number, since a row may be asked for again while vLLM still forgets the first time.
        request_id = f"{row_id}@{self._serial}"
        self._serial += 1
        greedy = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)
        self._engine.add_request(request_id, {**self._kind, "prompt_token_ids": list(token_ids)}, greedy)
        self._in_engine.add(request_id)

    def _poll(self, waiting: set[str]) -> tuple[Settled, bool]:
        """What was settled, and whether something may still come."""
        reply = next(r for r in self._llm.collective_rpc("specshim_poll") if r is not None)
        settled = Settled(reply["done"], reply["faults"])
        waiting -= {*settled.done, *settled.faults}
        if reply["sink"]:
            raise SinkError(*reply["sink"])
        if reply["fatal"]:
            raise WrongStatesError(*reply["fatal"])
        return settled, bool(reply["under_way"] or settled.done or settled.faults)

    @property
    def vllm_config(self) -> Any:
        """The configuration that vLLM made."""
        return self._engine.vllm_config

    def close(self) -> None:
        """End the engine's processes."""
        engine, self._llm, self._engine = self._engine, None, None
        with contextlib.suppress(Exception):  # one that died has nothing to end
            engine.engine_core.shutdown()
        self._words.cleanup()


def _load(options: DirectOptions, words: Path) -> Any:
    if "vllm" not in sys.modules and find_spec("vllm") is None:
        raise SpecshimError(
            "the direct engine",
            "vLLM in this environment",
            "none",
            "install a known release; `specshim plan --vllm RELEASE` tells whether one is",
        )
    require_agreement()
    from vllm import LLM
    from vllm.platforms import current_platform

    eager = current_platform.is_cpu() if options.enforce_eager is None else options.enforce_eager
    settings: dict[str, Any] = {
        "model": options.model,
        "dtype": options.dtype,
        "tensor_parallel_size": options.tensor_parallel_size,
        "gpu_memory_utilization": options.gpu_memory_utilization,
        "trust_remote_code": options.trust_remote_code,
        "skip_tokenizer_init": True,
        "enable_prefix_caching": False,
        "enable_chunked_prefill": True,
        "enforce_eager": eager,
        "disable_log_stats": True,
        "worker_cls": _WORKER,
        "additional_config": {"specshim": {"native_ids": list(options.native_ids), "traced": _TRACED}},
        **options.more,
    }
    if not eager:
        # Graphs are captured for small batches only, and a captured graph would not call the taps.
        settings.setdefault("compilation_config", {"cudagraph_mode": "NONE"})
    settings.update(_text_only(options.model))
    for name in ("max_model_len", "max_num_batched_tokens"):
        if (value := getattr(options, name)) is not None:
            settings[name] = value
    spawn_workers()
    keep_float32(options.dtype)
    # Killed alone, this process would leave behind workers that keep the device's memory and go on writing rows.
    with failures.collected_in(words), _quiet(), text_only(), guarding():
        try:
            return LLM(**settings)
        except Exception as error:
            raise SpecshimError(
                f"loading {options.model}",
                "vLLM to start",
                failures.described(error, words),
                "look at the innermost cause named here; `specshim report` shows the stack for a report",
            ) from error


def _text_only(model: str) -> dict[str, Any]:
    """Keywords that leave out what only pictures and sound need: encoders, processors, their warm-up."""
    from vllm.engine.arg_utils import EngineArgs

    if "language_model_only" in EngineArgs.__dataclass_fields__:  # from 0.17 on
        return {"language_model_only": True}
    config = Path(model) / "config.json"
    if config.is_file() and "vision_config" in json.loads(config.read_text(encoding="utf-8")):
        return {"limit_mm_per_prompt": {"image": 0, "video": 0}}
    return {}


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """No warnings of the renderer, which misses the tokenizer that rows of token ids do not need."""
    renderer = logging.getLogger("vllm.renderers.base")

    # A filter, since vLLM configures its loggers anew while it starts, which puts their levels back.
    def errors_only(record: logging.LogRecord) -> bool:
        return record.levelno >= logging.ERROR

    renderer.addFilter(errors_only)
    try:
        yield
    finally:
        renderer.removeFilter(errors_only)


@contextlib.contextmanager
def _told(words: Path, names: Mapping[int, str], first: Sequence[int]) -> Iterator[None]:
    """vLLM's own failures, with a type, a text, what its workers wrote, and the next step.

    Args:
        names: what the workers are, by pid.
        first: pids of those that were found dead first.
    """
    try:
        yield
    except (SpecshimError, GeneratorExit, KeyboardInterrupt):
        raise
    except Exception as error:
        spoke, gone = failures.by_pid(words), list(first) or died(names)
        if gone and not spoke & set(gone):
            # Of a killed worker vLLM says that a wait was cancelled; the others, that a connection broke.
            others = failures.told(words, _AMID_A_RUN) if spoke & set(names) else ""
            raise lost((names[pid] for pid in gone), others) from error
        raise SpecshimError(
            "vLLM engine",
            "to prefill the rows",
            failures.described(error, words, _AMID_A_RUN),
            "look at the innermost cause named here; finished rows are kept, so the same command goes on from here",
        ) from error
