"""One step of the engine in, finished rows out to a sink, on threads of their own.

    model thread   begin → taps → commit        waits only when all host buffers are in use
    rows thread    waits for the copy, proves each row, gives whole rows to
    writers        sink.write, one row at a time each

What goes wrong on the threads is kept and told by `poll`; from then on nothing is written any more.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Protocol

from shims.direct import taps
from shims.direct.assembly import Assembly, Row, Step
from shims.direct.staging import Filled, Staging
from shims.errors import SinkError, SpecshimError, WrongStatesError
from shims.model_parts import devices_of, follow_batches, model_of, runner_kind

# A request is called "<row>@" by us; vLLM may add characters of its own behind.
MARK = "@"
# Half of the cores at most: the other half feeds the device.
WRITERS = max(2, min(8, (os.cpu_count() or 2) // 2))
_NICE = 5


class Sink(Protocol):
    """Where finished rows go. `write` is called from several threads at once."""

    def write(self, row_id: str, token_ids: Any, states: Any) -> None:
        """Store a row so that it survives a crash from here on.

        Args:
            token_ids: int64 [T].
            states: [T, L, H], contiguous, CPU; only good until this returns.
        """
        ...


class Stream:
    """The capture of one worker.

    Args:
        worker: vLLM's worker, its model loaded and not yet run.
        native_ids: ascending, distinct.

    Raises:
        WrongStatesError: the model or the runner cannot be followed.
    """

    def __init__(self, worker: Any, native_ids: list[int]) -> None:
        self._runner = worker.model_runner
        self.kind = runner_kind(self._runner)
        self.model = type(model_of(self._runner)).__name__
        self._layers = len(native_ids)
        self._staging = Staging(self._layers, worker.vllm_config.scheduler_config.max_num_batched_tokens)
        self._assembly = Assembly()
        self._step: Step | None = None
        self._tapped = 0
        self._token_ids: Any = None
        self._positions: Any = None
        self._sink: Sink | None = None
        self._filled: queue.SimpleQueue[tuple[Step, Filled] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._under_way = 0
        self._done: list[str] = []
        self._faults: dict[str, str] = {}
        self._fatal: SpecshimError | None = None  # a SinkError where a row could not be stored
        taps.attach(model_of(self._runner), native_ids, self, devices_of(worker))
        if self.kind == "v2":
            follow_batches(self._runner, self._ordered)

    def _ordered(self, request_ids: list[str]) -> None:
        if self._step is not None:
            self._step.order = request_ids

    def open(self, sink: Sink) -> None:
        """Begin to listen; before, the engine warms up with requests of its own."""
        if self._sink is not None:
            raise SpecshimError("worker", "one sink", "a second one", "close this engine and build another")
        self._sink = sink
        self._writers = ThreadPoolExecutor(WRITERS, "specshim-writer", initializer=_be_nice)
        threading.Thread(target=self._run, name="specshim-rows", daemon=True).start()

    # On the model's thread.

    @contextmanager
    def step(self, scheduler_output: Any) -> Iterator[None]:
        """Around one `execute_model`."""
        if self._sink is None or not scheduler_output.total_num_scheduled_tokens:
            yield
            return
        self._step = Step(
            scheduled=dict(scheduler_output.num_scheduled_tokens),
            started={new.req_id: list(new.prompt_token_ids or []) for new in scheduler_output.scheduled_new_reqs},
            ended=set(scheduler_output.finished_req_ids),
            runner=self.kind,
        )
        self._tapped, self._token_ids, self._positions = 0, None, None
        try:
            self._staging.begin()
            yield
            self._commit(self._step)
        finally:
            self._step = None

    def state(self, slot: int, hidden: Any, residual: Any | None) -> None:
        """See `taps.Receiver`."""
        if self._step is None:
            self._staging.prepare(hidden)
        elif len(hidden) < self._step.tokens:  # the rest of the buffer is of an earlier step
            self._fail(
                WrongStatesError(
                    f"worker, {self.model} on {type(self._runner).__name__}",
                    f"the {self._step.tokens} rows of a step",
                    f"{len(hidden)} rows",
                    "leave out what splits a step (expert parallelism with sequence parallelism, micro-batches)",
                )
            )
        else:
            self._staging.put(slot, hidden, residual, self._step.tokens)
            self._tapped += 1

    def inputs(self, token_ids: Any | None, positions: Any | None) -> None:
        """See `taps.Receiver`."""
        if self._step is None:
            return
        if token_ids is not None:
            # Models of transformers, inside of vLLM, embed a batch of one.
            self._token_ids = token_ids.detach().reshape(-1).clone()
        if positions is not None:
            # Multimodal rotary embeddings carry one row per axis; on text all rows are equal.
            self._positions = (positions[0] if positions.dim() > 1 else positions).detach().clone()
            if self.kind == "v1":
                self._step.order = list(self._runner.input_batch.req_ids)

    def _commit(self, step: Step) -> None:
        seen = {"order": step.order, "token ids": self._token_ids, "positions": self._positions}
        unseen = [name for name, value in seen.items() if value is None]
        if unseen or self._tapped != self._layers:
            self._fail(
                WrongStatesError(
                    f"worker, {self.model} on {type(self._runner).__name__}",
                    "every captured layer to run once a step, with token ids and positions",
                    f"{self._tapped} states of {self._layers}; not seen: {unseen or 'nothing else'}",
                    "try --enforce-eager; if that does not help, report this model: its layers are called in a "
                    "way the capture does not know",
                )
            )
            return
        filled = self._staging.finish(step.tokens, self._token_ids, self._positions)
        with self._lock:
            self._under_way += 1
        self._filled.put((step, filled))

    # On threads of our own.

    def _run(self) -> None:
        _be_nice()
        while (item := self._filled.get()) is not None:
            step, filled = item
            try:
                filled.wait()
                if self._fatal is None:
                    self._give_rows(step, filled)
            except Exception as error:  # noqa: BLE001 - told by poll
                self._fail(error)
            finally:
                filled.host.release()
                with self._lock:
                    self._under_way -= 1

    def _give_rows(self, step: Step, filled: Filled) -> None:
        host, n = filled.host, filled.tokens
        columns = (host.states[:n], host.extremes[:n])
        for row in self._assembly.rows(step, host.token_ids[:n], host.positions[:n], columns):
            if MARK in row.request_id:
                host.hold()
                with self._lock:
                    self._under_way += 1
                self._writers.submit(self._write, row, filled)

    def _write(self, row: Row, filled: Filled) -> None:
        row_id = row.request_id.partition(MARK)[0]
        states, extremes = row.columns
        try:
            fault = _fault(extremes)
            if fault is not None:
                with self._lock:
                    self._faults[row_id] = fault
            elif self._fatal is None:
                assert self._sink is not None
                self._sink.write(row_id, row.token_ids, states)
                # A stored row is told of, also where another writer failed in the meantime.
                with self._lock:
                    self._done.append(row_id)
        except Exception as error:  # noqa: BLE001 - told by poll
            self._fail(error)
        finally:
            filled.host.release()
            with self._lock:
                self._under_way -= 1

    def _fail(self, error: Exception) -> None:
        with self._lock:
            if self._fatal is None:
                self._fatal = error if isinstance(error, SpecshimError) else _explained(error)

    # Asked for by the parent, between steps.

    def poll(self) -> dict[str, Any]:
        """What became durable since the last call, in plain values for an RPC.

        Returns:
            `done`: row ids; `faults`: row id -> why it was not written; `under_way`: steps and rows that
            are not settled; `incomplete`: requests that began and are not whole; `fatal`: the four parts
            of the error that ended the capture, or None; `sink`: where that is a SinkError, its arguments.
        """
        with self._lock:
            done, self._done = self._done, []
            faults, self._faults = self._faults, {}
            fatal = self._fatal
            return {
                "done": done,
                "faults": faults,
                "under_way": self._under_way,
                "incomplete": len(self._assembly.incomplete()) if not self._under_way else None,
                "fatal": list(fatal.args) if fatal else None,
                "sink": [*fatal.args, fatal.errno] if isinstance(fatal, SinkError) else None,
            }


def _explained(error: Exception) -> SinkError:
    if isinstance(error, OSError) and error.filename:
        return SinkError(
            str(error.filename),
            "to write a finished row",
            f"{type(error).__name__}: {error.strerror or error}",
            "make room (or mend the folder) and repeat the command: finished rows are kept",
            error.errno,
        )
    frames, tb = [], error.__traceback__
    while tb is not None:
        frames.append(f"{tb.tb_frame.f_code.co_filename}:{tb.tb_lineno}")
        tb = tb.tb_next
    return SinkError(
        f"worker, {frames[-1] if frames else 'writer'}",
        "to store a finished row",
        f"{type(error).__name__}: {error or 'no message'}",
        "report this; finished rows are kept, so the same command goes on from here",
    )


def _fault(extremes: Any) -> str | None:
    """What is wrong with a row, from the least and the largest component of each state: [T, L, 2]."""
    import torch

    low, high = extremes[..., 0].float(), extremes[..., 1].float()
    wild = ~(torch.isfinite(low) & torch.isfinite(high))
    for bad, what in ((wild, "NaN or Inf"), (low == high, "constant")):
        if bool(bad.any()):
            first = int(bad.any(1).nonzero()[0])
            return f"{what}: {int(bad.sum())} of {bad.numel()} states, first at token {first}"
    return None


def _be_nice() -> None:
    """Let the thread that feeds the device go first (Linux: niceness is a thread's own)."""
    with contextlib.suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
