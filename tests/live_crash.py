"""kill -9 of real vLLM extractions: the same invariants as `crash.py`, at the few points that real starts allow.

``python tests/live_crash.py --engines stock direct``; `nox -s live-crash` runs it. Each engine computes a set
undisturbed, then one that is killed ``--kills`` times with all its processes once some rows are on disk, once by
killing a worker alone, and once by killing the command alone, after which nothing may go on writing. The resumed set
must pass `verify` against transformers and equal the undisturbed one; a finished row must not be written again. Last, a
real file system (where one can be mounted) gets full under a run.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from pipeline_fixtures import write_model, write_weights

from pipeline import manifest
from pipeline.formats.registry import open_rows
from shims.guardian import below, identity

ROWS = 160
SECONDS = 300
Numbers = dict[int, tuple[object, ...]]
"""Row -> (states, token ids, loss mask)."""


def write_rows(path: Path) -> None:
    """Conversations of very different lengths."""
    choose = random.Random(2)
    with path.open("w") as handle:
        for number in range(ROWS):
            words = " ".join(choose.choices(["alpha", "beta", "gamma"], k=choose.randint(1, 60)))
            turns = [
                {"role": "user", "content": f"say {number}"},
                {"role": "assistant", "content": f"{number} {words}"},
            ]
            handle.write(json.dumps({"id": str(number), "messages": turns}) + "\n")


class Runs:
    """Extractions of one engine."""

    def __init__(self, root: Path, engine: str) -> None:
        self.root, self.engine = root, engine
        self.faults: list[str] = []

    def start(self, folder: Path, *more: object) -> subprocess.Popen[str]:
        """Begin an extraction in a process group of its own."""
        command = [
            sys.executable, "-m", "pipeline", "extract", "--model-path", self.root / "model", "--prepared-data",
            self.root / "prepared" / "tokenized_data.jsonl", "--output-dir", folder, "--engine", self.engine,
            "--dtype", "float32", "--batch-size", 4, "--gpu-memory-utilization", 0.3,
            *more,
        ]  # fmt: skip
        log = (self.root / f"{self.engine}.log").open("a")
        return subprocess.Popen(
            [str(part) for part in command], stdout=log, stderr=log, text=True, start_new_session=True
        )

    def finish(self, folder: Path, *more: object) -> None:
        """Run to the end."""
        if self.start(folder, *more).wait(SECONDS):
            self.faults.append("a resumed run failed: " + self.said(1500))

    def said(self, length: int) -> str:
        """The end of the log."""
        return (self.root / f"{self.engine}.log").read_text()[-length:]

    def killed(self, folder: Path, rows: int, whom: str = "all") -> dict[str, int]:
        """Kill a run once ``rows`` more rows are there: all of its processes, a worker, or the command alone.

        Returns:
            The files of finished rows, with the time of their last change.
        """
        before = len(files(folder))
        process = self.start(folder)
        ends = time.monotonic() + SECONDS
        while process.poll() is None and len(files(folder)) < before + rows and time.monotonic() < ends:
            time.sleep(0.01)
        if process.poll() is not None:
            self.faults.append(f"ended with {process.returncode} before it could be killed")
        elif whom == "command":
            engine = below(process.pid)
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
            ends = time.monotonic() + 20
            while any(map(identity, engine)) and time.monotonic() < ends:
                time.sleep(0.05)
            left = [_command(pid) for pid in engine if identity(pid)]
            if left:
                self.faults.append(f"the command was killed, and 20 s later there was still {left}")
        elif whom == "worker":
            os.kill(youngest_child(process.pid), signal.SIGKILL)
            code = process.wait(SECONDS)
            said = self.said(6000)
            if code != 1 or "wanted:" not in said or "finished rows are kept" not in said:
                self.faults.append(f"a killed worker: exit code {code}, and it said {said[-800:]}")
            print(f"{self.engine}: a killed worker is told as: {said.strip().splitlines()[-4:]}", flush=True)
        else:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        return {path.name: path.stat().st_mtime_ns for path in files(folder)}


def youngest_child(pid: int) -> int:
    """The last process below ``pid``: a worker, where the engine has some, else the engine's core."""
    return [pid, *(child for child in below(pid) if "resource_tracker" not in _command(child))][-1]


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


def files(folder: Path) -> list[Path]:
    """Finished rows."""
    return sorted((folder / "hidden_states").glob("hs_*.safetensors"))


def numbers(folder: Path) -> Numbers:
    """Every row's content."""
    store = open_rows(folder, manifest.require_rows(folder, "folder"))
    return {index: (store.read(index).states, *store.tokens(index)) for index in store.indices()}


