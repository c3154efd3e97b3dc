"""Replicas as Ray actors, each with a tensor-parallel group of its own; the only module that imports Ray.

Ray places them, tells of their deaths, and carries calls; it restarts nothing itself (`max_restarts=0`), because what
a dead replica had finished has to be looked up on disk first. Rows never pass through Ray's object store, which is why
Ray Data, made for moving rows, is not used: it would also compute a whole block again for one row.
https://docs.ray.io/en/latest/ray-core/actors.html
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from pipeline.replicas.replica import Answer, Replica, Task
from pipeline.replicas.supervisor import Event
from shims.errors import SpecshimError, UsageError

LOCAL, AUTO = "local", "auto"
_OBJECT_STORE_BYTES = 100 << 20  # calls are small; Ray would take a third of the memory
_CLOSING = 30.0  # seconds for engines to end by themselves


def require_ray() -> Any:
    """Ray.

    Raises:
        UsageError: it is not installed.
    """
    try:
        import ray
    except ImportError as error:
        raise UsageError(
            "--replicas",
            "Ray, which runs the replicas",
            f"it cannot be imported: {error}",
            "pip install 'specshim[ray]' (on every machine), or leave out --replicas for one engine in this process",
        ) from error
    return ray


@contextlib.contextmanager
def connected(address: str, logs: bool = False) -> Iterator[Any]:
    """Ray, started on this machine (``local``) or joined; left as it was found.

    Args:
        address: ``local``, ``auto`` (the cluster that this machine is part of), or host:port.
        logs: print here what the processes print.

    Raises:
        UsageError: Ray is missing, or there is no such cluster.
    """
    ray = require_ray()
    if ray.is_initialized():
        yield ray
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    more: dict[str, Any] = {}
    if address == LOCAL:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        more = {"num_cpus": cores, "include_dashboard": False, "object_store_memory": _OBJECT_STORE_BYTES}
    ours = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(address=address, log_to_driver=logs, logging_level=logging.ERROR, **more)
        # Ray puts a handler of its own there; ours lets every stage end its processes.
        if threading.current_thread() is threading.main_thread() and ours is not None:
            signal.signal(signal.SIGTERM, ours)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise UsageError(
            f"--ray-address {address}",
            "a Ray that can be started or joined",
            f"{type(error).__name__}: {str(error).strip() or 'no message'}",
            "give local for this machine alone, or start Ray on each machine (`ray start`) and give auto on one",
        ) from error
    try:
        yield ray
    finally:
        ray.shutdown()


class RayCluster:
    """See :class:`pipeline.replicas.supervisor.Cluster`.

    Args:
        ray: connected.
        replicas: how many there will be.
        tp_size: devices of each.

    Raises:
        UsageError: the cluster has not as many devices, or nobody said what they compute in.
    """

    def __init__(self, ray: Any, task: Task, replicas: int, tp_size: int) -> None:
        self._ray, self._task = ray, task
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        self._on_gpus = any(node.get("GPU", 0) >= 1 for node in nodes)
        if self._on_gpus and task.guessed:
            raise UsageError(
                "--dtype",
                "what the GPUs of this Ray cluster shall compute in",
                f"auto, which is {task.options.dtype} on this machine, for it has no GPU",
                "give --dtype bfloat16 (or float16, or float32), or start the command on a machine with a GPU",
            )
        what = "GPUs" if self._on_gpus else "CPU cores"
        devices = [int(node.get("GPU" if self._on_gpus else "CPU", 0)) for node in nodes]
        # A replica lies on one machine; Ray would wait for ever for one that is large enough.
        places = _places(devices, tp_size)
        if places < replicas:
            raise UsageError(
                f"--replicas {replicas} --tp-size {tp_size}",
                f"{tp_size} {what} a replica on one machine, {replicas} times",
                f"{places} times in this Ray cluster, of {' + '.join(map(str, devices)) or 'no'} {what}",
                "give fewer --replicas, or add machines to the cluster (`ray start --address …` on each)",
            )
        sizes = range(tp_size, max(devices) + 1)
        self._cores = 1 if self._on_gpus else max(size for size in sizes if _places(devices, size) >= replicas)
        # Which cores a replica gets can only be said where all of them are on one machine.
        self._bind = not self._on_gpus and len(nodes) == 1
        self._tp_size = tp_size
        self._actors: dict[int, Any] = {}
        self._calls: dict[Any, int] = {}
        self._waiting = ThreadPoolExecutor(1, "specshim-ray")

    def start(self, slot: int) -> None:
        """See the protocol."""
        cores = cores_of(slot, self._cores) if self._bind else []
        task = replace(self._task, slot=slot, cores=cores, environment=self._environment(cores))
        actor = self._ray.remote(Replica).options(
            num_cpus=self._cores,
            num_gpus=self._tp_size if self._on_gpus else 0,
            max_restarts=0,
            max_task_retries=0,
            scheduling_strategy="SPREAD",
        )
        self._actors[slot] = actor.remote(task)
        self._calls[self._actors[slot].open.remote()] = slot

    def _environment(self, cores: Sequence[int]) -> dict[str, str]:
        if self._on_gpus:
            return {}
        environment = {"OMP_NUM_THREADS": str(max(1, self._cores // self._tp_size))}
        if cores and "VLLM_CPU_OMP_THREADS_BIND" not in os.environ:
            environment["VLLM_CPU_OMP_THREADS_BIND"] = by_rank(cores, self._tp_size)
        return environment

    def work(self, slot: int, rows: Sequence[int]) -> None:
        """See the protocol."""
        self._calls[self._actors[slot].work.remote(list(rows))] = slot

    def next(self, seconds: float) -> Event | None:
        """See the protocol."""
        ready = self._outside(self._ready, seconds)
        if not ready:
            return None
        slot = self._calls.pop(ready[0])
        try:
            answer = self._outside(self._ray.get, ready[0])
        except self._ray.exceptions.RayError as error:
            return Event(slot, cause=_short(str(error)))
        assert isinstance(answer, Answer)
        return Event(slot, answer)

    def _ready(self, seconds: float) -> list[Any]:
        if not self._calls:
            return []
        found: list[Any] = self._ray.wait(list(self._calls), num_returns=1, timeout=seconds)[0]
        return found

    def _outside(self, function: Callable[..., Any], *given: Any) -> Any:
        """Wait for Ray on a thread: a signal that asks to end raises, and Ray's compiled code cannot take that."""
        return self._waiting.submit(function, *given).result()

    def end(self, slot: int) -> None:
        """See the protocol."""
        self._calls = {call: of for call, of in self._calls.items() if of != slot}
        actor = self._actors.pop(slot, None)
        if actor is not None:
            with contextlib.suppress(Exception):  # one that is gone needs no end
                self._ray.kill(actor, no_restart=True)

    def states(self, slot: int, rows: Sequence[Sequence[int]]) -> list[Any]:
        """States of a few rows, for a preflight: CPU tensors [T, L, H].

        Raises:
            SpecshimError: as :meth:`pipeline.replicas.replica.Replica.states`, or the replica died.
        """
        try:
            states: list[Any] = self._outside(self._ray.get, self._actors[slot].states.remote(rows))
        except self._ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, SpecshimError):
                raise error.cause from None
            raise
        except self._ray.exceptions.RayError as error:
            raise SpecshimError(
                f"replica {slot + 1}, --preflight", "to stay alive", _short(str(error)), "repeat the command"
            ) from error
        return states

    def close(self) -> None:
        """End all replicas, those that are idle in an orderly way."""
        busy = set(self._calls.values())
        closing = [actor.close.remote() for slot, actor in self._actors.items() if slot not in busy]
        with contextlib.suppress(Exception):  # whatever is left is ended next
            if closing:
                self._ray.wait(closing, num_returns=len(closing), timeout=_CLOSING)
        for slot in list(self._actors):
            self.end(slot)
        self._waiting.shutdown(wait=False, cancel_futures=True)


def _places(devices: Sequence[int], size: int) -> int:
    """How many groups of ``size`` devices there are, each on one machine.

    Args:
        devices: of each machine.
    """
    return sum(number // size for number in devices)


def cores_of(slot: int, cores: int) -> list[int]:
    """The cores of a replica, all replicas being on this machine.

    Args:
        slot: from 0.
        cores: of each replica.
    """
    usable = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    return usable[slot * cores : (slot + 1) * cores]


def by_rank(cores: Sequence[int], tp_size: int) -> str:
    """Cores in vLLM's words: numbers with commas, ranks separated by bars."""
    each = max(1, len(cores) // tp_size)
    return "|".join(",".join(map(str, cores[rank * each : (rank + 1) * each])) for rank in range(tp_size))


def _short(text: str) -> str:
    """Ray's words on a death, in a line: from the cause on, without what it says at every death."""
    words = " ".join(text.split())
    cause = words[max(0, words.find("The actor is dead because")) :].partition(" Some common causes include")[0]
    return cause if len(cause) <= 600 else cause[:597] + "..."
