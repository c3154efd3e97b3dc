"""A way of `benchmarks.way` as a process that is told when to run."""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from benchmarks.way import BESIDE_VARIABLE, PASS, READY

_LIMIT = 900  # seconds for a start, and for a pass


class WayFailed(Exception):
    """The process ended or was silent for too long; the text is the last line it said."""


class Child:
    """One way's process, started at once.

    Args:
        way, shape: names in `benchmarks.way` and `benchmarks.models`.
        path: the shape's folder.
        folder: for the rows.
        beside: ways that share the device, this one among them.
    """

    def __init__(self, way: str, shape: str, path: Path, folder: Path, beside: int) -> None:
        self.way, self.shape = way, shape
        self.seconds: list[float] = []
        command = [sys.executable, "-m", "benchmarks.way", way, shape, str(path), str(folder)]
        self._said = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115 - until `close`
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._said, text=True,
            env={**os.environ, BESIDE_VARIABLE: str(beside)},
        )  # fmt: skip
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line.rstrip("\n"))
        self._lines.put(None)

    def _expect(self, start: str) -> str:
        """The rest of the next line that begins so; what vLLM itself says is passed over."""
        ends = time.monotonic() + _LIMIT
        while True:
            try:
                line = self._lines.get(timeout=max(0.0, ends - time.monotonic()))
            except queue.Empty:
                raise WayFailed(f"more than {_LIMIT} s") from None
            if line is None:
                raise WayFailed(self._last_words())
            if line.startswith(start):
                return line.removeprefix(start)

    def ready(self) -> None:
        """Wait until it is loaded.

        Raises:
            WayFailed: it never is.
        """
        self._expect(READY)

    def measure(self) -> None:
        """Run one pass; its time goes into `seconds`.

        Raises:
            WayFailed: it did not end.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write("pass\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise WayFailed(self._last_words()) from None
        self.seconds.append(float(self._expect(PASS)))

    def _last_words(self) -> str:
        self._said.seek(0)
        said = self._said.read()
        print(said[-4000:], file=sys.stderr)
        lines = [line for line in said.splitlines() if line.strip()]
        return lines[-1][:300] if lines else f"exit code {self._process.poll()}"

    def close(self) -> None:
        """End it: without more lines to come it ends by itself; one that hangs is killed."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
            self._process.wait(60)
        except (BrokenPipeError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        self._said.close()
