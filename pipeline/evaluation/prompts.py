"""What the servers are asked: the questions of the held-out rows, or those of a file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pipeline.conversation_files import ConversationFiles
from pipeline.conversations import RowFault, numbered_lines
from pipeline.conversations import load_object as parse_object
from pipeline.evaluation.held_out import Row
from pipeline.model_info import ModelInfo
from pipeline.prepared import DATA_NAME, PreparedFile
from pipeline.tokenizers import load_tokenizer
from shims.errors import UsageError


def of_rows(rows: Sequence[Row]) -> list[list[int]]:
    """Each row up to its first answer."""
    found = []
    for row in rows:
        first = next((place for place, bit in enumerate(row.mask) if bit), 0)
        if first:
            found.append(row.tokens[:first])
    return found


def of_file(path: Path, verifier: ModelInfo, limit: int, trust_remote_code: bool) -> list[list[int]]:
    """Token ids of up to ``limit`` prompts.

    Args:
        path: ``tokenized_data.jsonl`` of `prepare` (rows up to their first answer), JSONL with a ``prompt`` a line,
            or conversations, of which everything before the first answer is asked.

    Raises:
        UsageError: no prompt there.
    """
    if path.name == DATA_NAME:
        data = PreparedFile(path, verifier.vocab_size, "--prompts")
        rows = [data[index] for index in range(min(limit, len(data)))]
        return of_rows([Row(number, row.input_ids, row.loss_mask) for number, row in enumerate(rows)])
    tokenizer = load_tokenizer(str(verifier.path), trust_remote_code)
    found: list[list[int]] = []
    for messages in _asked(path):
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        found.append(tokenizer(text, add_special_tokens=False)["input_ids"])
        if len(found) == limit:
            break
    if not found:
        raise UsageError(f"--prompts {path}", "at least one question", "none", "give a file with questions")
    return found


def _asked(path: Path) -> list[list[dict[str, str]]]:
    if path.suffix == ".jsonl" and path.is_file():
        lines = list(numbered_lines(path))
        try:
            rows = [parse_object(line) for _, line in lines]
        except RowFault as fault:
            raise UsageError(f"--prompts {path}", fault.wanted, fault.found, "mend the file") from fault
        if rows and all(isinstance(row.get("prompt"), str) for row in rows):
            return [[{"role": "user", "content": row["prompt"]}] for row in rows]
    asked = []
    for raw in ConversationFiles(path).rows():
        try:
            messages = list(raw.parse(answered=False).messages)
        except RowFault as fault:
            raise UsageError(f"--prompts {path}", fault.wanted, fault.found, "mend the file") from fault
        end = next((place for place, message in enumerate(messages) if message["role"] == "assistant"), len(messages))
        if end:
            asked.append(messages[:end])
    return asked
