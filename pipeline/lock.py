"""One writer per output folder, or one per shard of it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from pipeline.shard import Shard
from shims.errors import UsageError

_NAME = ".lock"
# Held for the moment in which a process takes its locks: another one that takes its own at the same moment
# would else see what is held for that moment only.
_ENTRY = ".lock-entry"
_open_files: set[IO[str]] = set()


def leave_to_parent() -> None:
    """Hold none of the locks in this forked process, which writes nothing and may outlive its parent by seconds."""
    for file in list(_open_files):
        file.close()


@contextlib.contextmanager
def exclusive(folder: Path) -> Iterator[None]:
    """Hold ``folder`` for this process; a second writer is refused, not queued.

    The lock belongs to the open file, so a killed process leaves none behind.

    Raises:
        UsageError: another process is writing there, or this one cannot.
    """
    with _held(folder, Shard()):
        yield


@contextlib.contextmanager
def shared(folder: Path, shard: Shard) -> Iterator[None]:
    """Hold one shard of ``folder``; the others may be held by other processes, if all count the same n.

    Raises:
        UsageError: the shard is taken, the whole folder is, or it is being written in other shards.
    """
    with _held(folder, shard):
        yield


@contextlib.contextmanager
def _held(folder: Path, shard: Shard) -> Iterator[None]:
    try:
        with contextlib.ExitStack() as files:
            with _entering(folder):
                whole = files.enter_context(_open(folder, _NAME))
                if shard.alone:
                    _take_whole(folder, whole)
                else:
                    own = files.enter_context(_open(folder, f"{_NAME}-{shard.number}-of-{shard.of}"))
                    _take_shard(folder, shard, whole, own)
            yield
    except BaseException:
        _remove_if_untouched(folder)
        raise


def _take_whole(folder: Path, whole: IO[str]) -> None:
    if not _taken(whole, fcntl.LOCK_EX):
        raise _in_use(folder, whole, "wait for that run to end, or choose another folder")
    _sign(whole, "")


def _take_shard(folder: Path, shard: Shard, whole: IO[str], own: IO[str]) -> None:
    split = f"in {shard.of} shards"
    # Whoever comes first says into how many; it can be said anew only when nobody is there.
    if _taken(whole, fcntl.LOCK_EX):
        _sign(whole, split)
    if not _taken(whole, fcntl.LOCK_SH):
        raise _in_use(folder, whole, "wait for that run to end, or choose another folder")
    whole.seek(0)
    stated = whole.read().strip()
    if not stated.endswith(split):
        raise UsageError(
            where=f"--output-dir {folder}",
            wanted=f"a folder written {split}",
            found=f"process {stated or 'unknown'} writes it",
            next_step="give every process the same n in --shard i/n",
        )
    if not _taken(own, fcntl.LOCK_EX):
        raise _in_use(folder, own, f"give each process a number of its own, 1 to {shard.of}")
    _sign(own, "")


@contextlib.contextmanager
def _entering(folder: Path) -> Iterator[None]:
    while True:
        with _open(folder, _ENTRY) as handle:
            fcntl.flock(handle, fcntl.LOCK_EX)
            # Whoever leaves a refused folder removes its files, this one too: then what is held is nobody's.
            try:
                current = os.path.samestat(os.fstat(handle.fileno()), (folder / _ENTRY).stat())
            except FileNotFoundError:
                current = False
            if current:
                yield
                return


@contextlib.contextmanager
def queued(file: Path) -> Iterator[None]:
    """Hold a file's lock, waiting for it: for short changes that several processes make."""
    with file.open("a+", encoding="utf-8") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def signature(folder: Path) -> str:
    """Who wrote to ``folder`` last, or is writing; "" where nobody did. Needs no lock."""
    try:
        return (folder / _NAME).read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def holder(folder: Path) -> str | None:
    """Who is writing to ``folder`` now; None when nobody is. Changes nothing."""
    if not (folder / _ENTRY).is_file():
        return None
    with (folder / _ENTRY).open(encoding="utf-8") as entry:
        fcntl.flock(entry, fcntl.LOCK_EX)
        for file in [folder / _NAME, *sorted(folder.glob(f"{_NAME}-*-of-*"))]:
            with contextlib.suppress(OSError), file.open(encoding="utf-8") as handle:
                if not _taken(handle, fcntl.LOCK_EX):
                    return handle.read().strip() or "unknown"
    return None


def _taken(handle: IO[str], kind: int) -> bool:
    try:
        fcntl.flock(handle, kind | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
            raise
        return False
    return True


def _sign(handle: IO[str], more: str) -> None:
    handle.seek(0)
    handle.truncate(0)
    handle.write(f"{os.getpid()} on {socket.gethostname()} {more}".strip())
    handle.flush()


def _in_use(folder: Path, handle: IO[str], next_step: str) -> UsageError:
    handle.seek(0)
    return UsageError(
        where=f"--output-dir {folder}",
        wanted="a folder that no other run is writing to",
        found=f"process {handle.read().strip() or 'unknown'} holds its lock",
        next_step=next_step,
    )


@contextlib.contextmanager
def _open(folder: Path, name: str) -> Iterator[IO[str]]:
    with _opened(folder, name) as file:
        _open_files.add(file)
        try:
            yield file
        finally:
            _open_files.discard(file)


def _opened(folder: Path, name: str) -> IO[str]:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return (folder / name).open("a+", encoding="utf-8")
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise UsageError(
            where=f"--output-dir {folder}",
            wanted="a folder that can be made and written to",
            found=f"{error.strerror}: {error.filename}",
            next_step="choose another folder, or change its permissions",
        ) from error


def _remove_if_untouched(folder: Path) -> None:
    """A refused run leaves no empty folder behind, unless others hold it."""
    with contextlib.suppress(OSError):
        if not all(entry.name.startswith(_NAME) for entry in folder.iterdir()):
            return
        with _entering(folder), (folder / _NAME).open(encoding="utf-8") as whole:
            entries = list(folder.iterdir())
            if _taken(whole, fcntl.LOCK_EX) and all(entry.name.startswith(_NAME) for entry in entries):
                for entry in entries:
                    entry.unlink()
                folder.rmdir()
