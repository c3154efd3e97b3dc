"""Replicas of real vLLM on Ray: killed, resized, compared with one engine; and the simulation held against the clock.

``python tests/live_scale.py``; `nox -s live-scale` runs it. On two cores, a tiny Llama and 2,000 rows:

1. one engine, without Ray: the set that the others must equal;
2. two replicas, undisturbed;
3. two replicas, of which one is killed at random moments, three times;
4. two replicas, killed with their command; then one, stopped; then two to the end.

A finished row's file must never be written again. What a replica and its start take is measured in run 2 and 3, and
the simulation is then asked how long the runs should have taken.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any

from live_crash import differences, files, numbers
from pipeline_fixtures import write_model, write_weights

from pipeline import manifest
from pipeline.config import ExtractConfig
from pipeline.extract import extract
from pipeline.prepared import PreparedFile
from pipeline.scale.simulation import Setup, simulate
from shims import guardian
from shims.guardian import identity

SECONDS = 420
AGREE = 0.20
ENGINE = ("VLLM", "ray::Replica", "pipeline", "multiprocessing")
"""In the command lines of what computes."""
WORDS = ["alpha", "beta", "gamma", "delta"]


@dataclass
class Measured:
    """A run of replicas, times in seconds since the first of them was ready."""

    seconds: float
    restarts: int
    computed: int
    kept: int
    lives: list[dict[str, Any]] = field(default_factory=list)


def measure(config: Path, out: Path) -> None:
    """Run an extraction in this process, and leave what it took."""
    settings = json.loads(config.read_text())
    result = extract(ExtractConfig(**settings | {k: Path(settings[k]) for k in ("prepared_data", "output_dir")}))
    zero = min(life.ready for life in result.lives if life.ready is not None)
    lives = [
        {
            "slot": life.slot,
            "begun": life.begun - zero,
            "ready": None if life.ready is None else life.ready - zero,
            "first": None if life.first is None else life.first - zero,
            "last": None if life.last is None else life.last - zero,
            "rows": life.rows,
            "tokens": life.tokens,
            "cause": life.cause,
        }
        for life in result.lives
    ]
    measured = Measured(result.seconds, result.restarts, result.computed_rows, result.kept_rows, lives)
    out.write_text(json.dumps(vars(measured)))


class Bench:
    """A model, rows, and the ways to extract them."""

    def __init__(self, root: Path, rows: int, seed: int) -> None:
        self.root, self.rows, self.choose = root, rows, random.Random(seed)
        self.faults: list[str] = []
        write_weights(_slower(write_model(root / "model", hidden=128)))
        with (root / "conversations.jsonl").open("w") as handle:
            for number in range(rows):
                reply = " ".join(self.choose.choices(WORDS, k=self.choose.randint(1, 25)))
                turns = [
                    {"role": "user", "content": f"say {number}"},
                    {"role": "assistant", "content": f"{number} {reply}"},
                ]
                handle.write(json.dumps({"id": str(number), "messages": turns}) + "\n")
        prepare = ["prepare", "--model-path", root / "model", "--input", root / "conversations.jsonl"]
        self.cli([*prepare, "--output-dir", root / "prepared"])
        self.data = root / "prepared" / "tokenized_data.jsonl"
        self.tokens = sum(PreparedFile(self.data, None).lengths)

    def verdict(self) -> int:
        """Tell what was wrong; returns the exit code."""
        for fault in self.faults:
            print(f"wrong: {fault}")
        print("nothing wrong" if not self.faults else f"{len(self.faults)} faults")
        return int(bool(self.faults))

    def cli(self, arguments: list[object]) -> None:
        """Run the command line to its end."""
        if self.start([sys.executable, "-m", "pipeline", *arguments]).wait(SECONDS):
            raise SystemExit(f"failed: {self.said()}")

    def start(self, command: list[object]) -> subprocess.Popen[bytes]:
        """Begin a command in a process group of its own."""
        log = (self.root / "log.txt").open("ab")
        return subprocess.Popen([str(part) for part in command], stdout=log, stderr=log, start_new_session=True)

    def said(self) -> str:
        """The end of what the commands printed."""
        return (self.root / "log.txt").read_text(errors="replace")[-2500:]

    def arguments(self, folder: Path, *more: object) -> list[object]:
        """A command line of `extract`."""
        return [
            "extract", "--model-path", self.root / "model", "--prepared-data", self.data, "--output-dir", folder,
            "--engine", "direct", "--dtype", "float32", "--gpu-memory-utilization", 0.3, *more,
        ]  # fmt: skip

    def measured(self, folder: Path, replicas: int) -> tuple[subprocess.Popen[bytes], Path]:
        """Begin a run whose figures are wanted; where they will be."""
        settings = {
            "model_path": str(self.root / "model"), "prepared_data": str(self.data), "output_dir": str(folder),
            "engine": "direct", "dtype": "float32", "gpu_memory_utilization": 0.3, "replicas": replicas,
        }  # fmt: skip
        given, out = folder.with_suffix(".in.json"), folder.with_suffix(".out.json")
        given.write_text(json.dumps(settings))
        return self.start([sys.executable, __file__, "--measure", given, out]), out

    def wait_for_rows(self, process: subprocess.Popen[bytes], folder: Path, rows: int) -> bool:
        """Whether so many rows came before the process ended."""
        ends = time.monotonic() + SECONDS
        while process.poll() is None and time.monotonic() < ends:
            if len(files(folder)) >= rows:
                return True
            time.sleep(0.02)
        self.faults.append(f"ended with {process.poll()} before {rows} rows were there: {self.said()}")
        return False

    def compare(self, name: str, folder: Path, whole: Path) -> None:
        """The set must be the single engine's."""
        if left := left_behind():
            self.faults.append(f"{name}: processes left behind: {left}")
        verify = [sys.executable, "-m", "pipeline", "verify", folder, "--model", self.root / "model", "--sample", "8"]
        if self.start(verify).wait(SECONDS):
            self.faults.append(f"{name}: verify: {self.said()}")
        wrong, bits, largest = differences(numbers(folder), numbers(whole))
        if wrong or largest > 1e-5:
            self.faults.append(f"{name}: rows {wrong[:5]} differ, largest relative difference {largest:.1e}")
        print(
            f"{name}: {len(files(folder))} rows, ids and masks equal; {bits} rows have other last bits, largest "
            f"relative difference {largest:.1e}",
            flush=True,
        )


