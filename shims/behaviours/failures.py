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
    """A folder into which workers started in this context write their failures, while it lasts."""
    with opened() as folder, collected_in(Path(folder)) as path:
        yield path


def opened() -> tempfile.TemporaryDirectory[str]:
    """A folder for what workers say; once it is gone, nobody asks any more."""
    return tempfile.TemporaryDirectory(prefix="specshim-workers-")


@contextmanager
def collected_in(folder: Path) -> Iterator[Path]:
    """Workers started in this context write their failures into the folder, for as long as both are there."""
    before = os.environ.get(_VARIABLE)
    os.environ[_VARIABLE] = str(folder)
    try:
        yield folder
    finally:
        if before is None:
            del os.environ[_VARIABLE]
        else:
            os.environ[_VARIABLE] = before


def told(folder: Path, longest: int = _LONGEST) -> str:
    """What the workers wrote, of each its last `longest` characters; '' if nothing."""
    texts = [path.read_text(encoding="utf-8")[-longest:] for path in sorted(folder.glob("*.txt"))]
    return "\n".join(f"worker: {text}" for text in texts)


def by_pid(folder: Path) -> set[int]:
    """The processes that wrote something."""
    return {int(path.stem) for path in folder.glob("*.txt")}


def described(error: BaseException, folder: Path, longest: int = _LONGEST) -> str:
    """The parent's error with its type, never empty, and what the workers wrote (see `told`)."""
    worker = told(folder, longest)
    return f"{type(error).__name__}: {str(error).strip() or '(no message)'}{worker and chr(10)}{worker}"


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
                pass  # nobody asks any more
            except OSError:
                self.handleError(record)  # the log on the terminal still has it


def listen() -> None:
    """In a worker: keep what vLLM logs about its failure, if the parent asked for it."""
    folder = os.environ.get(_VARIABLE)
    for name in _LOGGERS if folder else ():
        logger = logging.getLogger(name)
        if folder and not any(isinstance(handler, _Keep) for handler in logger.handlers):
            logger.addHandler(_Keep(Path(folder)))
