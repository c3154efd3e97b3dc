"""One engine, called with rows; knows nothing of Ray. Answers, errors too, are plain values, whoever carries them.

The rows that it was given wait in a queue that the engine takes from, so the engine computes while nobody calls.
"""

from __future__ import annotations

import os
import time
import traceback
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pipeline import manifest, run_history
from pipeline.engines import EngineOptions
from pipeline.engines.direct import StreamingEngine, open_streaming
from pipeline.model_info import read_model
from pipeline.places import signature
from pipeline.prepared import PreparedFile
from pipeline.replicas.sink import LeasedSinkSettings
from shims.direct.engine import Settled
from shims.errors import SinkError, SpecshimError, UsageError, WrongStatesError
from shims.guardian import guard

_ANSWER_EVERY = 0.5  # seconds


@dataclass(frozen=True)
class Task:
    """What a replica has to do; travels to another process, maybe on another machine."""

    options: EngineOptions
    sink: LeasedSinkSettings
    folder_signature: str
    """What the lock of the output folder says while the run is on: tells that this is the same folder."""
    slot: int = 0
    cores: list[int] = field(default_factory=list)
    """What it may run on, its start included, so that it does not slow the others; empty: everything."""
    environment: dict[str, str] = field(default_factory=dict)
    """Set before vLLM is imported."""
    guessed: bool = False
    """Whether the dtype is not the model's because the machine that was asked for ``auto`` has no GPU."""


@dataclass
class Answer:
    """Of a call to a replica."""

    done: list[int] = field(default_factory=list)
    """Rows that are durable."""
    faults: dict[int, str] = field(default_factory=dict)
    """Row -> why its states cannot be right; it was not written."""
    facts: dict[str, Any] = field(default_factory=dict)
    """Of `open`: what the manifest says of this process's stack."""
    error: tuple[str, str, str, str] | None = None
    """The four parts of what went wrong; the replica is of no more use."""
    final: bool = False
    """Whether ``error`` would come again: another replica must not try."""


class Replica:
    """See the module; `open` first, then `work` again and again."""

    def __init__(self, task: Task) -> None:
        os.environ.update(task.environment)
        if task.cores:
            os.sched_setaffinity(0, task.cores)
        self._task = task
        self._engine: StreamingEngine | None = None
        self._queue: deque[int] = deque()
        self._stream: Iterator[Settled] | None = None

    def open(self) -> Answer:
        """Look whether the files are the caller's, and load the model."""
        task = self._task
        try:
            self._check_files()
            record = manifest.compose("extract", with_plan=True, engine="direct")
            header = task.sink.header | {"stack": run_history.stack_name(record)}
            sink = replace(task.sink, header=header)
            guard()
            self._engine = open_streaming(task.options, sink)
        except Exception as error:  # noqa: BLE001  told to the caller, whatever it is
            return _told(error)
        return Answer(facts={name: record[name] for name in ("created", "versions", "plan")})

    def _check_files(self) -> None:
        task = self._task
        model, data, folder = task.options.model, Path(task.sink.prepared_data), task.sink.folder
        if data.is_file():
            self._data = PreparedFile(data, vocab_size=None, checked=True)
        for what, wanted, found in (
            (f"--output-dir {folder}", task.folder_signature, signature(folder)),
            (
                f"--prepared-data {data}",
                task.sink.prepared_sha256,
                self._data.sha256 if data.is_file() else "no such file",
            ),
            (f"--model-path {model.path}", model.fingerprint, read_model(str(model.path)).fingerprint),
        ):
            if wanted != found:
                raise UsageError(
                    f"{what}, replica {task.slot + 1} on {os.uname().nodename}",
                    f"what the command that started it sees there: {wanted}",
                    found or "nothing",
                    "give paths on storage that all machines share, under the same path",
                )

    def work(self, rows: Sequence[int]) -> Answer:
        """Take more rows, and go on until some are settled or half a second is over.

        Args:
            rows: indices of prepared rows.
        """
        self._queue.extend(rows)
        answer = Answer()
        ends = time.monotonic() + _ANSWER_EVERY
        try:
            while True:
                if self._stream is None:
                    if not self._queue:
                        return answer
                    assert self._engine is not None, "open comes first"
                    self._stream = self._engine.stream(self._rows())
                settled = next(self._stream, None)
                if settled is None:
                    # The queue ran empty and all its rows are through.
                    self._stream = None
                    continue
                answer.done += map(int, settled.done)
                answer.faults |= {int(name): fault for name, fault in settled.faults.items()}
                if answer.done or answer.faults or time.monotonic() > ends:
                    return answer
        except Exception as error:  # noqa: BLE001  told to the caller, whatever it is
            return _told(error)

    def _rows(self) -> Iterator[tuple[int, list[int]]]:
        while self._queue:
            index = self._queue.popleft()
            yield index, self._data[index].input_ids[: self._task.sink.row_limit]

    def states(self, rows: Sequence[Sequence[int]]) -> list[Any]:
        """States of a few rows, for a preflight; see :class:`pipeline.engines.direct.StreamingEngine`."""
        assert self._engine is not None, "open comes first"
        return self._engine.states(rows)

    def close(self) -> None:
        """End the engine's processes."""
        if self._engine is not None:
            self._engine.close()


def _told(error: Exception) -> Answer:
    if not isinstance(error, SpecshimError):
        frames = traceback.extract_tb(error.__traceback__)
        error = SpecshimError(
            f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "replica",
            "a replica to go on",
            f"{type(error).__name__}: {str(error).strip() or 'no message'}",
            "report this; finished rows are kept, so the same command goes on from here",
        )
    parts = (error.where, error.wanted, error.found, error.next_step)
    return Answer(error=parts, final=isinstance(error, (UsageError, WrongStatesError, SinkError)))
