"""Conversations to token ids and a loss mask: tokenized_data.jsonl, token_freq.pt, metadata.json."""

from __future__ import annotations

import hashlib
import io
import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from pipeline import manifest
from pipeline.atomic import clear_leftovers, replacing, write_bytes, write_text
from pipeline.config import PrepareConfig
from pipeline.conversations import RowFault, numbered_lines, parse_row
from pipeline.lock import exclusive
from pipeline.masking import mask_conversation
from pipeline.model_info import ModelInfo, read_model, refuse_remote_code, sha256_file
from pipeline.prepared import DATA_NAME
from pipeline.progress import stage_progress
from shims.errors import UsageError

FREQ_NAME = "token_freq.pt"
METADATA_NAME = "metadata.json"


@dataclass
class Prepared:
    """What a run counted."""

    rows: int = 0
    tokens: int = 0
    trainable_tokens: int = 0
    truncated_rows: int = 0
    rewritten_turns: int = 0
    """Assistant turns left out of the mask because the chat template rewrites them later."""
    skipped: list[str] = field(default_factory=list)
    """``file:line: reason`` of every row left out (only with skip_bad)."""
    frequency: Counter[int] = field(default_factory=Counter)
    """Token id -> occurrences among trainable tokens."""

    def counts(self) -> dict[str, int]:
        """The numbers for manifest and metadata."""
        return {
            "rows": self.rows,
            "tokens": self.tokens,
            "trainable_tokens": self.trainable_tokens,
            "truncated_rows": self.truncated_rows,
            "rewritten_turns": self.rewritten_turns,
            "skipped_rows": len(self.skipped),
        }


def load_tokenizer(model: ModelInfo, trust_remote_code: bool) -> Any:
    """The model's tokenizer, with a chat template.

    Raises:
        UsageError: no tokenizer, or one without a chat template.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(model.path), trust_remote_code=trust_remote_code)
    except Exception as error:
        raise UsageError(
            f"--model-path {model.path}",
            "a folder with a tokenizer",
            " ".join(f"{type(error).__name__}: {error}".split()),
            "read the Python files it brings, then add --trust-remote-code"
            if "trust_remote_code" in str(error)
            else "complete the folder",
        ) from error
    if not tokenizer.chat_template:
        raise UsageError(
            f"--model-path {model.path}",
            "a tokenizer with a chat template",
            "none in tokenizer_config.json or chat_template.jinja",
            "use the instruction-tuned variant of the model, or add its chat template",
        )
    return tokenizer


def prepare(config: PrepareConfig) -> Prepared:
    """Tokenize every conversation and write the prepared data.

    Nothing in the output folder changes before the last row has been accepted.

    Returns:
        The counts.

    Raises:
        UsageError: an option, the input file or one of its rows cannot be used.
    """
    if config.max_seq_len < 2:
        raise UsageError("--max-seq-len", "at least 2 tokens", str(config.max_seq_len), "give a larger number")
    if not config.input.is_file():
        found = "not a regular file" if config.input.exists() else "no such file"
        raise UsageError(f"--input {config.input}", "a JSONL file of conversations", found, "check the path")
    model = read_model(config.model_path)
    refuse_remote_code(model, config.trust_remote_code)
    tokenizer = load_tokenizer(model, config.trust_remote_code)
    with exclusive(config.output_dir):
        clear_leftovers(config.output_dir)
        source_hash = sha256_file(config.input)
        template_hash = hashlib.sha256(json.dumps(tokenizer.chat_template).encode()).hexdigest()
        settings = {
            "model.fingerprint": model.fingerprint,
            "chat_template_sha256": template_hash,
            "max_seq_len": config.max_seq_len,
            "inputs.conversations": source_hash,
        }
        _refuse_foreign_folder(config.output_dir, settings)
        result = Prepared()
        # The rows are named last: whoever is killed on the way leaves a folder that the same command completes.
        with replacing(config.output_dir / DATA_NAME, "wb") as sink:
            data_hash = _write_rows(config, tokenizer, model.vocab_size, sink, result)
            write_bytes(config.output_dir / FREQ_NAME, _torch_bytes(dict(sorted(result.frequency.items()))))
            metadata = {
                "model_path": config.model_path,
                "input": str(config.input),
                "max_seq_len": config.max_seq_len,
                "vocab_size": model.vocab_size,
                "mask": "assistant replies with their end-of-turn token, without headers",
                **result.counts(),
            }
            write_text(config.output_dir / METADATA_NAME, json.dumps(metadata, indent=2) + "\n")
            record = manifest.compose(
                "prepare",
                model=manifest.describe_model(model),
                chat_template_sha256=template_hash,
                max_seq_len=config.max_seq_len,
                counts=result.counts(),
                skipped=result.skipped,
                inputs={"conversations": source_hash},
                outputs={DATA_NAME: data_hash},
            )
            manifest.write(config.output_dir, record)
    return result


def _refuse_foreign_folder(folder: Path, settings: dict[str, Any]) -> None:
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


def _write_rows(config: PrepareConfig, tokenizer: Any, vocab_size: int, sink: IO[Any], result: Prepared) -> str:
    """Write the rows; returns the sha256 of what was written."""
    digest = hashlib.sha256()
    with stage_progress("prepare", total=None) as progress:
        for line, text in numbered_lines(config.input):
            try:
                row = _prepare_row(config, tokenizer, vocab_size, line, text, result)
            except RowFault as fault:
                where = f"{config.input}:{line}"
                if not config.skip_bad:
                    raise UsageError(
                        where, fault.wanted, fault.found, "correct the line, or add --skip-bad to leave such rows out"
                    ) from fault
                result.skipped.append(f"{where}: wanted {fault.wanted}, found {fault.found}")
                continue
            content = (json.dumps(row, separators=(",", ":")) + "\n").encode()
            digest.update(content)
            sink.write(content)
            progress.advance(rows=1, tokens=len(row["input_ids"]))
    if not result.rows:
        raise UsageError(
            f"--input {config.input}",
            "at least one usable conversation",
            f"{len(result.skipped)} rows, none usable" if result.skipped else "no line with text",
            f"the first: {result.skipped[0]}" if result.skipped else "give a file with one conversation a line",
        )
    return digest.hexdigest()


def _prepare_row(
    config: PrepareConfig, tokenizer: Any, vocab_size: int, line: int, text: str, result: Prepared
) -> dict[str, Any]:
    conversation = parse_row(text, fallback_id=str(line))
    masked = mask_conversation(tokenizer, conversation.messages, conversation.tools)
    ids, mask = masked.input_ids[: config.max_seq_len], masked.loss_mask[: config.max_seq_len]
    # The first token is never predicted, so a mask on it alone trains nothing.
    if not any(mask[1:]):
        raise RowFault(
            f"an assistant token within the first {config.max_seq_len} tokens",
            f"none (the conversation has {len(masked.input_ids)} tokens)",
        )
    if max(ids) >= vocab_size:
        raise RowFault(f"token ids below {vocab_size} (vocab_size in config.json)", f"token id {max(ids)}")
    result.rows += 1
    result.tokens += len(ids)
    result.trainable_tokens += sum(mask)
    result.truncated_rows += len(ids) < len(masked.input_ids)
    result.rewritten_turns += masked.rewritten_turns
    result.frequency.update(token for token, bit in zip(ids, mask, strict=True) if bit)
    return {"id": conversation.row_id, "input_ids": ids, "loss_mask": mask}


def _torch_bytes(value: Any) -> bytes:
    import torch

    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()
