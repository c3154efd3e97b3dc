"""Who died is told: the first of an engine's processes to end without a word, not those that vLLM ends after it."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from shims.direct.engine import _told
from shims.direct.watch import EngineDied, died, watched
from shims.errors import SpecshimError


@pytest.fixture
def workers() -> Iterator[dict[int, str]]:
    """Two real processes, by pid."""
    context = multiprocessing.get_context("fork")
    started = [context.Process(target=time.sleep, args=(600,)) for _ in range(2)]
    for process in started:
        process.start()
    yield {process.pid: f"rank {rank}" for rank, process in enumerate(started) if process.pid is not None}
    for process in started:
        process.kill()
        process.join()


def _kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)


def test_the_first_to_die_is_named(workers: dict[int, str], tmp_path: Path) -> None:
    zero, one = workers
    # vLLM's core writes down that a wait was cancelled: it is no worker.
    (tmp_path / "1.txt").write_text("RuntimeError: cancelled")
    with pytest.raises(EngineDied) as caught, watched(workers) as first, _told(tmp_path, workers, first):
        _kill(one)
        while not first:
            time.sleep(0.01)
        _kill(zero)  # as vLLM does with those that are left
        raise RuntimeError("see above")
    assert "rank 1" in caught.value.where and "rank 0" not in caught.value.where
    assert "dmesg" in caught.value.found and "cancelled" not in caught.value.found


def test_what_the_others_said_of_it_is_kept(workers: dict[int, str], tmp_path: Path) -> None:
    zero, one = workers
    (tmp_path / f"{zero}.txt").write_text("RuntimeError: Connection closed by peer")
    with pytest.raises(EngineDied, match="Connection closed") as caught, _told(tmp_path, workers, [one]):
        raise RuntimeError("see above")
    assert caught.value.where == "rank 1"


def test_a_worker_that_says_why_has_not_died_without_a_word(workers: dict[int, str], tmp_path: Path) -> None:
    zero, one = workers
    (tmp_path / f"{one}.txt").write_text("OutOfMemoryError: no room")
    with pytest.raises(SpecshimError, match="no room") as caught, _told(tmp_path, workers, [zero, one]):
        raise RuntimeError("see above")
    assert not isinstance(caught.value, EngineDied)


def test_a_failure_of_living_workers_is_a_failure(workers: dict[int, str], tmp_path: Path) -> None:
    with pytest.raises(SpecshimError, match="RuntimeError: broken") as caught, _told(tmp_path, workers, []):
        raise RuntimeError("broken")
    assert not isinstance(caught.value, EngineDied) and not died(workers)


def test_a_wait_that_vllm_does_not_end_is_ended(
    workers: dict[int, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shims.direct.watch._GRACE", 0.2)
    with pytest.raises(EngineDied, match="rank 1"), watched(workers) as first, _told(tmp_path, workers, first):
        _kill(list(workers)[1])
        time.sleep(30)
