"""A model whose weights, code or settings changed has another fingerprint; what is read of large files stays little."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline import weight_hash
from pipeline.model_info import read_model, sha256_file

MIB = 1 << 20
LARGE = weight_hash.WHOLE_BYTES + 40 * MIB
CONFIG = {"num_hidden_layers": 8, "hidden_size": 4, "vocab_size": 9}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def fingerprint(model: Path) -> str:
    return read_model(str(model)).fingerprint


def write_file(path: Path, header: bytes = b"", size: int = LARGE) -> int:
    """A sparse file that begins as a safetensors file; returns where its tensors begin."""
    with path.open("wb") as handle:
        handle.write(len(header).to_bytes(8, "little") + header)
        handle.truncate(size)
    return 8 + len(header)


def change(path: Path, at: int) -> None:
    """Another byte, under the same size and time."""
    before = path.stat()
    with path.open("r+b") as handle:
        handle.seek(at)
        byte = handle.read(1)
        handle.seek(at)
        handle.write(bytes([byte[0] ^ 1]))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def tensors(*starts: Any) -> bytes:
    return json.dumps({f"t{n}": {"data_offsets": [start, 0]} for n, start in enumerate(starts)}).encode()


def test_a_small_file_counts_whole(model: Path) -> None:
    path = model / "model.safetensors"
    write_file(path, size=5 * MIB)
    before = read_model(str(model))
    assert before.file_hashes[path.name] == sha256_file(path)
    change(path, 5 * MIB // 2)
    assert fingerprint(model) != before.fingerprint


@pytest.mark.parametrize(
    "place", [0, 100, MIB, 8 * MIB, 64 * MIB + 4095, LARGE - MIB, LARGE - 1, "tensor", "tensor's 4 KiB"]
)
def test_a_large_file_counts_at_its_ends_tensors_and_every_few_mib(model: Path, place: int | str) -> None:
    path, first = model / "model-1.safetensors", 21 * MIB + 12345
    base = write_file(path, tensors(0, first))
    before = fingerprint(model)
    at = base + first + (0 if place == "tensor" else 4095) if isinstance(place, str) else place
    change(path, at)
    assert fingerprint(model) != before
    change(path, at)
    assert fingerprint(model) == before


def test_a_large_files_size_counts(model: Path) -> None:
    write_file(model / "a.gguf")
    before = fingerprint(model)
    write_file(model / "a.gguf", size=LARGE + 1)
    assert fingerprint(model) != before


@pytest.mark.parametrize(
    "header",
    [
        b"", b"{", b"[" * 100_000, b"[]", b'{"a": 1, "b": {"data_offsets": []}}',
        tensors(-1, 1.5, None, True, "0", 10**30, LARGE),
    ],
)  # fmt: skip
def test_a_header_that_cannot_be_right_is_no_error_here(model: Path, header: bytes) -> None:
    path = model / "model.safetensors"
    write_file(path, header)
    assert fingerprint(model) == fingerprint(model)
    path.write_bytes((1 << 63).to_bytes(8, "little"))
    with path.open("r+b") as handle:
        handle.truncate(LARGE)
    assert fingerprint(model)


@pytest.mark.parametrize(
    "name",
    [
        "modeling_own.py", "hf_quant_config.json", "vocab.txt", "sentencepiece.bpe.model", "model.bin",
        "consolidated.pth", "weights.pt", "model.gguf", "pytorch_model.bin.index.json",
    ],
)  # fmt: skip
def test_every_file_that_reaches_the_states_counts(model: Path, name: str) -> None:
    without = fingerprint(model)
    (model / name).write_text("{}")
    one = fingerprint(model)
    (model / name).write_text("[]")
    assert len({without, one, fingerprint(model)}) == 3


def test_little_is_read_of_a_large_file_in_ascending_order(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, size = model / "model.safetensors", 1 << 33
    # Tensors whose samples touch are one read; a thousand more lie far from each other.
    apart = [n * 7_000_000 for n in range(1000)]
    write_file(path, tensors(*apart, *(apart[9] + n * 6000 for n in range(100))), size)
    reads: list[tuple[int, int]] = []
    read: Callable[[int, int, int], bytes] = os.pread
    monkeypatch.setattr(os, "pread", lambda fd, length, at: (reads.append((at, length)), read(fd, length, at))[1])
    monkeypatch.setattr(weight_hash, "_THREADS", 1)
    found = read_model(str(model)).fingerprint
    assert reads == sorted(reads) and len(reads) < 2100 and sum(length for _, length in reads) < 16 * MIB
    monkeypatch.setattr(weight_hash, "_THREADS", 16)
    assert fingerprint(model) == found
