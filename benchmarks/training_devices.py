"""`specshim train` on N devices beside one device that takes the same steps: the loss curves, and the step rate.

    python -m benchmarks.training_devices --data STATES --vocab PREPARED --model MODEL --processes 2 --out FILE

One process accumulates what N processes compute at once, so that every step sees the same rows. Rates are those of the
second half of the steps: compiling and warming up are over by then.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import shims
from benchmarks.run import device

_LIMIT = 500  # seconds
_ENDING = 40.0  # seconds; torchrun gives its processes 30


def run(options: argparse.Namespace, folder: Path, processes: int, more: list[str]) -> dict[str, Any]:
    """Train, and note when each step's line appears.

    Returns:
        ``losses`` and ``acc`` (right first draft tokens) by optimizer step, ``steps_per_second``.
    """
    command = [sys.executable, "-m", "pipeline"]
    if processes > 1:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
        command += ["-m", "pipeline"]
    command += ["train", "--data", options.data, "--vocab", options.vocab, "--model", options.model]
    command += ["--output-dir", str(folder), "--max-steps", str(options.steps), "--epochs", "1000"]
    command += ["--max-seq-len", str(options.batch_tokens), "--dtype", options.dtype, "--lr", "3e-4"]
    command += ["--val-steps", str(10 * options.steps), "--workers", str(options.workers), *more]
    log = folder.with_suffix(".log")
    with log.open("w", encoding="utf-8") as said:
        process = subprocess.Popen(command, stdout=said, stderr=said, env=os.environ)
    began, seen = time.monotonic(), []
    while process.poll() is None and time.monotonic() - began < _LIMIT:
        done = _steps(folder)
        now = time.monotonic()
        seen += [now] * (len(done) - len(seen))
        time.sleep(0.01)
    if process.poll() != 0:
        end(process)
        raise SystemExit(f"{folder.name}: exit code {process.poll()}: {log.read_text(encoding='utf-8')[-3000:]}")
    lines = _steps(folder)
    half = len(seen) // 2
    rate = (len(seen) - 1 - half) / (seen[-1] - seen[half])
    return {
        "losses": [line["loss"] for line in lines],
        "acc": [line["full_acc_0"] for line in lines],
        "tokens": sum(line["tokens"] for line in lines),
        "steps_per_second": round(rate, 3),
    }


def end(process: subprocess.Popen[Any]) -> None:
    """End a training that takes too long: a killed torchrun leaves its processes on the devices, beside the next."""
    process.terminate()
    try:
        process.wait(_ENDING)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _steps(folder: Path) -> list[dict[str, Any]]:
    path = folder / "metrics.jsonl"
    if not path.is_file():
        return []
    whole = path.read_text(encoding="utf-8").rpartition("\n")[0]
    return [line for line in map(json.loads, whole.splitlines()) if line["kind"] == "train"]


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("--data", "--vocab", "--model"):
        parser.add_argument(name, required=True)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch-tokens", type=int, default=4096)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--ways", default="ddp,fsdp", help="beside one device (default: %(default)s)")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    count = options.processes
    several = {"ddp": (count, []), "fsdp": (count, ["--fsdp"])}
    ways = {"one": (1, ["--accumulate", str(count)])} | {way: several[way] for way in options.ways.split(",")}
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="specshim-devices-") as name:
        for way, (processes, more) in ways.items():
            try:
                found[way] = run(options, Path(name) / way, processes, more)
            except SystemExit as error:
                if way == "one":
                    raise
                found[way] = {"reason": str(error)[-1500:]}
            if way != "one" and "losses" in found[way]:
                pairs = list(zip(found["one"]["losses"], found[way]["losses"], strict=True))
                found[way]["worst_loss_difference"] = max(abs(a - b) / abs(a) for a, b in pairs)
                of_one = found[way]["steps_per_second"] / found["one"]["steps_per_second"]
                found[way]["rate_of_one"] = round(of_one, 3)
            print(way, {k: v for k, v in found[way].items() if k not in ("losses", "acc")}, flush=True)
            options.out.write_text(json.dumps(_report(options, found), indent=1) + "\n", encoding="utf-8")


def _report(options: argparse.Namespace, found: dict[str, Any]) -> dict[str, Any]:
    return {
        "device": device(),
        "date": datetime.date.today().isoformat(),
        "stack": shims.report().as_dict()["stack"],
        "processes": options.processes,
        "steps": options.steps,
        "batch_tokens": options.batch_tokens,
        "dtype": options.dtype,
        "runs": found,
    }


if __name__ == "__main__":
    main()
