"""Replicas that share storage, die and come back, and a trainer that reads along: an event model.

Between two events every rate is constant. An event is: a chunk is finished, a replica dies, a replica is ready again.
A replica takes the next chunk as :mod:`pipeline.replicas.ledger` hands it out; one that dies loses what was not yet
durable, and the rest of its chunk goes to the next free replica once the death is noticed. Where writing (and a
trainer's reading) asks for more than the storage gives, everyone gets the same share of what they ask for.
"""

from __future__ import annotations

import math
import random
from collections import deque
from dataclasses import dataclass

_NEVER = math.inf


@dataclass(frozen=True)
class Setup:
    """What a run is made of. Times in seconds, sizes in bytes."""

    tokens: float
    """To be computed."""
    replicas: int
    tokens_per_s: float
    """Of one replica, where the storage keeps up."""
    bytes_per_token: float = 0.0
    storage_bytes_per_s: float = _NEVER
    """What the storage takes and gives, of all machines together."""
    chunk_tokens: float = 32768.0
    start_s: float = 0.0
    """From the start of a replica until it is ready."""
    ready: tuple[float, ...] = ()
    """When each replica is ready for the first time, where that is known; else `start_s`."""
    restart_s: float | None = None
    """The same after a death; None: as at the start."""
    notice_s: float = 0.0
    """From a death until its rows are somebody else's."""
    mtbf_s: float = _NEVER
    """Mean time between deaths of one replica."""
    lost_tokens: float = 0.0
    """Computed and not durable when a replica dies, at most."""
    deaths: tuple[tuple[float, int], ...] = ()
    """(time since the start, replica): deaths that are given, beside the random ones."""
    trainer_tokens_per_s: float = 0.0
    """What a trainer reads along the way, once; 0: none."""
    seed: int = 0


@dataclass
class Outcome:
    """What came of it."""

    seconds: float = 0.0
    """From the start of the replicas until the last row is durable."""
    computing_s: float = 0.0
    """Without the first start."""
    failures: int = 0
    recomputed_tokens: float = 0.0
    storage_bound_s: float = 0.0
    """Time in which the storage set the pace."""
    busy_share: float = 0.0
    """Share of the replicas' time, after the first start, in which they computed."""
    trained_s: float = 0.0
    """When the trainer has read everything; 0 without one."""
    peak_unread_tokens: float = 0.0
    """Most tokens that were durable and not yet read by the trainer: what storage must hold, if read rows may go."""


@dataclass
class _Replica:
    ready: float
    """When it is ready; in the past while it runs."""
    dies: float
    left: float = 0.0
    """Tokens of its chunk; 0: it has none."""
    done: float = 0.0
    """Tokens of its chunk that are computed."""


def simulate(setup: Setup) -> Outcome:
    """Play a run to its end.

    Raises:
        ValueError: nothing could ever be computed.
    """
    if setup.tokens <= 0 or setup.replicas < 1 or setup.tokens_per_s <= 0 or setup.storage_bytes_per_s <= 0:
        raise ValueError("a run needs tokens, replicas, and rates above 0")
    return _Run(setup).play()


class _Run:
    def __init__(self, setup: Setup) -> None:
        self._setup, self._dice = setup, random.Random(setup.seed)
        self._fresh = setup.tokens
        self._returned: deque[tuple[float, float]] = deque()
        """(from when, tokens)"""
        given: dict[int, list[float]] = {slot: [] for slot in range(setup.replicas)}
        for when, slot in setup.deaths:
            given[slot].append(when)
        self._given = {slot: deque(sorted(times)) for slot, times in given.items()}
        ready = setup.ready or (setup.start_s,) * setup.replicas
        self._began = min(ready)
        self._replicas = [_Replica(when, self._next_death(slot, when)) for slot, when in enumerate(ready)]
        self._durable = self._read = 0.0
        self.outcome = Outcome()

    def _next_death(self, slot: int, ready: float) -> float:
        mean = self._setup.mtbf_s
        own = ready + (self._dice.expovariate(1 / mean) if mean < _NEVER else _NEVER)
        return min(own, self._given[slot].popleft()) if self._given[slot] else own

    def play(self) -> Outcome:
        setup, now, busy = self._setup, 0.0, 0.0
        while True:
            for replica in self._replicas:
                if replica.ready <= now and not replica.left:
                    replica.left, replica.done = self._chunk(now), 0.0
            working = [replica for replica in self._replicas if replica.ready <= now and replica.left]
            if not working and not self._returned and not self._fresh and not any(r.left for r in self._replicas):
                break
            rate, reading, bound = self._rates(len(working))
            until = self._next_event(now, rate, reading, working) - now
            busy += until * len(working)
            self.outcome.storage_bound_s += until if bound else 0.0
            for replica in working:
                moved = min(rate * until, replica.left)
                replica.left, replica.done = replica.left - moved, replica.done + moved
                self._durable += moved
                if replica.left < 1e-6:
                    replica.left = 0.0
            self._read = min(self._durable, self._read + reading * until)
            self.outcome.peak_unread_tokens = max(self.outcome.peak_unread_tokens, self._durable - self._read)
            now += until
            for slot, replica in enumerate(self._replicas):
                if replica.dies <= now:
                    self._die(slot, replica, now)
        out = self.outcome
        out.seconds, out.computing_s = now, now - self._began
        out.busy_share = busy / (setup.replicas * out.computing_s)
        if setup.trainer_tokens_per_s:
            alone = setup.storage_bytes_per_s / setup.bytes_per_token if setup.bytes_per_token else _NEVER
            out.trained_s = now + (setup.tokens - self._read) / min(setup.trainer_tokens_per_s, alone)
        return out

    def _chunk(self, now: float) -> float:
        if self._returned and self._returned[0][0] <= now:
            return self._returned.popleft()[1]
        size = min(self._fresh, self._setup.chunk_tokens)
        self._fresh -= size
        return size

    def _rates(self, working: int) -> tuple[float, float, bool]:
        """Tokens per second that each replica writes and that the trainer reads; whether the storage is the limit."""
        setup = self._setup
        rate = setup.tokens_per_s
        # A trainer that has read everything reads as fast as rows come.
        unread = self._durable - self._read > 1e-6
        reading = setup.trainer_tokens_per_s if unread else min(setup.trainer_tokens_per_s, rate * working)
        asked = (rate * working + reading) * setup.bytes_per_token
        share = min(1.0, setup.storage_bytes_per_s / asked) if asked else 1.0
        return rate * share, reading * share, share < 1.0

    def _next_event(self, now: float, rate: float, reading: float, working: list[_Replica]) -> float:
        times = [now + replica.left / rate for replica in working]
        times += [replica.ready for replica in self._replicas if replica.ready > now]
        times += [replica.dies for replica in self._replicas if replica.dies > now]
        times += [when for when, _ in self._returned if when > now]
        gain = rate * len(working) - reading
        if self._durable - self._read > 1e-6 and gain < 0:
            times.append(now + max((self._durable - self._read) / -gain, 1e-3))
        return min(times)

    def _die(self, slot: int, replica: _Replica, now: float) -> None:
        setup = self._setup
        lost = min(setup.lost_tokens, replica.done)
        if replica.left or lost:
            self._returned.append((now + setup.notice_s, replica.left + lost))
        self._durable -= lost
        self._read = min(self._read, self._durable)
        self.outcome.recomputed_tokens += lost
        self.outcome.failures += 1
        replica.left = replica.done = 0.0
        replica.ready = now + (setup.start_s if setup.restart_s is None else setup.restart_s)
        replica.dies = self._next_death(slot, replica.ready)
