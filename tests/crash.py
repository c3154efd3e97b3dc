"""kill -9 at random points of an extraction, again and again: nothing is lost, doubled, mixed up or computed twice.

``python tests/crash.py --points 210 --output result.json``; `nox -s crash` runs it.

What is real: the command line, prepare, the extraction loop, every format's files, a tiny Llama of random weights
computed by transformers, and SIGKILL. What is not: vLLM, which would have to be loaded some 300 times. Each run is
a fork of this process, so that torch is imported once.

A run is killed either by the parent after a random time, or by itself at a random line of the pipeline's code (which
reaches the few lines between two writes that a clock seldom hits). It is repeated until it ends by itself. Then
`verify` must pass, and every row must equal the undisturbed run's bit for bit.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline_fixtures import ReferenceEngine, write_model, write_weights

from pipeline import extract as extract_module
from pipeline import manifest
from pipeline.__main__ import main
from pipeline.formats import DamagedRow, Wanted
from pipeline.formats.registry import FORMATS, open_rows
from pipeline.prepared import PreparedFile

PIPELINE = str(Path(extract_module.__file__).parent)
ROWS = 300
ROWS_PER_FILE = 40
WRITING_MODULES = ("atomic.py", "stores.py", "shards.py", "run_history.py", "manifest.py", "sidecars.py", "writing.py")
WAYS = ("time", "any line", "a line of the writing modules")


def row_key(ids: Sequence[int]) -> str:
    """A name for a row that the engine can tell from its tokens."""
    return hashlib.sha256(json.dumps(list(ids)).encode()).hexdigest()[:16]


class LoggingEngine(ReferenceEngine):
    """Computes with transformers, and leaves a line for each row it was asked for."""

    log = Path()

    def states(self, rows: Sequence[Sequence[int]]) -> list[Any]:
        with self.log.open("a") as handle:
            handle.write("".join(f"{row_key(row)}\n" for row in rows))
        return super().states(rows)


@dataclass
class Line:
    """Counts the lines run in the pipeline's own files, and kills this process at one of them."""

    kill_at: int | None = None
    writing_only: bool = False
    """Count for ``kill_at`` only the lines of the modules that write."""
    counts: dict[bool, int] = field(default_factory=lambda: {True: 0, False: 0})
    """Lines run: of the modules that write, and of all."""

    def trace(self, frame: Any, event: str, _argument: Any) -> Any:
        name = frame.f_code.co_filename
        if not name.startswith(PIPELINE) or (self.writing_only and not name.endswith(WRITING_MODULES)):
            return None
        if event == "line":
            self.counts[False] += 1
            self.counts[True] += name.endswith(WRITING_MODULES)
            if self.counts[self.writing_only] == self.kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
        return self.trace


def run(arguments: Sequence[object], output: Path, before: Callable[[], None] = lambda: None) -> int:
    """Start the command line in a fork; returns its process id."""
    sys.stdout.flush()
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        before()
        main([str(argument) for argument in arguments])
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 0
    finally:
        sys.settrace(None)
        os._exit(code)


def wait(child: int) -> int | None:
    """Exit code; None when it was killed."""
    _, status = os.waitpid(child, 0)
    return None if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


@dataclass
class Place:
    """Model and data, made once."""

    root: Path
    log: Path = field(init=False)

    def __post_init__(self) -> None:
        self.model = write_model(self.root / "model", hidden=32)
        write_weights(self.model)
        self.log = self.root / "engine.log"
        LoggingEngine.log = self.log
        conversations = self.root / "conversations.jsonl"
        choose = random.Random(1)
        with conversations.open("w") as handle:
            for number in range(ROWS):
                words = " ".join(
                    choose.choice(["alpha", "beta", "gamma", "delta"]) for _ in range(choose.randint(1, 30))
                )
                turns = [
                    {"role": "user", "content": f"say {number}"},
                    {"role": "assistant", "content": f"{number}: {words}"},
                ]
                handle.write(json.dumps({"id": f"row-{number}", "messages": turns}) + "\n")
        prepared = self.root / "prepared"
        code = wait(
            run(["prepare", "--model-path", self.model, "--input", conversations, "--output-dir", prepared], self.said)
        )
        assert code == 0, self.said.read_text()
        self.data = prepared / "tokenized_data.jsonl"
        self.rows = PreparedFile(self.data, None)
        assert len(self.rows) == ROWS

    @property
    def said(self) -> Path:
        """What the runs printed."""
        return self.root / "said.txt"

    def arguments(self, form: str, folder: Path, *more: object) -> list[object]:
        """A command line of `extract`."""
        return [
            "extract", "--model-path", self.model, "--prepared-data", self.data, "--output-dir", folder,
            "--engine", "stock", "--dtype", "float32", "--batch-size", 4, "--format", form,
            "--rows-per-file", ROWS_PER_FILE, "--min-free-gib", 0, *more,
        ]  # fmt: skip

    def computed(self) -> list[str]:
        """Rows that the engine was asked for since the last call."""
        keys = self.log.read_text().split() if self.log.exists() else []
        self.log.unlink(missing_ok=True)
        return keys