def _slower(model: Path) -> Path:
    """Large enough that two cores compute for a minute."""
    config = json.loads((model / "config.json").read_text())
    config |= {"num_hidden_layers": 12, "intermediate_size": 1024, "num_attention_heads": 4}
    (model / "config.json").write_text(json.dumps(config))
    return model


def stamps(folder: Path) -> dict[str, tuple[int, int]]:
    """Finished rows: file -> inode and time of the last change."""
    return {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in files(folder)}


def written_again(before: dict[str, tuple[int, int]], after: dict[str, tuple[int, int]]) -> int:
    """Rows whose file is gone or another one."""
    return sum(after.get(name) != stamp for name, stamp in before.items())


def adopt_orphans() -> None:
    """Processes whose parent dies become this one's, where they can be counted. Linux only."""
    ctypes.CDLL(None, use_errno=True).prctl(36, 1, 0, 0, 0)


def left_behind(seconds: float = 20.0) -> list[str]:
    """Processes of an engine whose run has ended, after they had time to end, too.

    Ray's own ones are left out: they wait to be adopted by process 1, which this one has taken the place of.
    """
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        alive = [name for pid, name in below(os.getpid()) if identity(pid) and any(part in name for part in ENGINE)]
        if not alive:
            return []
        time.sleep(0.5)
    return alive


