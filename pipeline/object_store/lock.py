"""One writer per address: an object that is made only where none is (`If-None-Match: *`), and that its owner renews.

Renewing and taking over are writes under the condition that the object is still the one that was read (`If-Match`), so
of several processes one succeeds. Whether an owner lives is seen, not computed: whoever wants the lock watches whether
it is renewed. No clock is compared with another machine's. An owner that was killed on this machine is known to be
gone at once.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.object_store.bucket import Bucket, without_conditions
from pipeline.object_store.keys import LOCK
from pipeline.progress import console
from shims.errors import SpecshimError, UsageError
from shims.guardian import identity


@dataclass(frozen=True)
class Times:
    """In seconds."""

    beat: float = 15.0
    """Between two renewals."""
    expiry: float = 180.0
    """Without a renewal, after which the owner counts as gone."""

    @property
    def sure(self) -> float:
        """How long an owner may rely on its last renewal."""
        return self.expiry - 2 * self.beat


@dataclass(frozen=True)
class Seen:
    """The lock, as it was read."""

    token: str
    owner: str
    """A process and its machine, for people."""
    machine: str
    pid: int
    started: str
    etag: str

    @property
    def gone(self) -> bool:
        """Whether it was a process of this machine that is no more."""
        return self.machine == _machine() != "" and identity(self.pid) != self.started


class StoreLock:
    """The lock of an address, held from :meth:`acquire` to :meth:`release`."""

    def __init__(self, bucket: Bucket, times: Times = Times()) -> None:
        self._bucket, self._times = bucket, times
        self.token = uuid.uuid4().hex
        """Names this owner."""
        self._beats = 0
        self._etag = ""
        self._renewed = 0.0
        self._lost = ""
        self._changing = threading.Lock()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def acquire(self) -> None:
        """Become the one that writes there.

        Raises:
            UsageError: another process does, or the store cannot keep two apart.
        """
        while True:
            etag = self._bucket.put_if(LOCK, self._content())
            if etag is None:
                seen = look(self._bucket)
                if seen is None:
                    continue
                # An answer was lost on its way, and the request was sent again.
                etag = seen.etag if seen.token == self.token else self._taken_over(seen)
            if etag is not None:
                break
        self._etag, self._renewed = etag, time.monotonic()
        self._refuse_a_store_that_ignores_conditions()
        self._thread = threading.Thread(target=self._go_on, name="specshim-lock", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Go on only if the lock is still this process's.

        Raises:
            SpecshimError: it was not renewed in time, so another process may write there by now.
        """
        if not self._lost and time.monotonic() - self._renewed > 2 * self._times.beat:
            with contextlib.suppress(SpecshimError):  # told below, if it is too long ago
                self._renew()
        if not self._lost and time.monotonic() - self._renewed > self._times.sure:
            self._lost = f"it could not be renewed for {time.monotonic() - self._renewed:.0f} s"
        if self._lost:
            raise SpecshimError(
                self._bucket.address.of(LOCK),
                "this run to hold its lock",
                self._lost,
                "see who writes there (`extract … --status`); finished rows are kept, so the same command goes on",
            )

    def release(self) -> None:
        """Let others write; what cannot be reached expires."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
        with contextlib.suppress(SpecshimError):
            seen = look(self._bucket)
            if seen is not None and seen.token == self.token:
                self._bucket.delete(LOCK)

    def _refuse_a_store_that_ignores_conditions(self) -> None:
        """Two writes that must not succeed: on what is there, and on what is not there any more."""
        for header, etag in (("If-None-Match", None), ("If-Match", '"00000000000000000000000000000000"')):
            if self._bucket.put_if(LOCK, self._content(), etag) is not None:
                self._bucket.delete(LOCK)
                raise without_conditions(self._bucket.address, f"one that ignores {header}")

    def _content(self) -> bytes:
        self._beats += 1
        said: dict[str, Any] = {
            "token": self.token,
            "owner": f"{os.getpid()} on {socket.gethostname()}",
            "machine": _machine(),
            "pid": os.getpid(),
            "started": identity(os.getpid()),
            "beats": self._beats,
        }
        return json.dumps(said).encode()

    def _taken_over(self, seen: Seen) -> str | None:
        """The etag, where its owner is gone; None to try from the beginning.

        Raises:
            UsageError: its owner lives.
        """
        if not seen.gone:
            console.print(
                f"{self._bucket.address} is being written by process {seen.owner}, or was when that ended; "
                f"looking for up to {self._times.expiry:.0f} s whether it lives",
                highlight=False,
                soft_wrap=True,
            )
            ends = time.monotonic() + self._times.expiry
            while time.monotonic() < ends:
                time.sleep(min(self._times.beat / 3, 5.0))
                now = look(self._bucket)
                if now is None:
                    return None
                if now.etag != seen.etag:
                    raise UsageError(
                        f"--output-dir {self._bucket.address}",
                        "a folder that no other run is writing to",
                        f"process {now.owner} renews its lock",
                        "wait for that run to end, or choose another folder",
                    )
        return self._bucket.put_if(LOCK, self._content(), seen.etag)

    def _go_on(self) -> None:
        while not self._ended.wait(self._times.beat) and not self._lost:
            # A store that is away may come back; `check` says when it is too late.
            with contextlib.suppress(SpecshimError):
                self._renew()

    def _renew(self) -> None:
        with self._changing:
            begun = time.monotonic()
            etag = self._bucket.put_if(LOCK, self._content(), self._etag)
            if etag is None:
                seen = look(self._bucket)
                if seen is None or seen.token != self.token:
                    self._lost = f"process {seen.owner} has it" if seen else "it was removed"
                    return
                etag = seen.etag
            self._etag, self._renewed = etag, begun


def look(bucket: Bucket) -> Seen | None:
    """Who holds the lock of an address, or held it when that process was killed."""
    try:
        content, found = bucket.read(LOCK)
    except FileNotFoundError:
        return None
    try:
        said = json.loads(content)
        texts = {name: str(said[name])[:200] for name in ("token", "owner", "machine", "started")}
        return Seen(**texts, pid=int(said["pid"]), etag=found.etag)
    except (ValueError, KeyError, TypeError):
        return Seen("", "unknown", "", 0, "", found.etag)


def _machine() -> str:
    """This start of this machine, and the processes that can be seen from here; "" where that cannot be told."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""
