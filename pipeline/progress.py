"""One look for progress: how much, how fast, time left."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Iterator

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

# Progress goes to stderr so that what a command prints can be piped.
console = Console(stderr=True)
_SECONDS_BETWEEN_LINES = 30.0
_WINDOW = 60.0
"""Seconds that a rate is of: later work is not judged by how long compiling or a cold disk took."""


class StageProgress:
    """Counts rows and tokens; a bar on a terminal, a line now and then elsewhere."""

    def __init__(self, name: str, total: int | None, unit: str, bar: Progress | None) -> None:
        self._name, self.total, self._unit, self._bar = name, total, unit, bar
        self._note = ""
        self._task = bar.add_task(name, total=total, rate="") if bar else None
        self._started = self._last_line = time.monotonic()
        self._since = deque([(self._started, 0, 0)])
        """Times within the window, and what was done by then: rows, tokens."""
        self.rows = 0
        self.tokens = 0

    def expect(self, total: int) -> None:
        """There will be ``total`` units in all: more, or fewer, than was known at the start."""
        self.total = total
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, total=total)

    def advance(self, rows: int, tokens: int, note: str = "") -> None:
        """Count finished work; ``note`` is shown behind the rate."""
        self._note = f", {note}" if note else ""
        self.rows += rows
        self.tokens += tokens
        now = time.monotonic()
        if self.rows == rows:
            self._since.clear()  # the first of them has all that happens once in it
        self._since.append((now, self.rows, self.tokens))
        while len(self._since) > 2 and self._since[1][0] <= now - _WINDOW:
            self._since.popleft()
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, advance=rows, rate=self._rate())
        elif now - self._last_line >= _SECONDS_BETWEEN_LINES:
            self._last_line = now
            console.print(
                f"{self._name}: {self.rows}/{self.total or '?'} {self._unit}, {self._rate()}{self._left()}",
                highlight=False,
                soft_wrap=True,
            )

    @property
    def seconds(self) -> float:
        """Time since the start."""
        return time.monotonic() - self._started

    def _lately(self) -> tuple[float, int, int]:
        """Seconds, and the rows and tokens done in them."""
        began, rows, tokens = self._since[0] if len(self._since) > 1 else (self._started, 0, 0)
        return max(time.monotonic() - began, 1e-6), self.rows - rows, self.tokens - tokens

    def _rate(self) -> str:
        seconds, rows, tokens = self._lately()
        return f"{rows / seconds:.2f} {self._unit}/s, {tokens / seconds:.0f} tokens/s{self._note}"

    def _left(self) -> str:
        seconds, rows, _ = self._lately()
        if not self.total or not rows or len(self._since) < 2:
            return ""
        return f", {seconds / rows * (self.total - self.rows):.0f} s left"


@contextlib.contextmanager
def stage_progress(name: str, total: int | None, unit: str = "rows") -> Iterator[StageProgress]:
    """Show progress of ``total`` units (None: unknown) while the block runs."""
    if not console.is_terminal:
        yield StageProgress(name, total, unit, None)
        return
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as bar:
        yield StageProgress(name, total, unit, bar)


@contextlib.contextmanager
def heartbeat(what: str, every: float = 60.0) -> Iterator[None]:
    """A line now and then while something long says nothing itself.

    Args:
        what: is going on, for the line.
        every: seconds between two lines.
    """
    stop, began = threading.Event(), time.monotonic()

    def beat() -> None:
        while not stop.wait(every):
            console.print(f"{what}: {time.monotonic() - began:.0f} s so far", highlight=False)

    thread = threading.Thread(target=beat, name="specshim-heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
