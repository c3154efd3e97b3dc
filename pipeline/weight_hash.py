"""Hashes of a model's weight files: whole while they are small, samples of larger ones.

A change within one tensor has to be seen, and a terabyte on network storage must not be read: of a large file count
its size, its header, both ends, the start of every tensor, and a sample every few MiB.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.at_once import answers

WHOLE_BYTES = 64 << 20
"""Up to this size a file counts whole."""
_EDGE, _SAMPLE, _STRIDE = 1 << 20, 4 << 10, 8 << 20
_HEADER_LIMIT = 100_000_000
"""The longest header that safetensors reads."""
_SPANS_AT_ONCE = 256
"""Reads of one task: one huge file is shared out among the threads as many files are."""
_THREADS = 16

Span = tuple[int, int]
"""First byte, and the one behind the last."""


@dataclass(frozen=True)
class _Reading:
    """What is read of a file, in tasks."""

    path: Path
    size: int
    tasks: Sequence[Sequence[Span]]


def weight_hashes(files: Sequence[Path]) -> dict[str, str]:
    """sha256 by file name: of a file's bytes, or of its samples where it is large."""
    readings = list(answers(_reading, files, _THREADS))
    tasks = [(reading.path, spans) for reading in readings for spans in reading.tasks]
    digests = answers(lambda task: _digest(*task), tasks, _THREADS)
    return {reading.path.name: _joined(reading, [next(digests) for _ in reading.tasks]) for reading in readings}


def _joined(reading: _Reading, digests: Sequence[str]) -> str:
    if reading.size <= WHOLE_BYTES:
        return digests[0]
    return hashlib.sha256("\n".join([str(reading.size), *digests]).encode()).hexdigest()


def _reading(path: Path) -> _Reading:
    size = path.stat().st_size
    if size <= WHOLE_BYTES:
        return _Reading(path, size, [[(0, size)]])
    spans = _without_gaps(_sampled(path, size))
    parts = [spans[first : first + _SPANS_AT_ONCE] for first in range(0, len(spans), _SPANS_AT_ONCE)]
    return _Reading(path, size, parts)


def _sampled(path: Path, size: int) -> list[Span]:
    """The parts of a large file that count, ascending; they may overlap."""
    header, tensors = _header(path, size) if path.suffix == ".safetensors" else (0, [])
    samples = [*range(0, size, _STRIDE), *tensors]
    spans = [(0, header + _EDGE), (size - _EDGE, size), *((start, start + _SAMPLE) for start in samples)]
    return sorted((start, min(end, size)) for start, end in spans)


def _header(path: Path, size: int) -> tuple[int, list[int]]:
    """Where a safetensors header ends, and where the tensors begin that it names.

    One that cannot be read names none: it still counts as bytes, and whoever loads it will say what is wrong.
    """
    with path.open("rb") as handle:
        length = struct.unpack("<Q", handle.read(8))[0]
        if length > min(_HEADER_LIMIT, size - 8):
            return 8, []
        content = handle.read(length)
    end = 8 + length
    try:
        entries = json.loads(content)
    except (ValueError, RecursionError):
        return end, []
    if not isinstance(entries, dict):
        return end, []
    starts = (_start(entry) for entry in entries.values())
    return end, [end + start for start in starts if start is not None and start < size - end]


def _start(entry: object) -> int | None:
    """Where a header's entry says that its tensor begins; None where it says nothing that can be."""
    offsets = entry.get("data_offsets") if isinstance(entry, dict) else None
    first = offsets[0] if isinstance(offsets, list) and offsets else None
    return first if type(first) is int and first >= 0 else None


def _without_gaps(spans: Sequence[Span]) -> list[Span]:
    """Spans in ascending order, joined where they overlap or lie closer than one more read would be worth."""
    joined: list[Span] = []
    for start, end in spans:
        if joined and start - joined[-1][1] < _SAMPLE:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return joined


def _digest(path: Path, spans: Sequence[Span]) -> str:
    """sha256 over parts of a file."""
    digest = hashlib.sha256()
    descriptor = os.open(path, os.O_RDONLY)
    try:
        # Reading ahead would fetch what is left out here on purpose.
        if len(spans) > 1 and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
        for start, end in spans:
            for part in _parts(descriptor, start, end):
                digest.update(part)
    finally:
        os.close(descriptor)
    return digest.hexdigest()


def _parts(descriptor: int, start: int, end: int) -> Iterator[bytes]:
    """A span's bytes, piece by piece; fewer where the file has become shorter."""
    while start < end and (part := os.pread(descriptor, min(_EDGE, end - start), start)):
        yield part
        start += len(part)
