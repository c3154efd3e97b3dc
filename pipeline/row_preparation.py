"""One conversation to token ids and mask, in this process or in several; no state but the tokenizer."""

from __future__ import annotations

import itertools
import multiprocessing
import signal
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Any

from pipeline.conversation_files import RawRow
from pipeline.conversations import RowFault
from pipeline.masking import THINKING_END, TemplateRefusal, mask_conversation
from pipeline.tokenizers import load_tokenizer
from shims.errors import SpecshimError
from shims.guardian import guarding

_AT_ONCE = 32
"""Rows handed to a process at once."""
_AHEAD = 4
"""How often that many are read ahead for each process."""


@dataclass(frozen=True)
class Settings:
    """What decides a row's tokens and mask."""

    model_path: str
    trust_remote_code: bool
    vocab_size: int
    max_seq_len: int
    thinking: str = "keep"
    thinking_end: str = THINKING_END


@dataclass(frozen=True)
class Tokenized:
    """A usable row."""

    row_id: str
    input_ids: list[int]
    loss_mask: list[int]
    cut: bool
    """It was longer than allowed."""
    rewritten_turns: int
    thinking_turns: int


@dataclass(frozen=True)
class Refused:
    """A row that cannot be used, and why."""

    where: str
    wanted: str
    found: str
    by_template: bool
    """The chat template refuses it; nothing is wrong with the file."""

    def __str__(self) -> str:
        return f"{self.where}: wanted {self.wanted}, found {self.found}"


def prepare_row(raw: RawRow, tokenizer: Any, settings: Settings) -> Tokenized | Refused:
    """Parse, render, tokenize, mask and cut one row."""
    try:
        return _tokenized(raw, tokenizer, settings)
    except RowFault as fault:
        return Refused(raw.where, fault.wanted, fault.found, isinstance(fault, TemplateRefusal))


def _tokenized(raw: RawRow, tokenizer: Any, settings: Settings) -> Tokenized:
    conversation = raw.parse()
    masked = mask_conversation(
        tokenizer, conversation.messages, conversation.tools, settings.thinking, settings.thinking_end
    )
    limit = settings.max_seq_len
    ids, mask = masked.input_ids[:limit], masked.loss_mask[:limit]
    # The first token is never predicted, so a mask on it alone trains nothing.
    if not any(mask[1:]):
        raise RowFault(
            f"an assistant token within the first {limit} tokens",
            f"none (the conversation has {len(masked.input_ids)} tokens)",
        )
    if max(ids) >= settings.vocab_size:
        raise RowFault(f"token ids below {settings.vocab_size} (vocab_size in config.json)", f"token id {max(ids)}")
    return Tokenized(
        conversation.row_id, ids, mask, len(ids) < len(masked.input_ids), masked.rewritten_turns, masked.thinking_turns
    )


def prepare_rows(
    rows: Iterable[RawRow], tokenizer: Any, settings: Settings, workers: int
) -> Iterator[Tokenized | Refused]:
    """Prepare rows in order, in ``workers`` processes; the result does not depend on their number.

    Args:
        tokenizer: this process's; the others load their own.

    Raises:
        SpecshimError: one of the processes was killed.
    """
    if workers == 1:
        for raw in rows:
            yield prepare_row(raw, tokenizer, settings)
        return
    with guarding():
        # Started afresh, not forked: a tokenizer has threads of its own. Not a `multiprocessing.Pool`, which waits
        # without end for a process that was killed with one of its locks.
        spawn = multiprocessing.get_context("spawn")
        pool = ProcessPoolExecutor(workers, mp_context=spawn, initializer=_start, initargs=(settings,))
        try:
            yield from _in_order(pool, rows, workers)
        except BrokenProcessPool as error:
            raise SpecshimError(
                f"prepare --workers {workers}",
                "its processes to stay alive",
                "one ended without a word (killed from outside, or by the kernel for memory: see dmesg)",
                "repeat the command, with fewer --workers if memory was short",
            ) from error
        finally:
            pool.shutdown(cancel_futures=True)


def _in_order(pool: Executor, rows: Iterable[RawRow], workers: int) -> Iterator[Tokenized | Refused]:
    waiting: deque[Future[list[Tokenized | Refused]]] = deque()
    for part in _parts(rows):
        waiting.append(pool.submit(_work, part))
        if len(waiting) > _AHEAD * workers:
            yield from waiting.popleft().result()
    while waiting:
        yield from waiting.popleft().result()


def _parts(rows: Iterable[RawRow]) -> Iterator[list[RawRow]]:
    remaining = iter(rows)
    while part := list(itertools.islice(remaining, _AT_ONCE)):
        yield part


_worker: tuple[Any, Settings] | None = None


def _start(settings: Settings) -> None:
    global _worker
    # Ctrl-C reaches every process of the terminal; the first one ends the others.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _worker = load_tokenizer(settings.model_path, settings.trust_remote_code), settings


def _work(rows: Sequence[RawRow]) -> list[Tokenized | Refused]:
    assert _worker is not None
    return [prepare_row(raw, *_worker) for raw in rows]