@dataclass
class Outcome:
    """One format's trials."""

    format: str
    kills: dict[str, int] = field(default_factory=lambda: dict.fromkeys(WAYS, 0))
    """By what the moment was drawn from."""
    sets: int = 0
    """Data sets brought to their end after kills, each verified and compared."""
    rows_found_finished: int = 0
    rows_computed_again: int = 0
    faults: list[str] = field(default_factory=list)


def contents(folder: Path) -> dict[int, tuple[bytes, list[int], list[int] | None]]:
    """Every row's float content, ids and mask."""
    import torch

    record = manifest.require_rows(folder, "folder")
    store = open_rows(folder, record)
    found = {}
    for index in store.indices():
        row = store.read_stored(index)
        states = row.states.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        found[index] = (states, *store.tokens(index))
    return found


def finished(folder: Path) -> set[str]:
    """Rows that lie whole on disk, by their key."""
    if not (folder / manifest.FILE_NAME).exists():
        return set()
    store = open_rows(folder, manifest.require_rows(folder, "folder"))
    keys = set()
    for index in store.indices():
        try:
            store.check(index, Wanted(content=True))
            keys.add(row_key(store.tokens(index)[0]))
        except (DamagedRow, FileNotFoundError):
            continue
    return keys


@dataclass(frozen=True)
class Plan:
    """How one run ends."""

    way: str
    in_child: Callable[[], None]
    """Called in the run before it begins."""
    seconds: float | None
    """When it is killed from outside."""


