"""Conversations to token ids and a loss mask: tokenized_data.jsonl, token_freq.pt, metadata.json."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import IO, Any

from pipeline import manifest
from pipeline.atomic import clear_leftovers, replacing, write_bytes, write_text
from pipeline.config import PrepareConfig
from pipeline.conversation_files import ConversationFiles
from pipeline.formats.torch_files import to_bytes
from pipeline.lock import exclusive
from pipeline.masking import THINKING
from pipeline.model_info import read_model, refuse_remote_code
from pipeline.object_store.address import refuse_addresses
from pipeline.prepared import DATA_NAME
from pipeline.progress import stage_progress
from pipeline.row_preparation import Refused, Settings, Tokenized, prepare_row, prepare_rows
from pipeline.tokenizers import load_tokenizer, special_ids
from shims.errors import UsageError

FREQ_NAME = "token_freq.pt"
METADATA_NAME = "metadata.json"
DUPLICATES = ("drop", "keep", "refuse")
_LISTED = 1000
"""Rows left out that the manifest lists; all are counted."""
_THINKING_WORDS = {
    "keep": "thinking is trained on, where the chat template keeps it",
    "mask": "thinking is not trained on",
}


@dataclass
class Prepared:
    """What a run counted."""

    rows: int = 0
    tokens: int = 0
    trainable_tokens: int = 0
    truncated_rows: int = 0
    rewritten_turns: int = 0
    """Assistant turns left out of the mask because the chat template rewrites them later."""
    thinking_turns: int = 0
    """Assistant turns whose thinking is not trained on."""
    duplicate_rows: int = 0
    """Rows whose tokens an earlier row has."""
    refused_by_template: int = 0
    """Rows left out because the chat template refuses them, e.g. their order of roles."""
    unusable_rows: int = 0
    """Rows left out because they are no conversation, or have nothing to train on (only with skip_bad)."""
    skipped: list[str] = field(default_factory=list)
    """``file:line: reason`` of the first rows left out."""
    frequency: Counter[int] = field(default_factory=Counter)
    """Token id -> occurrences among trainable tokens."""
    thinking: str = _THINKING_WORDS["keep"]

    def counts(self) -> dict[str, int]:
        """The numbers for manifest and metadata."""
        return {
            "rows": self.rows,
            "tokens": self.tokens,
            "trainable_tokens": self.trainable_tokens,
            "truncated_rows": self.truncated_rows,
            "rewritten_turns": self.rewritten_turns,
            "thinking_turns": self.thinking_turns,
            "duplicate_rows": self.duplicate_rows,
            "refused_by_template": self.refused_by_template,
            "skipped_rows": self.refused_by_template + self.unusable_rows,
        }


def prepare(config: PrepareConfig) -> Prepared:
    """Tokenize every conversation and write the prepared data.

    Nothing in the output folder changes before the last row has been accepted.

    Returns:
        The counts.

    Raises:
        UsageError: an option, the input file or one of its rows cannot be used.
    """
    files, tokenizer, settings, description = _opened(config)
    with exclusive(config.output_dir):
        clear_leftovers(config.output_dir)
        source_hash = files.fingerprint()
        template_hash = hashlib.sha256(json.dumps(tokenizer.chat_template).encode()).hexdigest()
        choices: dict[str, Any] = {
            "chat_template_sha256": template_hash,
            "max_seq_len": config.max_seq_len,
            "thinking": config.thinking,
            "thinking_end": config.thinking_end,
            "duplicates": config.duplicates,
        }
        compared = {"model.fingerprint": description["fingerprint"], **choices, "inputs.conversations": source_hash}
        _refuse_foreign_folder(config, compared)
        result = Prepared(thinking=_THINKING_WORDS[config.thinking])
        # The rows are named last: whoever is killed on the way leaves a folder that the same command completes.
        with replacing(config.output_dir / DATA_NAME, "wb") as sink:
            rows = prepare_rows(files.rows(), tokenizer, settings, config.workers)
            data_hash = _write_rows(config, rows, sink, result)
            counted = to_bytes(dict(sorted(result.frequency.items())))
            write_bytes(config.output_dir / FREQ_NAME, counted)
            metadata = {
                "model_path": config.model_path,
                "input": str(config.input),
                "max_seq_len": config.max_seq_len,
                "vocab_size": settings.vocab_size,
                "mask": "assistant replies with their end-of-turn token, without headers; " + result.thinking,
                **result.counts(),
            }
            write_text(config.output_dir / METADATA_NAME, json.dumps(metadata, indent=2) + "\n")
            special = [token for token in special_ids(tokenizer) if token < settings.vocab_size]
            record = manifest.compose(
                "prepare",
                model=description,
                **choices,
                special_token_ids=special,
                counts=result.counts(),
                skipped=result.skipped,
                inputs={"conversations": source_hash},
                outputs={DATA_NAME: data_hash, FREQ_NAME: hashlib.sha256(counted).hexdigest()},
            )
            manifest.write(config.output_dir, record)
    return result


def first_rows(config: PrepareConfig, count: int) -> tuple[Any, Iterator[Tokenized | Refused]]:
    """The tokenizer, and the first ``count`` rows prepared; nothing is written.

    Raises:
        UsageError: an option or the input cannot be used.
    """
    if count < 1:
        raise UsageError("--preview", "at least 1", str(count), "give a number of rows")
    files, tokenizer, settings, _ = _opened(config)
    return tokenizer, (prepare_row(raw, tokenizer, settings) for raw in itertools.islice(files.rows(), count))


def _opened(config: PrepareConfig) -> tuple[ConversationFiles, Any, Settings, dict[str, Any]]:
    """Check every option; returns the input, the tokenizer, what decides a row, and the model for the manifest."""
    refuse_addresses(config)
    for flag, value, low in (("--max-seq-len", config.max_seq_len, 2), ("--workers", config.workers, 1)):
        if value < low:
            raise UsageError(flag, f"at least {low}", str(value), "give a larger number")
    for flag, choice, allowed in (
        ("--thinking", config.thinking, THINKING),
        ("--duplicates", config.duplicates, DUPLICATES),
    ):
        if choice not in allowed:
            raise UsageError(flag, ", ".join(allowed), repr(choice), "use one of these")
    files = ConversationFiles(config.input, config.split)
    model = read_model(config.model_path)
    refuse_remote_code(model, config.trust_remote_code)
    tokenizer = load_tokenizer(str(model.path), config.trust_remote_code)
    settings = Settings(
        str(model.path), config.trust_remote_code, model.vocab_size, config.max_seq_len,
        config.thinking, config.thinking_end,
    )  # fmt: skip
    return files, tokenizer, settings, manifest.describe_model(model)


def _refuse_foreign_folder(config: PrepareConfig, settings: dict[str, Any]) -> None:
    folder = config.output_dir
    existing = manifest.read(folder, "prepare")
    if existing is not None:
        manifest.require_same(
            str(folder / manifest.FILE_NAME), settings, existing, "choose another --output-dir, or remove this one"
        )
    elif (folder / DATA_NAME).exists():
        raise UsageError(
            f"--output-dir {folder}",
            "a new folder or one written by `specshim prepare`",
            f"{DATA_NAME} without {manifest.FILE_NAME}",
            "choose another --output-dir",
        )


def _write_rows(config: PrepareConfig, rows: Iterator[Tokenized | Refused], sink: IO[Any], result: Prepared) -> str:
    """Write the rows; returns the sha256 of what was written."""
    digest = hashlib.sha256()
    seen: set[bytes] = set()
    with stage_progress("prepare", total=None) as progress:
        for number, row in enumerate(rows, start=1):
            if isinstance(row, Refused):
                _leave_out(config, row, result)
                continue
            if _is_duplicate(config, row, number, seen, result):
                continue
            _count(row, result)
            line = {"id": row.row_id, "input_ids": row.input_ids, "loss_mask": row.loss_mask}
            content = (json.dumps(line, separators=(",", ":")) + "\n").encode()
            digest.update(content)
            sink.write(content)
            progress.advance(rows=1, tokens=len(row.input_ids))
    if not result.rows:
        left_out = result.refused_by_template + result.unusable_rows
        raise UsageError(
            f"--input {config.input}",
            "at least one usable conversation",
            f"{left_out} rows, none usable" if left_out else "no line with text",
            f"the first: {result.skipped[0]}" if left_out else "give a file with one conversation a line",
        )
    return digest.hexdigest()


def _leave_out(config: PrepareConfig, row: Refused, result: Prepared) -> None:
    if not row.by_template and not config.skip_bad:
        raise UsageError(row.where, row.wanted, row.found, "correct the row, or add --skip-bad to leave such rows out")
    result.refused_by_template += row.by_template
    result.unusable_rows += not row.by_template
    if len(result.skipped) < _LISTED:
        result.skipped.append(str(row))


def _is_duplicate(config: PrepareConfig, row: Tokenized, number: int, seen: set[bytes], result: Prepared) -> bool:
    """Count a row whose tokens came before; whether it is left out."""
    key = hashlib.sha256(repr((row.input_ids, row.loss_mask)).encode()).digest()[:16]
    if key not in seen:
        seen.add(key)
        return False
    result.duplicate_rows += 1
    if config.duplicates == "refuse":
        raise UsageError(
            f"--input {config.input}, row {number} (id {row.row_id})",
            "rows that differ",
            "the tokens of an earlier row",
            "remove it, or use --duplicates drop or keep",
        )
    return config.duplicates == "drop"


def _count(row: Tokenized, result: Prepared) -> None:
    result.rows += 1
    result.tokens += len(row.input_ids)
    result.trainable_tokens += sum(row.loss_mask)
    result.truncated_rows += row.cut
    result.rewritten_turns += row.rewritten_turns
    result.thinking_turns += row.thinking_turns
    result.frequency.update(t for t, bit in zip(row.input_ids, row.loss_mask, strict=True) if bit)
