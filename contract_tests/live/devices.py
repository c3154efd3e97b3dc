"""`specshim extract --tp-size N` beside `--tp-size 1`: the same states, one writer, and a killed rank.

    python -m contract_tests.live.devices --tp-size 2 [--models qwen3,kimi-int4] [--dtype bfloat16] [--out FILE]

Each model is extracted on one device, then on N; then again on N, with the worker of rank 1 killed among the rows, and
resumed. How much of a difference is rounding is measured too: one device beside itself, with other rows in its steps.
Exit code 1 where a row differs by more than rounding does, where another process than the one writer had a row's file
open (rank 0 of the direct engine; the command itself with the others), or where a killed run does not end within 30 s
and say why.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.run import device
from contract_tests.live.models import CONTEXT, VOCABULARY, make
from contract_tests.live.run import SETTINGS, on_gpu
from pipeline import manifest
from pipeline.formats.registry import open_rows
from pipeline.prepared import DATA_NAME
from shims.guardian import below

ENDS_WITHIN = 30  # seconds
_LIMIT = 400
_BATCH, _OTHER_BATCH = 64, 3  # rows
# Of the process that may write rows.
_WRITER = {"direct": "Worker_TP0", "stock": "-m pipeline extract", "native": "-m pipeline extract"}


def write_rows(path: Path, count: int, lengths: Sequence[int] = (4, 30, 60, 200, CONTEXT - 8)) -> None:
    """Prepared rows of random tokens, each of one of these lengths."""
    choose = random.Random(9)
    with path.open("w", encoding="utf-8") as handle:
        for number in range(count):
            ids = choose.choices(range(2, VOCABULARY), k=choose.choice(lengths))
            handle.write(json.dumps({"id": str(number), "input_ids": ids, "loss_mask": [1] * len(ids)}) + "\n")


@dataclass
class Watched:
    """A run of `extract` and what was seen of it."""

    process: subprocess.Popen[str]
    folder: Path
    log: Path
    writers: set[str] = field(default_factory=set)
    """Titles of the processes that had a file of the folder's rows open for writing."""

    def look(self) -> None:
        """Note who is writing now."""
        for pid in (self.process.pid, *below(self.process.pid)):
            try:
                for link in Path(f"/proc/{pid}/fd").iterdir():
                    if str(self.folder / "hidden_states") in str(link.readlink()):
                        self.writers.add(title(pid))
            except OSError:  # ended meanwhile
                continue

    def rows(self) -> int:
        """Finished ones."""
        return len(list((self.folder / "hidden_states").glob("hs_*.safetensors")))


