"""Damaged files to every reader: each is refused in words or read as what it was; nothing crashes, nothing is run.

``python tests/mutants.py --count 10000``; `nox -s mutate-files` runs it, and the tests a few hundred of each.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import pickle
import random
import resource
import sys
import tempfile
import warnings
import zipfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pipeline_fixtures import write_conversations

from pipeline import manifest
from pipeline.conversation_files import ConversationFiles
from pipeline.conversations import RowFault
from pipeline.formats import DamagedRow, StateRow, Wanted
from pipeline.formats.registry import get_format
from pipeline.formats.stores import Claim
from pipeline.model_info import sha256_file
from pipeline.prepared import PreparedFile
from pipeline.vocab import load_frequency, load_mapping, mapping_arrays
from shims.errors import UsageError

MEMORY = 1 << 30
"""Bytes by which this process may grow; files of a few kB have no use for more."""
FORBIDDEN = ("os.system", "os.exec", "os.posix_spawn", "os.fork", "subprocess.Popen", "os.mkdir", "socket.connect")
"""Audit events that no reader of data has a reason for (Python's list: docs.python.org/3/library/audit_events.html)."""


@dataclass(frozen=True)
class Reader:
    """One way that bytes of unknown origin come in."""

    path: Path
    """The file that is mutated."""
    read: Callable[[], Any]
    """Reads it; what it returns is compared with what the whole file gives."""
    vouched: bool
    """Content is tied to a hash: damage must be refused, not read as something else."""
    pickles: bool = False
    """The file holds a pickle, so some mutants hold one that would run something."""


def readers(folder: Path) -> dict[str, Reader]:
    """Every reader of files, each with a whole one."""
    found: dict[str, Reader] = {}
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(6, 4, 8, generator=generator)
    row = StateRow(states, torch.arange(6), torch.ones(6, dtype=torch.int64), "row")
    for name in ("hs_safetensors", "sharded", "speculators-0.4", "specforge"):
        store = get_format(name).open(folder / name, 2)
        store.begin(Claim(2))
        for index in range(2):
            store.write(index, row, {"row": str(index)})
        store.close()
        found[name] = Reader(
            store.locate(0), lambda name=name: _read_row(folder / name, name), True, name.startswith("spec")
        )
    (folder / "vocab").mkdir()
    model = {"path": "m", "fingerprint": "f" * 64, "num_layers": 8, "hidden_size": 4, "vocab_size": 9}
    record = {"model": model, "draft_vocab_size": 3, "outputs": {}}
    for name, array in zip(("d2t-3.npy", "t2d-3.npy"), mapping_arrays([1, 4, 6], 9), strict=True):
        np.save(folder / "vocab" / name, array)
        record["outputs"][name] = sha256_file(folder / "vocab" / name)
    manifest.write(folder / "vocab", manifest.compose("vocab", **record), "vocab-3.json")

    def mapping() -> Any:
        # The hash is set right, so that the reader of the array itself is what is tried.
        path = folder / "vocab" / "vocab-3.json"
        changed = json.loads(path.read_text())
        changed["outputs"]["d2t-3.npy"] = sha256_file(folder / "vocab" / "d2t-3.npy")
        path.write_text(json.dumps(changed))
        return [array.tolist() for array in load_mapping(folder / "vocab")]

    found["d2t.npy"] = Reader(folder / "vocab" / "d2t-3.npy", mapping, False)
    torch.save({1: 2, 30: 4}, folder / "token_freq.pt")
    found["token_freq.pt"] = Reader(
        folder / "token_freq.pt", lambda: load_frequency(folder / "token_freq.pt"), False, True
    )
    lines = [json.dumps({"id": str(n), "input_ids": [n, 1, 2], "loss_mask": [0, 1, 1]}) for n in range(4)]
    (folder / "tokenized.jsonl").write_text("\n".join(lines) + "\n")
    found["tokenized_data.jsonl"] = Reader(
        folder / "tokenized.jsonl", lambda: list(PreparedFile(folder / "tokenized.jsonl", 100).lengths), False
    )
    conversations = write_conversations(folder / "conversations.jsonl", count=3)
    found["conversations.jsonl"] = Reader(
        conversations, lambda: [raw.parse() for raw in ConversationFiles(conversations).rows()], False
    )
    parquet = folder / "conversations.parquet"
    _write_parquet(conversations, parquet)
    found["conversations.parquet"] = Reader(
        parquet, lambda: [raw.parse() for raw in ConversationFiles(parquet).rows()], False
    )
    layers = {"ids": [1], "convention": "after", "native": [2]}
    extract = {"model": model, "layers": layers, "dtype": "float32", "row_limit": 1, "inputs": {}, "complete": True}
    (folder / "states").mkdir()
    manifest.write(folder / "states", manifest.compose("extract", **extract))
    found["manifest.json"] = Reader(
        folder / "states" / "manifest.json", lambda: manifest.require_rows(folder / "states", "folder"), False
    )
    return found


def _write_parquet(conversations: Path, target: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    rows = [raw.parse() for raw in ConversationFiles(conversations).rows()]
    table = pyarrow.table({"id": [row.row_id for row in rows], "messages": [list(row.messages) for row in rows]})
    parquet.write_table(table, target)


def _read_row(folder: Path, name: str) -> Any:
    store = get_format(name).open(folder, 2)
    if 0 not in store.indices():
        raise FileNotFoundError
    store.tokens(0)
    row = store.read(0)
    store.check(0, Wanted(4, 8, "float32", {"row": "0"}, content=True))
    return row.states.tolist(), row.token_ids.tolist(), row.loss_mask.tolist(), row.row_id


class Payload:
    """Pickled, it makes a folder when it is read."""

    def __init__(self, trace: Path) -> None:
        self._trace = trace

    def __reduce__(self) -> tuple[Any, tuple[str, ...]]:
        return os.mkdir, (str(self._trace),)


def mutant(whole: bytes, choose: random.Random, payload: Path | None) -> bytes:
    """A damaged copy."""
    content = bytearray(whole)
    at = choose.randrange(len(content))
    kind = choose.randrange(9 if payload else 8)
    if kind == 0:
        content[at] ^= 1 << choose.randrange(8)
    elif kind == 1:
        for _ in range(choose.randint(2, 20)):
            content[choose.randrange(len(content))] = choose.randrange(256)
    elif kind == 2:
        del content[at:]
    elif kind == 3:
        del content[at : at + choose.randint(1, 64)]
    elif kind == 4:
        content[at:at] = choose.randbytes(choose.randint(1, 64))
    elif kind == 5:
        content[at : at + 8] = choose.choice([b"\xff" * 8, b"\0" * 8, b"\xff" * 7 + b"\x7f", b"99999999"])
    elif kind == 6:
        other = choose.randrange(len(content))
        content[at : at + 64] = content[other : other + 64]
    elif kind == 7:
        # Among the first bytes, where lengths and magic numbers are.
        content[choose.randrange(min(64, len(content)))] = choose.randrange(256)
    else:
        return _with_payload(whole, choose, payload)
    return bytes(content)


def _with_payload(whole: bytes, choose: random.Random, payload: Path | None) -> bytes:
    """The same container with a pickle that runs something, or that pickle alone."""
    assert payload is not None
    evil = pickle.dumps({"input_ids": Payload(payload)}, protocol=choose.randint(0, 5))
    if choose.random() < 0.3:
        return evil
    source, target = zipfile.ZipFile(io.BytesIO(whole)), io.BytesIO()
    with zipfile.ZipFile(target, "w", zipfile.ZIP_STORED) as packed:
        for name in source.namelist():
            packed.writestr(name, evil if name.endswith("data.pkl") else source.read(name))
    return target.getvalue()


def attack(name: str, reader: Reader, count: int, seed: int, folder: Path) -> tuple[Counter[str], list[str]]:
    """Feed ``count`` mutants to one reader.

    Returns:
        How many were refused, read as before, or read as something else; and what must not happen.
    """
    choose = random.Random(f"{name} {seed}")
    whole, wanted = reader.path.read_bytes(), reader.read()
    trace = folder / "trace"
    outcomes: Counter[str] = Counter()
    faults: list[str] = []
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    watch = _Watch.installed()
    for number in range(count):
        reader.path.write_bytes(mutant(whole, choose, trace if reader.pickles else None))
        try:
            with watch:
                found = reader.read()
        except (DamagedRow, UsageError, RowFault, FileNotFoundError) as refusal:
            outcomes["refused"] += 1
            if not str(refusal) and not isinstance(refusal, FileNotFoundError):
                faults.append(f"{name} {number}: refused without a word")
        except BaseException as error:  # a reader must not fail in another way
            faults.append(f"{name} {number}: {type(error).__name__}: {error}")
        else:
            outcomes["as before" if found == wanted else "as something else"] += 1
            if found != wanted and reader.vouched:
                faults.append(f"{name} {number}: read as something else, though its hash was checked")
        faults += [f"{name} {number}: {event}" for event in watch.taken()]
        if trace.exists():
            faults.append(f"{name} {number}: the payload was run")
            trace.rmdir()
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    if grown > MEMORY:
        faults.append(f"{name}: memory grew by {grown >> 20} MiB")
    reader.path.write_bytes(whole)
    return outcomes, faults


class _Watch:
    """Notes audit events of running or reaching something while a reader works."""

    _only: _Watch | None = None

    def __init__(self) -> None:
        self._active = False
        self._events: list[str] = []
        sys.addaudithook(self._hook)

    @classmethod
    def installed(cls) -> _Watch:
        # A hook stays for the life of the process.
        cls._only = cls._only or cls()
        return cls._only

    def _hook(self, event: str, _arguments: Any) -> None:
        if self._active and event in FORBIDDEN:
            self._events.append(event)

    def __enter__(self) -> None:
        self._active = True

    def __exit__(self, *_: object) -> None:
        self._active = False

    def taken(self) -> list[str]:
        events, self._events = self._events, []
        return events


def main() -> int:
    """Attack every reader; exit code 1 when something happened that must not."""
    parser = argparse.ArgumentParser(description="Feed damaged files to every reader.")
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    warnings.simplefilter("ignore")  # torch tells at length what it refuses
    torch.set_num_threads(1)
    bad = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for reader_name, reader in readers(folder).items():
            outcomes, faults = attack(reader_name, reader, options.count, options.seed, folder)
            print(f"{reader_name}: {dict(outcomes)}", flush=True)
            for fault in faults[:10]:
                print(f"  WRONG {fault}", flush=True)
            bad += len(faults)
    print(f"{bad} wrong")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
