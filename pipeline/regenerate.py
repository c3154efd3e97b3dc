"""Conversations in the model's own words: a draft learns to guess what its model says, not what others wrote.

The questions of each conversation are asked anew, turn by turn, each after the model's own earlier replies. What is
finished is on disk after every batch, so a killed run is continued by the same command; a conversation's seed
depends on its place in the input alone.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pipeline import manifest, run_history
from pipeline.atomic import clear_leftovers, replacing, sync_folder
from pipeline.config import RegenerateConfig, check_seed
from pipeline.conversation_files import ConversationFiles, RawRow
from pipeline.conversations import Message, RowFault
from pipeline.devices import computing_dtype
from pipeline.lock import exclusive
from pipeline.model_info import read_model, refuse_missing_weights, refuse_remote_code
from pipeline.object_store.address import refuse_addresses
from pipeline.progress import stage_progress
from pipeline.speaker import Speaker, open_speaker
from shims.errors import UsageError

NAME = "conversations.jsonl"
_PART = NAME + ".part"
_LISTED = 1000


@dataclass
class Regenerated:
    """What a run did, or found done."""

    conversations: int = 0
    replies: int = 0
    cut_replies: int = 0
    """Replies that reached --max-reply-tokens."""
    shortened: int = 0
    """Conversations that end early: an empty reply, or no room for another one."""
    kept: int = 0
    """Found finished on disk."""
    skipped: list[str] = field(default_factory=list)
    """Rows left out, and why."""

    def counts(self) -> dict[str, int]:
        """The numbers for the manifest."""
        return {
            "rows": self.conversations,
            "replies": self.replies,
            "cut_replies": self.cut_replies,
            "shortened": self.shortened,
            "skipped_rows": len(self.skipped),
        }


def regenerate(config: RegenerateConfig) -> Regenerated:
    """Ask every question, and write the conversations.

    Returns:
        The counts of the whole output.

    Raises:
        UsageError: an option, the input or one of its rows cannot be used.
    """
    refuse_addresses(config)
    _check(config)
    check_seed(config.seed)
    files = ConversationFiles(config.input, config.split)
    model = read_model(config.model_path)
    refuse_remote_code(model, config.trust_remote_code)
    refuse_missing_weights(model)
    dtype = computing_dtype(config.dtype, model.dtype)
    if model.max_positions is not None:
        config = replace(config, max_model_len=min(config.max_model_len, model.max_positions))
    with exclusive(config.output_dir):
        settings = {
            "model": manifest.describe_model(model),
            "dtype": dtype,
            "temperature": config.temperature,
            "top_p": config.top_p,
            "max_reply_tokens": config.max_reply_tokens,
            "max_model_len": config.max_model_len,
            "seed": config.seed,
            "inputs": {"conversations": files.fingerprint()},
        }
        _refuse_foreign_folder(config, settings)
        clear_leftovers(config.output_dir)
        result = Regenerated()
        target, part = config.output_dir / NAME, config.output_dir / _PART
        # The part goes last: where both are there, a run was killed before its manifest was complete.
        if target.exists() and not part.exists():
            _count(target, result)
            result.kept = result.conversations
        else:
            done = _finished_rows(part)
            _ask_all(config, files, model.path, dtype, done, part, settings, result)
            result.kept = len(done)
    return result


def _ask_all(
    config: RegenerateConfig,
    files: ConversationFiles,
    model_folder: Path,
    dtype: str,
    done: set[int],
    part: Path,
    settings: dict[str, Any],
    result: Regenerated,
) -> None:
    # Every row is looked at before the model loads.
    wanted = list(_questions(config, files, result))
    if not wanted:
        raise UsageError(
            f"--input {config.input}",
            "at least one conversation with a question",
            f"{len(result.skipped)} rows, none usable" if result.skipped else "no line with text",
            f"the first: {result.skipped[0]}" if result.skipped else "give a file with one conversation a line",
        )
    missing = [(number, questions) for number, questions in wanted if number not in done]
    run = None
    if missing:
        speaker = open_speaker(config, str(model_folder), dtype)
        run = run_history.begin(config.output_dir, manifest.compose("regenerate", complete=False, **settings))
        with stage_progress("regenerate", len(missing), unit="conversations") as progress:
            for start in range(0, len(missing), config.batch_size):
                batch = missing[start : start + config.batch_size]
                rows, tokens = _ask_batch(speaker, batch, config.seed)
                _append(part, rows)
                progress.advance(rows=len(batch), tokens=tokens)
    _count(part, result)
    if run is None:
        run = run_history.begin(config.output_dir, manifest.compose("regenerate", complete=False, **settings))
    facts = {"rows": len(missing)}
    _publish(part, config.output_dir / NAME)
    run_history.end(
        config.output_dir, "regenerate", run, facts, counts=result.counts(),
        skipped=result.skipped[:_LISTED], complete=True,
    )  # fmt: skip
    part.unlink()


def _check(config: RegenerateConfig) -> None:
    for flag, value, low in (
        ("--max-reply-tokens", config.max_reply_tokens, 1),
        ("--max-model-len", config.max_model_len, 2),
        ("--batch-size", config.batch_size, 1),
        ("--tp-size", config.tp_size, 1),
        ("--temperature", config.temperature, 0),
    ):
        if not value >= low:
            raise UsageError(flag, f"at least {low}", str(value), "give a larger number")
    for flag, share in (("--top-p", config.top_p), ("--gpu-memory-utilization", config.gpu_memory_utilization)):
        if not 0 < share <= 1:
            raise UsageError(flag, "a share above 0, at most 1", str(share), "give such a share")


def _questions(
    config: RegenerateConfig, files: ConversationFiles, result: Regenerated
) -> Iterator[tuple[int, tuple[str, list[Message]]]]:
    """(number of the row, (its id, its turns that are not the assistant's)) of every usable row."""
    for number, raw in enumerate(files.rows()):
        try:
            yield number, _asked(raw)
        except RowFault as fault:
            if not config.skip_bad and not isinstance(fault, ToolFault):
                raise UsageError(
                    raw.where, fault.wanted, fault.found, "correct the row, or add --skip-bad to leave such rows out"
                ) from fault
            result.skipped.append(f"{raw.where}: wanted {fault.wanted}, found {fault.found}")


class ToolFault(RowFault):
    """The conversation depends on what tools answered; the model's own calls would have other answers."""


def _asked(raw: RawRow) -> tuple[str, list[Message]]:
    conversation = raw.parse(answered=False)
    if any(message["role"] == "tool" or message.get("tool_calls") for message in conversation.messages):
        raise ToolFault("a conversation without tools", "calls or answers of tools")
    asked = [message for message in conversation.messages if message["role"] != "assistant"]
    if not any(message["role"] == "user" for message in asked):
        raise RowFault("at least one user message", f"roles {', '.join(m['role'] for m in conversation.messages)}")
    return conversation.row_id, asked


@dataclass
class _Row:
    """A conversation under way; its fields are those of its line."""

    row: int
    id: str
    messages: list[Message] = field(default_factory=list)
    finish: list[str] = field(default_factory=list)
    """Why each reply ended."""
    shortened: bool = False


def _ask_batch(
    speaker: Speaker, batch: Sequence[tuple[int, tuple[str, list[Message]]]], seed: int
) -> tuple[list[_Row], int]:
    """Every conversation of a batch, turn by turn, all at once; and the tokens of all replies."""
    tokens = 0
    rows = [_Row(number, row_id) for number, (row_id, _) in batch]
    rounds = [_rounds(asked) for _, (_, asked) in batch]
    for turn in range(max(map(len, rounds))):
        pending = [(row, own[turn]) for row, own in zip(rows, rounds, strict=True) if turn < len(own)]
        pending = [(row, more) for row, more in pending if not row.shortened]
        asked = [[*row.messages, *more] for row, more in pending]
        seeds = [hash_seed(seed, row.row, turn) for row, _ in pending]
        for (row, _), conversation, reply in zip(pending, asked, speaker.replies(asked, seeds), strict=True):
            tokens += reply.tokens if reply else 0
            # A question without an answer teaches nothing: the conversation ends before it.
            if reply is None or not reply.text.strip():
                row.shortened = True
                continue
            row.messages = [*conversation, {"role": "assistant", "content": reply.text}]
            row.finish.append(reply.finish)
    return rows, tokens


def _rounds(asked: Sequence[Message]) -> list[list[Message]]:
    """The turns before each reply: a user message, with what stands before it."""
    rounds: list[list[Message]] = [[]]
    for message in asked:
        rounds[-1].append(message)
        if message["role"] == "user":
            rounds.append([])
    return [turns for turns in rounds if turns and turns[-1]["role"] == "user"]


def hash_seed(seed: int, row: int, turn: int) -> int:
    """A seed for one reply, the same in every run."""
    return (seed * 1_000_003 + row) * 1009 + turn  # (below 2**63: a seed has 32 bits)


def _append(part: Path, rows: Sequence[_Row]) -> None:
    with part.open("a", encoding="utf-8") as handle:
        handle.write("".join(json.dumps(vars(row), ensure_ascii=False) + "\n" for row in rows))
        handle.flush()
        os.fsync(handle.fileno())


def _finished_rows(path: Path) -> set[int]:
    """Rows that stand whole in the output; a line cut off by a kill is removed."""
    if not path.exists():
        return set()
    done: set[int] = set()
    whole = 0
    with path.open("rb") as handle:
        for line in handle:
            try:
                row = int(json.loads(line)["row"])
            except (ValueError, TypeError, KeyError):
                break
            if not line.endswith(b"\n"):
                break
            done.add(row)
            whole += len(line)
    if whole < path.stat().st_size:
        os.truncate(path, whole)
    return done


def _publish(part: Path, target: Path) -> None:
    """Put the conversations in place; those in which nothing was answered are left out."""
    with part.open("rb") as source, replacing(target, "wb") as sink:
        for line in source:
            if json.loads(line)["messages"]:
                sink.write(line)  # type: ignore[arg-type]
    sync_folder(target.parent)


def _count(path: Path, result: Regenerated) -> None:
    result.conversations = result.replies = result.cut_replies = result.shortened = 0
    with path.open(encoding="utf-8") as handle:
        for line in handle:
            row = json.loads(line)
            result.conversations += bool(row["messages"])
            result.replies += len(row["finish"])
            result.cut_replies += row["finish"].count("length")
            result.shortened += row["shortened"]


def _refuse_foreign_folder(config: RegenerateConfig, settings: dict[str, Any]) -> None:
    existing = manifest.read(config.output_dir, "regenerate")
    where = str(config.output_dir / manifest.FILE_NAME)
    names = [name for name in settings if name not in ("model", "inputs")]
    if existing is not None:
        wanted = {
            "model.fingerprint": settings["model"]["fingerprint"],
            **{name: settings[name] for name in names},
            "inputs.conversations": settings["inputs"]["conversations"],
        }
        manifest.require_same(where, wanted, existing, "choose another --output-dir, or repeat the first command")
    elif any((config.output_dir / name).exists() for name in (NAME, _PART)):
        raise UsageError(
            f"--output-dir {config.output_dir}",
            "a new folder or one written by `specshim regenerate`",
            f"{NAME} without {manifest.FILE_NAME}",
            "choose another --output-dir",
        )
