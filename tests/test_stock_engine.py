"""What the stock engine makes of a generator whose worker was killed."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

from pipeline.engines.stock import StockEngine, worker_pids
from shims.direct.watch import EngineDied


class Generator:
    """Fails as vLLM does when a worker is gone; its worker is a real process."""

    def __init__(self, kill: bool) -> None:
        self.process = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
        self.process.start()
        self.executor = SimpleNamespace(workers=[SimpleNamespace(proc=self.process)])
        self._kill = kill

    def generate(self, _rows: Any) -> Any:
        if self._kill:
            assert self.process.pid is not None
            os.kill(self.process.pid, signal.SIGKILL)
            os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT)
        raise RuntimeError("cancelled")


@pytest.mark.parametrize("kill", [True, False])
def test_a_killed_worker_is_told_from_a_failure(kill: bool) -> None:
    engine = StockEngine.__new__(StockEngine)
    generator = Generator(kill)
    engine._generator = generator
    try:
        with pytest.raises(EngineDied if kill else RuntimeError) as caught:
            engine.states([[1, 2]])
        assert (str(generator.process.pid) in str(caught.value)) is kill
    finally:
        generator.process.kill()
        generator.process.join()


def test_an_executor_without_processes_has_none() -> None:
    assert worker_pids(None) == worker_pids(SimpleNamespace()) == worker_pids(SimpleNamespace(workers=None)) == []