def differences(
    found: dict[int, tuple[object, ...]], wanted: dict[int, tuple[object, ...]]
) -> tuple[list[int], int, float]:
    """Rows that are not there or have other ids, rows whose bits differ, and the largest relative difference."""
    import torch

    wrong = sorted(found.keys() ^ wanted.keys()) + [
        i for i in found.keys() & wanted.keys() if found[i][1:] != wanted[i][1:]
    ]
    bits, largest = 0, 0.0
    for index in found.keys() & wanted.keys():
        a, b = found[index][0], wanted[index][0]
        assert isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)
        if not torch.equal(a, b):
            bits += 1
            largest = max(largest, float((a - b).norm() / b.norm()))
    return wrong, bits, largest


def trial(root: Path, engine: str, kills: int) -> list[str]:
    """One engine under fire; returns what was wrong."""
    runs = Runs(root, engine)
    whole, folder = root / f"{engine}-whole", root / f"{engine}-killed"
    runs.finish(whole)
    choose = random.Random(engine)
    before: dict[str, int] = {}
    for whom in (*["all"] * kills, "worker", "command"):
        after = runs.killed(folder, choose.randint(3, 30), whom)
        again = [name for name, changed in before.items() if after.get(name) != changed]
        if again:
            runs.faults.append(f"written again: {again[:5]}")
        before = after
    runs.finish(folder)
    after = {path.name: path.stat().st_mtime_ns for path in files(folder)}
    runs.faults += [f"written again: {name}" for name, changed in before.items() if after.get(name) != changed][:5]
    verify = [sys.executable, "-m", "pipeline", "verify", str(folder), "--model", str(root / "model"), "--sample", "40"]
    done = subprocess.run(verify, capture_output=True, text=True)
    if done.returncode:
        runs.faults.append(f"verify: {done.stderr[-1000:]}")
    wrong, bits, largest = differences(numbers(folder), numbers(whole))
    if wrong or largest > 1e-5:
        runs.faults.append(
            f"rows {wrong[:5]} differ from the undisturbed run (largest relative difference {largest:.1e})"
        )
    fill(runs, numbers(whole), sum(path.stat().st_size for path in files(whole)))
    print(
        f"{engine}: {kills} kills of all processes, 1 of a worker, 1 of the command; {len(after)} rows, "
        f"{bits} with other last bits (largest relative difference {largest:.1e}); {runs.faults or 'nothing wrong'}",
        flush=True,
    )
    return runs.faults


def fill(runs: Runs, wanted: Numbers, size: int) -> None:
    """A file system with room for a third of the rows, then for all of them."""
    disk = runs.root / f"{runs.engine}-disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size // 3}", "none", str(disk)]
    if subprocess.run(mount, capture_output=True).returncode:
        print(f"{runs.engine}: no file system can be mounted here: a full disk was not tried", flush=True)
        return
    careless = ("--ignore-space", "--min-free-gib", 0)
    try:
        code = runs.start(disk / "states", *careless).wait(SECONDS)
        said = runs.said(2000)
        # Foreseen before a batch, or met by a write.
        told = any(words in said for words in ("left free (--min-free-gib)", "wanted: space on the disk"))
        if code != 1 or not told or "run the same command again" not in said:
            runs.faults.append(f"a full disk: exit code {code}, and it said {said[-800:]}")
        there = len(files(disk / "states"))
        subprocess.run(["mount", "-o", f"remount,size={2 * size}", str(disk)], check=True)
        runs.finish(disk / "states", *careless)
        wrong, _, largest = differences(numbers(disk / "states"), wanted)
        if wrong or largest > 1e-5:
            runs.faults.append(f"after a full disk, rows {wrong[:5]} differ (relative difference {largest:.1e})")
        print(f"{runs.engine}: the disk was full at {there} rows; {len(wanted)} with room again", flush=True)
    finally:
        subprocess.run(["umount", str(disk)], check=False)


def main() -> int:
    """Exit code 1 when something was wrong."""
    parser = argparse.ArgumentParser(description="Kill real vLLM extractions.")
    parser.add_argument("--engines", nargs="+", default=["stock", "direct"])
    parser.add_argument("--kills", type=int, default=3)
    options = parser.parse_args()
    faults: list[str] = []
    with tempfile.TemporaryDirectory(prefix="live-crash-") as name:
        root = Path(name)
        write_weights(write_model(root / "model", hidden=64))
        write_rows(root / "conversations.jsonl")
        prepare = ["prepare", "--model-path", root / "model", "--input", root / "conversations.jsonl"]
        prepare += ["--output-dir", root / "prepared"]
        subprocess.run([sys.executable, "-m", "pipeline", *map(str, prepare)], check=True)
        for engine in options.engines:
            faults += trial(root, engine, options.kills)
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
