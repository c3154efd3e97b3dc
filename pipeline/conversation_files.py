"""Where conversations come from: JSON lines, Parquet, or a data set that the datasets library saved."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.conversations import Conversation, conversation_of, load_object, numbered_lines
from pipeline.model_info import sha256_file
from shims.errors import UsageError

_PARQUET_MAGIC = b"PAR1"
_ROWS_AT_ONCE = 256


@dataclass(frozen=True)
class RawRow:
    """One row as it lies in its file, not looked at yet."""

    where: str
    """File and place, for messages."""
    number: int
    """Its place in the file, from 1; its id where it has none."""
    content: str | Mapping[str, Any]

    def parse(self, answered: bool = True) -> Conversation:
        """The conversation in it.

        Args:
            answered: whether it needs a message of the assistant.

        Raises:
            RowFault: there is none.
        """
        row = load_object(self.content) if isinstance(self.content, str) else self.content
        return conversation_of(row, str(self.number), answered)


class ConversationFiles:
    """All rows of ``--input``, in order."""

    def __init__(self, path: Path, split: str | None = None) -> None:
        """Find out what ``path`` is.

        Args:
            path: a file of JSON lines or Parquet, a folder of such files, or a saved data set.
            split: which part of a saved data set of several.

        Raises:
            UsageError: nothing of the kind, or a split that is not there.
        """
        self.path, self._split = path, split
        self._saved = path.is_dir() and any((path / n).is_file() for n in ("state.json", "dataset_dict.json"))
        if self._saved:
            self._files = []
        elif path.is_dir():
            self._files = sorted(file for file in path.iterdir() if file.suffix in (".jsonl", ".parquet"))
        else:
            self._files = [path] if path.is_file() else []
        if not self._files and not self._saved:
            raise UsageError(
                f"--input {path}",
                "a file of JSON lines or Parquet, a folder of such files, or a saved Hugging Face data set",
                _kind(path),
                "check the path",
            )
        if split is not None and not (path / "dataset_dict.json").is_file():
            raise UsageError("--split", "a saved data set of several splits", _kind(path), "leave the option out")

    def fingerprint(self) -> str:
        """sha256 over the content of all files."""
        if len(self._files) == 1:
            return sha256_file(self._files[0])
        files = self._files or sorted(file for file in self.path.rglob("*") if file.is_file())
        digest = hashlib.sha256(str(self._split).encode())
        for file in files:
            digest.update(f"{file.relative_to(self.path)} {sha256_file(file)}\n".encode())
        return digest.hexdigest()

    def rows(self) -> Iterator[RawRow]:
        """Every row.

        Raises:
            UsageError: a file cannot be read, or there is no such split.
        """
        if self._saved:
            yield from self._saved_rows()
        for file in self._files:
            yield from _parquet_rows(file) if _is_parquet(file) else _json_rows(file)

    def _saved_rows(self) -> Iterator[RawRow]:
        import datasets

        try:
            loaded: Any = datasets.load_from_disk(str(self.path))
        except Exception as error:
            raise UsageError(
                f"--input {self.path}", "a saved data set", f"{type(error).__name__}: {error}", "save it again"
            ) from error
        where = str(self.path)
        if isinstance(loaded, datasets.DatasetDict):
            if self._split not in loaded and not (self._split is None and len(loaded) == 1):
                raise UsageError("--split", " or ".join(sorted(loaded)), repr(self._split), "name the split to prepare")
            name = self._split or next(iter(loaded))
            loaded, where = loaded[name], f"{where}, {name}"
        for number, row in enumerate(loaded.with_format(None), start=1):
            yield RawRow(f"{where}, row {number}", number, row)


def _json_rows(file: Path) -> Iterator[RawRow]:
    for number, text in numbered_lines(file):
        yield RawRow(f"{file}:{number}", number, text)


def _parquet_rows(file: Path) -> Iterator[RawRow]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as error:
        raise UsageError(
            f"--input {file}", "pyarrow, which reads Parquet", str(error), "pip install pyarrow"
        ) from error
    number = 0
    try:
        for batch in parquet.ParquetFile(file).iter_batches(_ROWS_AT_ONCE):
            for row in batch.to_pylist():
                number += 1
                yield RawRow(f"{file}, row {number}", number, row)
    except (ArrowException, OSError, ValueError) as error:
        raise UsageError(
            f"--input {file}, after row {number}",
            "a readable Parquet file",
            f"{type(error).__name__}: {error}",
            "copy it again",
        ) from error


def _is_parquet(file: Path) -> bool:
    with file.open("rb") as handle:
        return handle.read(4) == _PARQUET_MAGIC


def _kind(path: Path) -> str:
    if path.is_dir():
        return "a folder without .jsonl or .parquet files"
    if path.is_file():
        return "a file"
    return "not a regular file" if path.exists() else "no such file"