def below(pid: int) -> list[tuple[int, str]]:
    """All processes below one, with their command lines."""
    return [(child, command_line(child)) for child in guardian.below(pid)]


def command_line(pid: int) -> str:
    """Its arguments; "" where it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return ""


def undisturbed(bench: Bench, whole: Path) -> Measured:
    """Run 2."""
    folder = bench.root / "two"
    process, out = bench.measured(folder, 2)
    if process.wait(SECONDS):
        raise SystemExit(f"two replicas failed: {bench.said()}")
    bench.compare("2 replicas", folder, whole)
    return Measured(**json.loads(out.read_text()))


def killed(bench: Bench, whole: Path) -> Measured:
    """Run 3: twice a replica is killed, once the worker of its engine alone."""
    folder = bench.root / "killed"
    process, out = bench.measured(folder, 2)
    moments = sorted(bench.choose.sample(range(bench.rows // 20, bench.rows * 3 // 4), 3))
    seen: dict[str, tuple[int, int]] = {}
    again = 0
    for number, rows in enumerate(moments):
        if not bench.wait_for_rows(process, folder, rows):
            break
        # Only what computes is worth killing: not what is starting.
        replicas = [pid for pid, name in below(process.pid) if name.startswith("ray::Replica.work")]
        while not replicas and process.poll() is None:
            time.sleep(0.05)
            replicas = [pid for pid, name in below(process.pid) if name.startswith("ray::Replica.work")]
        victim = bench.choose.choice(replicas)
        target = below(victim)[-1][0] if number == 1 else victim
        now = stamps(folder)
        again += written_again(seen, now)
        os.kill(target, signal.SIGKILL)
        seen = stamps(folder)
        print(f"killed {'a worker' if number == 1 else 'a replica'} when {len(seen)} rows were there", flush=True)
    if process.wait(SECONDS):
        bench.faults.append(f"the run did not get over the kills: {bench.said()}")
        return Measured(0, 0, 0, 0)
    again += written_again(seen, stamps(folder))
    result = Measured(**json.loads(out.read_text()))
    print(f"{result.restarts} restarts, {again} finished rows were computed again", flush=True)
    if again or result.restarts != len(moments):
        bench.faults.append(f"{again} finished rows computed again, {result.restarts} restarts of {len(moments)}")
    bench.compare("2 replicas, killed three times", folder, whole)
    return result


def resized(bench: Bench, whole: Path) -> None:
    """Run 4, by the command line."""
    folder = bench.root / "resized"
    before: dict[str, tuple[int, int]] = {}
    again = 0
    for replicas, share in ((2, 0.25), (1, 0.6), (2, None)):
        process = bench.start([sys.executable, "-m", "pipeline", *bench.arguments(folder, "--replicas", replicas)])
        if share is None:
            if process.wait(SECONDS):
                bench.faults.append(f"resized: the last run failed: {bench.said()}")
        elif bench.wait_for_rows(process, folder, int(bench.rows * share)):
            if replicas == 2:
                os.kill(process.pid, signal.SIGKILL)  # as a machine that is gone: nobody cleans up
                process.wait(SECONDS)
            else:
                process.terminate()
                code = process.wait(SECONDS)
                if code != 128 + signal.SIGTERM or "what is finished is kept" not in bench.said():
                    bench.faults.append(f"stopped: exit code {code}: {bench.said()}")
        after = stamps(folder)
        again += written_again(before, after)
        print(f"{replicas} replicas: {len(before)} rows were there, {len(after)} are now", flush=True)
        before = after
    print(f"resized 2, 1, 2: {again} finished rows were computed again", flush=True)
    if again:
        bench.faults.append(f"resized: {again} finished rows were computed again")
    bench.compare("resized 2, 1, 2", folder, whole)


def setup_of(bench: Bench, run: Measured, calm: Measured, hurt: Measured) -> Setup:
    """A run as the simulation sees it; what a replica can do is measured on run 2, a restart on run 3."""
    rates = [life["tokens"] / (life["last"] - life["first"]) for life in calm.lives if life["last"]]
    away = [ready - died for _, died, ready in deaths(hurt) if ready is not None]
    return Setup(
        tokens=bench.tokens,
        replicas=2,
        tokens_per_s=mean(rates),
        chunk_tokens=16 * bench.tokens / bench.rows,
        ready=tuple(life["ready"] for life in run.lives[:2]),
        restart_s=mean(away) if away else 0.0,
        deaths=tuple((died, slot) for slot, died, _ in deaths(run)),
    )


def deaths(run: Measured) -> list[tuple[int, float, float | None]]:
    """(slot, when it settled its last rows, when its successor was ready); a death is noticed a little later."""
    found = []
    for number, life in enumerate(run.lives):
        if life["cause"]:
            after = next(later for later in run.lives[number + 1 :] if later["slot"] == life["slot"])
            died = life["last"] if life["last"] is not None else life["ready"] or after["begun"]
            found.append((life["slot"], died, after["ready"]))
    return found


def hold_against_the_clock(bench: Bench, calm: Measured, hurt: Measured) -> list[dict[str, Any]]:
    """Simulated and measured seconds of the runs, as lines and as data."""
    compared = []
    for name, run in (("2 replicas, whose speed is taken", calm), ("2 replicas, killed three times", hurt)):
        setup = setup_of(bench, run, calm, hurt)
        simulated = simulate(setup).computing_s
        off = simulated / run.seconds - 1
        print(
            f"{name}: simulated {simulated:.1f} s, measured {run.seconds:.1f} s ({off:+.0%}); "
            f"{setup.tokens_per_s:.0f} tokens/s a replica, {setup.restart_s:.1f} s until another is in its place",
            flush=True,
        )
        if abs(off) > AGREE:
            bench.faults.append(f"{name}: the simulation is {off:+.0%} off")
        compared.append(
            {
                "run": name, "simulated_s": round(simulated, 1), "measured_s": round(run.seconds, 1),
                "tokens": bench.tokens, "rows": bench.rows, "tokens_per_s": round(setup.tokens_per_s),
                "restart_s": round(setup.restart_s or 0.0, 1), "deaths": len(setup.deaths),
            }
        )  # fmt: skip
    return compared


def main() -> int:
    """Exit code 1 when something was wrong."""
    parser = argparse.ArgumentParser(description="Extract with replicas of real vLLM on Ray.")
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="write simulated and measured times here, as JSON")
    parser.add_argument("--folder", type=Path, help="keep everything here")
    parser.add_argument("--measure", type=Path, nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        measure(*options.measure)
        return 0
    adopt_orphans()
    with tempfile.TemporaryDirectory(prefix="live-scale-") as name:
        root = options.folder or Path(name)
        root.mkdir(parents=True, exist_ok=True)
        bench, whole = Bench(root, options.rows, options.seed), root / "whole"
        print(f"{bench.rows} rows, {bench.tokens} tokens", flush=True)
        bench.cli(bench.arguments(whole))
        speed = manifest.require_rows(whole, "folder")["speed"]
        print(f"one engine on all cores: {speed['tokens'] / speed['seconds']:.0f} tokens/s", flush=True)
        calm = undisturbed(bench, whole)
        hurt = killed(bench, whole)
        compared = hold_against_the_clock(bench, calm, hurt) if hurt.lives else []
        if options.output:
            record = {
                "date": manifest.compose("extract")["created"][:10],
                "cores": len(os.sched_getaffinity(0)),
                "stack": manifest.installed_versions(),
                "one_engine_tokens_per_s": round(speed["tokens"] / speed["seconds"]),
                "runs": compared,
            }
            options.output.write_text(json.dumps(record, indent=1) + "\n")
        resized(bench, whole)
    return bench.verdict()


if __name__ == "__main__":
    sys.exit(main())
