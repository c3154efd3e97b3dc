"""tokenized_data.jsonl: checked once from end to end, then read row by row."""

from __future__ import annotations

import hashlib
import json
import os
from array import array
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.conversations import RowFault, kind_of, load_object
from shims.errors import UsageError

DATA_NAME = "tokenized_data.jsonl"


@dataclass(frozen=True)
class PreparedRow:
    """One row: token ids below the vocabulary size and a 0/1 mask of equal length."""

    row_id: str
    input_ids: list[int]
    loss_mask: list[int]


def parse_prepared(text: str, vocab_size: int | None = None) -> PreparedRow:
    """Parse one line.

    Raises:
        RowFault: not an object with equal-length ``input_ids`` and ``loss_mask``, or a token
            id outside the vocabulary.
    """
    row = load_object(text)
    ids, mask = _integers(row, "input_ids"), _integers(row, "loss_mask")
    if not ids:
        raise RowFault("at least one token", "an empty `input_ids`")
    if len(ids) != len(mask):
        raise RowFault("`input_ids` and `loss_mask` of one length", f"{len(ids)} and {len(mask)}")
    if set(mask) - {0, 1}:
        raise RowFault("`loss_mask` of 0 and 1", repr(sorted(set(mask) - {0, 1})[0]))
    if min(ids) < 0 or (vocab_size is not None and max(ids) >= vocab_size):
        wrong = min(ids) if min(ids) < 0 else max(ids)
        raise RowFault(
            f"token ids from 0 to {vocab_size - 1 if vocab_size else 'the vocabulary size'}", f"token id {wrong}"
        )
    return PreparedRow(str(row.get("id", "")), ids, mask)


def _integers(row: dict[str, Any], key: str) -> list[int]:
    values = row.get(key)
    if not isinstance(values, list):
        raise RowFault(f"`{key}`, a list of integers", kind_of(values) if key in row else "nothing")
    for value in values:
        if type(value) is not int:
            raise RowFault(f"`{key}`, a list of integers", f"{json.dumps(value)[:40]} in it")
    return values


class PreparedFile:
    """The rows of a tokenized_data.jsonl, by index; only offsets and lengths stay in memory.

    The file stays open: one that takes its place meanwhile, as another `prepare` makes it, is not read.
    """

    def __init__(
        self,
        path: Path,
        vocab_size: int | None,
        flag: str = "--prepared-data",
        checked: bool = False,
        sha256: str | None = None,
    ) -> None:
        """Check every line.

        Args:
            checked: another process has done that; lengths are not known then.
            sha256: what the file has to be; None accepts any.

        Raises:
            UsageError: the file is missing, empty or another one, or names the faulty line.
        """
        self.path = path
        self._offsets, self._sizes = array("Q"), array("Q")
        self.lengths = array("L")
        """Tokens of each row."""
        if not path.is_file():
            raise UsageError(
                f"{flag} {path}",
                f"the {DATA_NAME} of `specshim prepare`",
                "a folder" if path.is_dir() else "no such file",
                "check the path, or run prepare",
            )
        self._handle = path.open("rb")
        offset, digest = 0, hashlib.sha256()
        for number, raw in enumerate(self._handle, start=1):
            digest.update(raw)
            if raw.strip():
                self._offsets.append(offset)
                self._sizes.append(len(raw))
            if raw.strip() and not checked:
                self.lengths.append(len(self._check(raw, number, vocab_size).input_ids))
            offset += len(raw)
        self.sha256 = digest.hexdigest()
        if sha256 not in (None, self.sha256):
            raise UsageError(
                f"{flag} {path}",
                f"sha256 {sha256}, as it was when this run began",
                self.sha256,
                "run the same command again, with the file as it was",
            )
        if not self._offsets:
            raise UsageError(f"{flag} {path}", "at least one row", "no line with text", "run `specshim prepare` again")

    def _check(self, raw: bytes, number: int, vocab_size: int | None) -> PreparedRow:
        try:
            return parse_prepared(raw.decode("utf-8", errors="surrogateescape").strip(" \t\r\n"), vocab_size)
        except RowFault as fault:
            raise UsageError(
                f"{self.path}:{number}",
                fault.wanted,
                fault.found,
                "prepare the data again with this model's tokenizer, or correct the line",
            ) from fault

    def __len__(self) -> int:
        return len(self._offsets)

    def __getitem__(self, index: int) -> PreparedRow:
        # (Several threads read at once.)
        raw = os.pread(self._handle.fileno(), self._sizes[index], self._offsets[index])
        return parse_prepared(raw.decode("utf-8"))
