"""Bring the traceback of a worker that fails to start to the parent, which hears only that it failed.

vLLM logs the exception in the worker and sends the parent a bare "failed". The worker's log record is
kept in a folder that the parent named in the environment before it started its workers.
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_VARIABLE = "SPECSHIM_WORKER_FAILURES"
# A worker process, and the engine's core, which is the worker itself where there is only one.
_LOGGERS = ("vllm.v1.executor.multiproc_executor", "vllm.v1.engine.core")
_LONGEST = 6000  # characters: the end of a traceback, where the cause is


@contextmanager
def collected() -> Iterator[Path]:
    """A folder into which workers started in this context write their failures."""
    before = os.environ.get(_VARIABLE)
    with tempfile.TemporaryDirectory(prefix="specshim-workers-") as folder:
        os.environ[_VARIABLE] = folder
        try:
            yield Path(folder)
        finally:
            if before is None:
                del os.environ[_VARIABLE]
            else:
                os.environ[_VARIABLE] = before


def told(folder: Path) -> str:
    """What the workers wrote, '' if nothing."""
    texts = [path.read_text(encoding="utf-8")[-_LONGEST:] for path in sorted(folder.glob("*.txt"))]
    return "\n".join(f"worker: {text}" for text in texts)


class _Keep(logging.Handler):
    def __init__(self, folder: Path) -> None:
        super().__init__(logging.ERROR)
        self._folder = folder

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and record.exc_info[0] is not None:
            text = logging.Formatter().formatException(record.exc_info)
            try:
                (self._folder / f"{os.getpid()}.txt").write_text(text, encoding="utf-8")
            except FileNotFoundError:
                pass  # the model is loaded, and nobody asks any more
            except OSError:
                self.handleError(record)  # the log on the terminal still has it


def listen() -> None:
    """In a worker: keep what vLLM logs about its failure, if the parent asked for it."""
    folder = os.environ.get(_VARIABLE)
    for name in _LOGGERS if folder else ():
        logger = logging.getLogger(name)
        if folder and not any(isinstance(handler, _Keep) for handler in logger.handlers):
            logger.addHandler(_Keep(Path(folder)))
