"""Buffers between the model and the writers.

On an accelerator: the taps write into one of two device buffers; a side stream copies it into one of
a few pinned host buffers while the next step computes into the other. On a CPU the taps write into
the host buffer itself. The number of host buffers bounds what can be under way: a step waits for a
free one, so a slow disk slows the engine down instead of filling the memory.
"""

from __future__ import annotations

import queue
import threading
from dataclasses import dataclass
from typing import Any

import torch

HOST_BUFFERS = 3
_DEVICE_BUFFERS = 2


class Host:
    """One host buffer: states [capacity, L, H], extremes [capacity, L, 2], token ids and positions int64 [capacity].

    It is counted: `hold` for each user, `release` by each; the last one gives it back.
    """

    def __init__(self, pool: queue.SimpleQueue[Host], like: Any, pinned: bool) -> None:
        capacity, layers, _ = like.shape
        self.states = torch.empty(like.shape, dtype=like.dtype, pin_memory=pinned)
        self.extremes = torch.empty(capacity, layers, 2, dtype=like.dtype, pin_memory=pinned)
        self.token_ids = torch.empty(capacity, dtype=torch.int64, pin_memory=pinned)
        self.positions = torch.empty(capacity, dtype=torch.int64, pin_memory=pinned)
        self._pool, self._users, self._lock = pool, 0, threading.Lock()

    def hold(self) -> None:
        with self._lock:
            self._users += 1

    def release(self) -> None:
        with self._lock:
            self._users -= 1
            free = self._users == 0
        if free:
            self._pool.put(self)


@dataclass
class Filled:
    """A host buffer with one step in it, good from the moment that `wait` returns."""

    host: Host
    tokens: int
    copied: Any = None

    def wait(self) -> None:
        if self.copied is not None:
            self.copied.synchronize()


class Staging:
    """See the module's docstring.

    Args:
        layers: L, states per token.
        capacity: most tokens of one step.
    """

    def __init__(self, layers: int, capacity: int) -> None:
        self._layers, self._capacity = layers, capacity
        self._buffers: list[Any] = []
        self._copied: list[Any] = []
        self._computed: Any = None
        self._turn = 0
        self._first = True
        self._stream: Any = None
        self._hosts: queue.SimpleQueue[Host] = queue.SimpleQueue()
        self._host: Host | None = None
        self._made = 0

    def prepare(self, hidden: Any) -> None:
        """Make the device buffers, if this is the first time.

        The first time is vLLM's own measurement of what the model needs, which so counts them.
        """
        if self._buffers:
            return
        shape = (self._capacity, self._layers, hidden.shape[-1])
        accelerated = hidden.device.type != "cpu"
        where = hidden.device if accelerated else "meta"
        self._buffers = [
            torch.empty(shape, dtype=hidden.dtype, device=where) for _ in range(_DEVICE_BUFFERS if accelerated else 1)
        ]
        if accelerated:
            self._stream = torch.cuda.Stream(hidden.device)
            self._copied = [torch.cuda.Event() for _ in self._buffers]
            self._computed = torch.cuda.Event()

    @property
    def _target(self) -> Any:
        return self._buffers[self._turn] if self._stream is not None else self._free_host().states

    def _free_host(self) -> Host:
        """The host buffer of this step; waits until one is free."""
        if self._host is None:
            if self._made < HOST_BUFFERS:
                self._host = Host(self._hosts, self._buffers[0], pinned=self._stream is not None)
                self._made += 1
            else:
                self._host = self._hosts.get()
        return self._host

    def begin(self) -> None:
        """Before each step."""
        self._first = True
        self._turn = (self._turn + 1) % max(len(self._buffers), 1)

    def put(self, slot: int, hidden: Any, residual: Any | None, tokens: int) -> None:
        """Store R of the slot-th layer: [at least `tokens`, H] each."""
        self.prepare(hidden)
        if self._stream is not None and self._first:
            # What the side stream still copies out of this buffer has to be out.
            torch.cuda.current_stream().wait_event(self._copied[self._turn])
        self._first = False
        into = self._target[:tokens, slot]
        if residual is None:
            into.copy_(hidden[:tokens])
        else:
            torch.add(hidden[:tokens], residual[:tokens], out=into)
        if self._stream is not None:
            self._computed.record()

    def finish(self, tokens: int, token_ids: Any, positions: Any) -> Filled:
        """After a step: start moving it to the host.

        Args:
            token_ids: integers [at least `tokens`], on the device.
            positions: likewise.
        """
        with torch.inference_mode():  # the buffers were made in it
            return self._finish(tokens, token_ids, positions)

    def _finish(self, tokens: int, token_ids: Any, positions: Any) -> Filled:
        host = self._free_host()
        self._host = None
        host.hold()
        if self._stream is None:
            _copy_step(host, host.states[:tokens], token_ids, positions, tokens)
            return Filled(host, tokens)
        self._stream.wait_event(self._computed)
        with torch.cuda.stream(self._stream):
            for tensor in (token_ids, positions):
                tensor.record_stream(self._stream)
            states = self._buffers[self._turn][:tokens]
            host.states[:tokens].copy_(states, non_blocking=True)
            _copy_step(host, states, token_ids, positions, tokens)
            self._copied[self._turn].record(self._stream)
            whole = torch.cuda.Event()
            whole.record(self._stream)
        return Filled(host, tokens, whole)


def _copy_step(host: Host, states: Any, token_ids: Any, positions: Any, tokens: int) -> None:
    host.extremes[:tokens].copy_(torch.stack([states.amin(-1), states.amax(-1)], dim=-1), non_blocking=True)
    host.token_ids[:tokens].copy_(token_ids[:tokens], non_blocking=True)
    host.positions[:tokens].copy_(positions[:tokens], non_blocking=True)
