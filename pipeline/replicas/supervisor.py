"""Hands out chunks, restarts what dies; knows nothing of Ray."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from pipeline.progress import console
from pipeline.replicas.ledger import Ledger
from pipeline.replicas.replica import Answer
from shims.errors import SpecshimError

_AHEAD_SECONDS = 4.0
_AHEAD_ROWS = 128
"""What a replica has beyond the rows it is at, so that its engine never waits for a call."""
_BARREN = 3
"""Lives without a finished row after which a replica is given up."""
_SILENT = 1800.0
"""Seconds without an answer after which a replica counts as dead."""
_LEFT_BEHIND = 180.0
"""Seconds that a process which a dead replica left behind may hold its chunks."""


@dataclass(frozen=True)
class Event:
    """What a cluster tells: an answer, or that the replica is gone."""

    slot: int
    answer: Answer | None = None
    cause: str = ""


class Cluster(Protocol):
    """Places for replicas, called slots, from 0. Nothing here waits but `next`."""

    def start(self, slot: int) -> None:
        """Begin to open a replica; its first event is `open`'s answer."""
        ...

    def work(self, slot: int, rows: Sequence[int]) -> None:
        """Call a replica that is not called already; its next event is the answer."""
        ...

    def next(self, seconds: float) -> Event | None:
        """The next event; None when there is none in this time."""
        ...

    def end(self, slot: int) -> None:
        """End a replica at once, in whatever state it is."""
        ...


@dataclass
class Life:
    """One replica from its start to its end; times are `time.monotonic`'s."""

    slot: int
    begun: float
    facts: Mapping[str, Any] | None = None
    """What it said of itself once it was open."""
    ready: float | None = None
    first: float | None = None
    """When it was first given rows."""
    last: float | None = None
    """When it last settled some."""
    rows: int = 0
    tokens: int = 0
    cause: str = ""
    """Why it ended, where it did not end with the run."""
    called: float | None = None
    """Since when an answer is due."""
    run: int | None = None
    """Its entry among the manifest's runs."""


@dataclass(frozen=True)
class Owner:
    """What the supervisor asks and tells the extraction."""

    began: Callable[[Life], None]
    """A replica is open."""
    settled: Callable[[Life, Sequence[int], Mapping[int, str]], None]
    """(life, durable rows, row -> fault); may refuse to go on."""
    found: Callable[[Iterable[int]], None]
    """Rows that a dead replica had finished without telling."""
    free: Callable[[int], bool]
    """Whether no process writes a chunk."""
    there: Callable[[int], bool]
    """Whether a row lies whole on disk."""


@dataclass(frozen=True)
class _LeftBehind:
    """A chunk that a dead replica had; one of its processes may still write it."""

    slot: int
    chunk: int
    rows: set[int]
    since: float