class Trial:
    """One format under fire."""

    def __init__(self, place: Place, form: str, choose: random.Random, store_dtype: str = "auto") -> None:
        self._place, self._form, self._choose, self._more = place, form, choose, ("--store-dtype", store_dtype)
        self.outcome = Outcome(form if store_dtype == "auto" else f"{form} {store_dtype}")
        folder = self.folder("undisturbed")
        counts = place.root / "lines.json"

        def count_lines() -> None:
            line = Line()
            sys.settrace(line.trace)
            leave = os._exit

            def count_and_leave(code: int) -> None:
                counts.write_text(json.dumps([line.counts[False], line.counts[True]]))
                leave(code)

            os._exit = count_and_leave  # type: ignore[assignment]

        self.remove(folder)
        code = wait(run(place.arguments(form, folder, *self._more), place.said, count_lines))
        assert code == 0, place.said.read_text()[-2000:]
        self.lines = dict(zip((False, True), json.loads(counts.read_text()), strict=True))
        self.remove(folder)
        started = time.monotonic()
        assert wait(run(place.arguments(form, folder, *self._more), place.said)) == 0
        self.seconds = time.monotonic() - started
        self.wanted = contents(self.seen(folder))
        assert len(self.wanted) == ROWS
        self.remove(folder)
        place.computed()

    def folder(self, name: str) -> Path:
        """Where rows are written to."""
        return self._place.root / name

    def remove(self, folder: Path) -> None:
        """Begin anew."""
        shutil.rmtree(folder, ignore_errors=True)

    def seen(self, folder: Path) -> Path:
        """Where the rows can be read as files."""
        return folder

    def set_under_fire(self, kills: int, shards: int) -> None:
        """Begin a data set, kill its extraction ``kills`` times, let it end, and judge it."""
        folder = self.folder("states")
        self.remove(folder)
        for _ in range(kills):
            self._round(folder, shards, self._one_kill)
        self._round(folder, shards, lambda missing: Plan("none", lambda: None, None))
        self._judge(folder)

    def _one_kill(self, missing: float) -> Plan:
        """A kill at a random moment of a run that has this share of the rows to compute."""
        way = self._choose.choices(WAYS, weights=(40, 25, 35))[0]
        if way == "time":
            return Plan(way, lambda: None, self._choose.uniform(0, self.seconds * (0.2 + 0.8 * missing)))
        # A line behind the run's end kills nothing, and is not counted.
        only = way != "any line"
        line = Line(self._choose.randint(1, max(1, int(self.lines[only] * (0.1 + 0.9 * missing)))), only)
        return Plan(way, lambda: sys.settrace(line.trace), None)

    def _round(self, folder: Path, shards: int, plan: Callable[[float], Plan]) -> None:
        """Run all shards at once, each killed as planned; what was finished before must not be computed."""
        before = finished(self.seen(folder))
        self.outcome.rows_found_finished += len(before)
        children: list[tuple[int, Plan]] = []
        for number in range(1, shards + 1):
            planned = plan(1 - len(before) / ROWS)
            more = ("--shard", f"{number}/{shards}") if shards > 1 else ()
            arguments = self._place.arguments(self._form, folder, *self._more, *more)
            children.append((run(arguments, self._place.said, planned.in_child), planned))
        began = time.monotonic()
        for child, planned in sorted(children, key=lambda item: item[1].seconds or 0):
            if planned.seconds is not None:
                time.sleep(max(0.0, began + planned.seconds - time.monotonic()))
                os.kill(child, signal.SIGKILL)
            code = wait(child)
            if code is None:
                self.outcome.kills[planned.way] += 1
            elif code != 0:
                self.outcome.faults.append(f"exit code {code}: {self._place.said.read_text()[-1500:]}")
        self.outcome.rows_computed_again += len(before & set(self._place.computed()))

    def _judge(self, folder: Path) -> None:
        self.outcome.sets += 1
        code = wait(run(["verify", folder, "--prepared-data", self._place.data], self._place.said))
        if code != 0:
            self.outcome.faults.append(f"verify: exit code {code}: {self._place.said.read_text()[-1500:]}")
            return
        seen = self.seen(folder)
        found = contents(seen)
        if found != self.wanted:
            rows = [index for index in self.wanted if found.get(index) != self.wanted[index]]
            self.outcome.faults.append(f"rows {rows[:10]} differ from the undisturbed run")
        left = [path.name for path in seen.rglob("*") if ".tmp-" in path.name or path.name.endswith(".part")]
        if left:
            self.outcome.faults.append(f"left behind: {left[:5]}")


def trials(place: Place, points: int, seed: int, only: Sequence[str]) -> list[Outcome]:
    """Every format until it has taken its share of ``points`` kills; those named in ``only``, if any are."""
    forms = [(name, "auto") for name in FORMATS] + [("hs_safetensors", "float8_e4m3"), ("sharded", "float8_e4m3")]
    share = -(-points // len(forms))
    outcomes = []
    for form, store_dtype in forms:
        if only and form not in only:
            continue
        choose = random.Random(f"{form} {store_dtype} {seed}")
        trial = Trial(place, form, choose, store_dtype)
        number = 0
        while sum(trial.outcome.kills.values()) < share:
            shards = 2 if number % 4 == 3 else 1
            trial.set_under_fire(choose.randint(2, 6), shards)
            number += 1
        outcomes.append(trial.outcome)
        print(json.dumps(vars(trial.outcome)), flush=True)
    return outcomes


def cli() -> int:
    """Run the trials; exit code 1 when anything was found."""
    import torch

    parser = argparse.ArgumentParser(description="Kill extractions at random points.")
    parser.add_argument("--points", type=int, default=210)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="*", default=[], help="formats; their share of the points stays the same")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    # Forks must not inherit a pool of threads that only the parent has.
    torch.set_num_threads(1)
    extract_module.open_engine = lambda name, engine_options: LoggingEngine(engine_options)
    with tempfile.TemporaryDirectory(prefix="crash-") as root:
        outcomes = trials(Place(Path(root)), options.points, options.seed, options.only)
    total = sum(sum(outcome.kills.values()) for outcome in outcomes)
    bad = [outcome.format for outcome in outcomes if outcome.faults or outcome.rows_computed_again]
    print(f"{total} kills, {sum(o.sets for o in outcomes)} sets verified and compared; wrong: {bad or 'none'}")
    if options.output:
        options.output.write_text(json.dumps([vars(outcome) for outcome in outcomes], indent=2) + "\n")
    return int(bool(bad) or (total < options.points and not options.only))


if __name__ == "__main__":
    sys.exit(cli())