def title(pid: int) -> str:
    """What a process calls itself."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(encoding="utf-8").replace("\0", " ").strip()
    except OSError:
        return ""


class Trial:
    """One model."""

    def __init__(self, name: str, root: Path, options: argparse.Namespace) -> None:
        self.name, self.root, self.options = name, root, options
        self.setting = next(s for s in SETTINGS if s.model == name and not s.name)
        self.dtype = self.setting.dtype(options.dtype)
        self.model = make(name, root)
        self.data = root / f"{name}-{DATA_NAME}"
        write_rows(self.data, options.rows)
        self.faults: list[str] = []

    def start(self, folder: Path, devices: int, batch: int = _BATCH) -> Watched:
        """Begin an extraction."""
        layers = [part for number in sorted(set(self.setting.layer_ids)) for part in ("--layer-ids", str(number))]
        command = [
            sys.executable, "-m", "pipeline", "extract", "--engine", self.options.engine, "--model-path", self.model,
            "--prepared-data", self.data, "--output-dir", folder, "--tp-size", devices, "--dtype", self.dtype,
            "--max-seq-len", CONTEXT - 4, "--batch-size", batch, *layers,
            "--gpu-memory-utilization", self.options.gpu_memory_utilization,
            *(["--trust-remote-code"] if self.name.startswith("kimi") else []),
        ]  # fmt: skip
        log = folder.with_suffix(".log")
        with log.open("a", encoding="utf-8") as said:
            process = subprocess.Popen(
                [str(part) for part in command],
                stdout=said, stderr=said, text=True, env=os.environ | self.setting.environment,
            )  # fmt: skip
        return Watched(process, folder, log)

    def finish(self, folder: Path, devices: int, batch: int = _BATCH) -> Watched:
        """Run to the end, watching."""
        run, ends = self.start(folder, devices, batch), time.monotonic() + _LIMIT
        while run.process.poll() is None and time.monotonic() < ends:
            run.look()
            time.sleep(0.005)
        if run.process.poll() != 0:
            run.process.kill()
            raise RuntimeError(f"{folder.name}: exit code {run.process.poll()}: {run.log.read_text()[-2000:]}")
        return run

    def kill(self, folder: Path, devices: int, rank: int) -> dict[str, Any]:
        """Kill the worker of a rank among the rows."""
        run, ends = self.start(folder, devices), time.monotonic() + _LIMIT
        wanted = max(1, self.options.rows // 10)
        victims: list[int] = []
        while run.process.poll() is None and run.rows() < wanted and time.monotonic() < ends:
            # Looked for before the rows come: a fast model has written them all before /proc is read.
            victims = victims or [pid for pid in below(run.process.pid) if f"Worker_TP{rank}" in title(pid)]
            time.sleep(0.002)
        if run.process.poll() is not None or not victims:
            self.faults.append(f"no worker of rank {rank} to kill (exit code {run.process.poll()})")
            run.process.kill()
            return {}
        os.kill(victims[0], signal.SIGKILL)
        killed = time.monotonic()
        try:
            code = run.process.wait(4 * ENDS_WITHIN)
        except subprocess.TimeoutExpired:
            run.process.kill()
            code = None
        seconds, said = time.monotonic() - killed, run.log.read_text(encoding="utf-8")
        lines = [line.strip() for line in said.splitlines()]
        named = next((before for before, line in itertools.pairwise(lines) if line == "wanted: to stay alive"), "")
        if seconds > ENDS_WITHIN or code != 1 or str(victims[0]) not in named:
            self.faults.append(f"after the kill: exit code {code} in {seconds:.0f} s, and it said {said[-800:]}")
        return {"ended_after": round(seconds, 1), "rows_kept": run.rows(), "named": named}

    def compare(self, one: Path, other: Path) -> dict[str, float]:
        """Relative differences of the same rows, and of most of their tokens."""
        stores = [open_rows(folder, manifest.require_rows(folder, "folder")) for folder in (one, other)]
        indices = stores[0].indices()
        if indices != stores[1].indices() or len(indices) != self.options.rows:
            self.faults.append(f"{other.name} has other rows than {one.name}")
        errors, of_tokens = [], []
        for index in indices:
            a, b = (store.read(index).states.float() for store in stores)
            if stores[0].tokens(index) != stores[1].tokens(index):
                self.faults.append(f"row {index} has other tokens")
            errors.append(float((a - b).norm() / a.norm()))
            of_tokens += ((a - b).norm(dim=-1) / a.norm(dim=-1)).flatten().tolist()
        errors.sort()
        limit = self.setting.tolerance(self.dtype)
        if errors[-1] > limit:
            self.faults.append(f"{other.name} differs from {one.name} by {errors[-1]:.1e} (limit {limit:g})")
        middle, rounding = statistics.median(of_tokens), self.setting.rounding(self.dtype)
        if middle > rounding:
            self.faults.append(f"half the tokens of {other.name} are off by {middle:.1e} (limit {rounding:g})")
        found = {"median_token": middle, "median_row": statistics.median(errors), "worst_row": errors[-1]}
        return {name: float(f"{value:.2e}") for name, value in found.items()} | {"limit": limit}

    def run(self) -> dict[str, Any]:
        """All of it; faults are kept beside what was seen."""
        devices = self.options.tp_size
        single, other, split, killed = (
            self.root / f"{self.name}-{what}" for what in ("single", "other", "split", "killed")
        )
        engine = self.options.engine
        seen: dict[str, Any] = {"engine": engine, "model": self.name, "dtype": self.dtype, "rows": self.options.rows}
        try:
            self.finish(single, 1)
            self.finish(other, 1, _OTHER_BATCH)
            seen["one_device_beside_itself"] = self.compare(single, other)
            writers = self.finish(split, devices).writers
            seen["writers"] = sorted(writers)
            # The command writes a row in less time than passes between two looks; a stranger would be seen sometimes.
            if any(_WRITER[engine] not in writer for writer in writers) or (engine == "direct" and len(writers) != 1):
                self.faults.append(f"rows were written by {sorted(writers) or 'nobody that was seen'}")
            seen["difference"] = self.compare(single, split)
            seen["killed"] = self.kill(killed, devices, rank=1)
            self.finish(killed, devices)
            seen["after_resume"] = self.compare(single, killed)
        except Exception as error:  # noqa: BLE001 - whatever fails here is a result
            self.faults.append(f"{type(error).__name__}: {error}")
        return {**seen, "faults": self.faults}


def main() -> int:
    """See the module's docstring."""
    import shims

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tp-size", type=int, default=2)
    parser.add_argument("--models", default="qwen3")
    parser.add_argument("--dtype", default="bfloat16" if on_gpu() else "float32")
    parser.add_argument("--engine", default="direct", choices=list(_WRITER))
    parser.add_argument("--rows", type=int, default=1000)
    parser.add_argument(
        "--gpu-memory-utilization", type=float, default=0.5 if on_gpu() else 0.1, help="share of each device for vLLM"
    )
    parser.add_argument("--folder", type=Path, help="where models and states are kept (default: nowhere)")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    found = []
    with tempfile.TemporaryDirectory(prefix="specshim-devices-") as scratch:
        root = options.folder or Path(scratch)
        root.mkdir(parents=True, exist_ok=True)
        for name in options.models.split(","):
            found.append(Trial(name, root, options).run())
            print(json.dumps(found[-1], indent=1), flush=True)
            if options.out:
                stack = shims.report().as_dict()["stack"]
                data = {"device": device(), "date": datetime.date.today().isoformat(), "stack": stack}
                data |= {"tp_size": options.tp_size, "models": found}
                options.out.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    return int(any(one["faults"] for one in found))


if __name__ == "__main__":
    sys.exit(main())