class Supervisor:
    """The replicas of a run."""

    def __init__(self, cluster: Cluster, replicas: int, max_restarts: int, owner: Owner) -> None:
        self._cluster, self._slots, self._owner = cluster, range(replicas), owner
        self._restarts_left = max_restarts
        self._now: dict[int, Life] = {}
        self._barren = dict.fromkeys(self._slots, 0)
        self._left_behind: list[_LeftBehind] = []
        self._ledger: Ledger | None = None
        self.lives: list[Life] = []
        """Every replica that was started."""

    @property
    def restarts(self) -> int:
        """Replicas that died and were replaced."""
        return len(self.lives) - len(self._now)

    def first(self) -> int:
        """Start all replicas.

        Returns:
            The slot of the first one that is open.

        Raises:
            SpecshimError: none comes up.
        """
        for slot in self._slots:
            self._start(slot)
        while True:
            self._turn()
            for slot, life in self._now.items():
                if life.ready is not None:
                    return slot

    def run(self, ledger: Ledger) -> None:
        """Have all rows of the ledger settled.

        Raises:
            SpecshimError: replicas die too often, or what went wrong would go wrong again.
        """
        self._ledger = ledger
        while ledger.unsettled:
            for slot, life in self._now.items():
                if life.ready is not None and life.called is None:
                    self._give(slot, life, ledger)
            self._turn()
            self._free_what_was_left_behind(ledger)

    def _start(self, slot: int) -> None:
        now = time.monotonic()
        self._now[slot] = Life(slot, now, called=now)
        self.lives.append(self._now[slot])
        self._cluster.start(slot)

    def _give(self, slot: int, life: Life, ledger: Ledger) -> None:
        now = time.monotonic()
        rate = life.rows / (now - life.first) if life.first is not None and now > life.first else 0.0
        # Towards the end less at a time, so that the replicas end together.
        share = max(1, ledger.not_handed_out // (2 * len(self._slots)))
        wanted = min(max(_AHEAD_ROWS, rate * _AHEAD_SECONDS), share)
        new: list[int] = []
        while ledger.waiting and ledger.backlog(slot) < wanted:
            new += ledger.take(slot)
        if ledger.backlog(slot):
            life.first, life.called = now if life.first is None else life.first, now
            self._cluster.work(slot, new)

    def _turn(self) -> None:
        event = self._cluster.next(0.2 if self._left_behind else 1.0)
        now = time.monotonic()
        if event is not None:
            life = self._now[event.slot]
            life.called = None
            if event.answer is None:
                self._died(life, event.cause)
            elif event.answer.error is not None:
                self._failed(life, event.answer)
            elif life.ready is None:
                life.ready, life.facts = now, event.answer.facts
                self._owner.began(life)
            else:
                self._settled(life, event.answer, now)
            return
        for life in list(self._now.values()):
            if life.ready is not None and life.called is not None and now - life.called > _SILENT:
                self._died(life, f"no answer for {_SILENT / 60:.0f} minutes")

    def _settled(self, life: Life, answer: Answer, now: float) -> None:
        assert self._ledger is not None, "only a run gives rows"
        if answer.done or answer.faults:
            life.last = now
            life.rows += len(answer.done) + len(answer.faults)
            self._barren[life.slot] = 0
            self._ledger.settle(life.slot, [*answer.done, *answer.faults])
            self._owner.settled(life, answer.done, answer.faults)

    def _failed(self, life: Life, answer: Answer) -> None:
        where, wanted, found, next_step = answer.error or ("", "", "", "")
        # What no replica has got over yet is not the fault of one of them.
        if answer.final or not any(other.ready is not None for other in self.lives):
            raise SpecshimError(f"replica {life.slot + 1}: {where}", wanted, found, next_step)
        self._died(life, f"{where}: {found}")

    def _died(self, life: Life, cause: str) -> None:
        slot, life.cause = life.slot, cause or "no cause was told"
        self._cluster.end(slot)
        now = time.monotonic()
        chunks = self._ledger.take_back(slot) if self._ledger else {}
        self._left_behind += [_LeftBehind(slot, chunk, rows, now) for chunk, rows in chunks.items()]
        self._barren[slot] += 1
        console.print(
            f"replica {slot + 1} died, {sum(map(len, chunks.values()))} rows go to others: {life.cause}",
            highlight=False,
            soft_wrap=True,
            markup=False,
        )
        if self._barren[slot] >= _BARREN or not self._restarts_left:
            barren = f"{self._barren[slot]} times in a row without a finished row"
            raise SpecshimError(
                f"replica {slot + 1}",
                "replicas that live until the rows are computed",
                f"it died {barren if self._barren[slot] > 1 else 'when no restart was left (--max-restarts)'}; "
                f"last: {life.cause}",
                "mend the cause, or give fewer --replicas; finished rows are kept, so the same command goes on from "
                "here",
            )
        self._restarts_left -= 1
        self._start(slot)

    def _free_what_was_left_behind(self, ledger: Ledger) -> None:
        """Chunks of dead replicas go back once nothing writes them any more; what was finished of them counts."""
        still: list[_LeftBehind] = []
        for left in self._left_behind:
            if self._owner.free(left.chunk):
                there = {row for row in left.rows if self._owner.there(row)}
                ledger.put_back(left.chunk, left.rows - there, settled=len(there))
                self._owner.found(there)
                if there:
                    self._barren[left.slot] = 0
                continue
            if time.monotonic() - left.since > _LEFT_BEHIND:
                raise SpecshimError(
                    f"chunk {left.chunk} of a replica that died",
                    "its processes to end with it",
                    f"one that still holds the chunk's lock after {_LEFT_BEHIND:.0f} s",
                    "end the vLLM processes that were left on its machine, then run the same command again",
                )
            still.append(left)
        self._left_behind = still
