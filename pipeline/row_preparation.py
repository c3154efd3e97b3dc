"""One conversation to token ids and mask, in this process or in several; no state but the tokenizer."""

from __future__ import annotations

import itertools
import multiprocessing
import signal
from collections.abc import Iterable, Iterator, Sequence
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
_LOOK_EVERY = 1.0  # seconds without rows after which the processes are looked at


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
    # Started afresh, not forked: a tokenizer has threads of its own.
    before = multiprocessing.active_children()
    with guarding(), multiprocessing.get_context("spawn").Pool(workers, _start, (settings,)) as pool:
        processes = [process for process in multiprocessing.active_children() if process not in before]
        prepared = pool.imap(_work, _parts(rows))
        while True:
            try:
                part = prepared.next(_LOOK_EVERY)
            except StopIteration:
                return
            except multiprocessing.TimeoutError:
                _refuse_dead(processes)
                continue
            yield from part


def _parts(rows: Iterable[RawRow]) -> Iterator[list[RawRow]]:
    remaining = iter(rows)
    while part := list(itertools.islice(remaining, _AT_ONCE)):
        yield part


def _refuse_dead(processes: Sequence[Any]) -> None:
    """The pool replaces a process that was killed, and waits for its rows without end."""
    dead = [process for process in processes if process.exitcode is not None]
    if dead:
        raise SpecshimError(
            f"prepare --workers, process {dead[0].pid}",
            "to stay alive",
            "it ended without a word (killed from outside, or by the kernel for memory: see dmesg)",
            "repeat the command, with fewer --workers if memory was short",
        )


_worker: tuple[Any, Settings] | None = None


def _start(settings: Settings) -> None:
    global _worker
    # Ctrl-C reaches every process of the terminal; the first one ends the others.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _worker = load_tokenizer(settings.model_path, settings.trust_remote_code), settings


def _work(rows: Sequence[RawRow]) -> list[Tokenized | Refused]:
    assert _worker is not None
    return [prepare_row(raw, *_worker) for raw in rows]
