"""Real vLLM into a real S3 server (moto's): one engine, and two replicas that are killed with their command.

``python tests/live_store.py``; `nox -s live-scale` runs it last. A tiny Llama and 300 rows:

1. one engine into a folder: the set that the others must equal;
2. one engine to an address, then a second command while a first one writes there, which has to be refused;
3. two replicas to an address. All processes are killed once two fifths of the rows are there; the same command goes on.
   No object that was there may be written again.

`verify` must pass against transformers, and what `fetch` copies must equal the first set.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

from live_crash import files
from live_scale import SECONDS, Bench, adopt_orphans
from s3_server import BUCKET, client, environment, running

from shims.guardian import below

ROWS = 300


def stamps(prefix: str) -> dict[str, datetime.datetime]:
    """Rows below a prefix: name -> when the object was written."""
    pages = client().get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=f"{prefix}/hidden_states/")
    return {entry["Key"]: entry["LastModified"] for page in pages for entry in page.get("Contents", ())}


def compare(bench: Bench, name: str, prefix: str, whole: Path) -> None:
    """An address must hold the single engine's set."""
    address, copy = f"s3://{BUCKET}/{prefix}", bench.root / f"{prefix}-fetched"
    verify = [sys.executable, "-m", "pipeline", "verify", address, "--model", bench.root / "model", "--sample", "8"]
    if bench.start(verify).wait(SECONDS):
        bench.faults.append(f"{name}: verify {address}: {bench.said()}")
    bench.cli(["fetch", address, "--output-dir", copy])
    mine, theirs = ({path.name: path.read_bytes() for path in files(folder)} for folder in (copy, whole))
    equal = sum(mine.get(row) == content for row, content in theirs.items())
    print(f"{name}: {equal} of {len(theirs)} rows are the folder's bit for bit", flush=True)
    bench.compare(name, copy, whole)


def killed(bench: Bench, whole: Path) -> None:
    """Run 3."""
    address = f"s3://{BUCKET}/two"
    command = [sys.executable, "-m", "pipeline", *bench.arguments(Path(address), "--replicas", 2)]
    process, ends = bench.start(command), time.monotonic() + SECONDS
    while process.poll() is None and time.monotonic() < ends and len(stamps("two")) < bench.rows * 2 // 5:
        time.sleep(0.05)
    if process.poll() is not None:
        bench.faults.append(f"two replicas ended with {process.poll()} before they were killed: {bench.said()}")
        return
    for pid in [process.pid, *below(process.pid)]:  # as a machine that is switched off
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait(SECONDS)
    before = stamps("two")
    print(f"killed with {len(before)} rows there", flush=True)
    again = bench.start(command)
    if again.wait(SECONDS):
        bench.faults.append(f"going on failed: {bench.said()}")
        return
    after = stamps("two")
    rewritten = sum(after.get(name) != stamp for name, stamp in before.items())
    print(f"{rewritten} of them were written again", flush=True)
    if rewritten:
        bench.faults.append(f"{rewritten} finished rows were written again")
    compare(bench, "two replicas, killed", "two", whole)


def refused(bench: Bench) -> None:
    """A second command, while a first one writes to the same address."""
    address = Path(f"s3://{BUCKET}/refused")
    command = [sys.executable, "-m", "pipeline", *bench.arguments(address)]
    first, ends = bench.start(command), time.monotonic() + SECONDS
    while not client().list_objects_v2(Bucket=BUCKET, Prefix="refused/").get("KeyCount") and time.monotonic() < ends:
        time.sleep(0.05)
    began = time.monotonic()
    code = bench.start(command).wait(SECONDS)
    print(f"a second writer ended with exit code {code} after {time.monotonic() - began:.0f} s", flush=True)
    if code != 2 or "renews its lock" not in bench.said():
        bench.faults.append(f"a second writer: exit code {code}: {bench.said()}")
    first.send_signal(signal.SIGTERM)
    if first.wait(SECONDS) != 128 + signal.SIGTERM:
        bench.faults.append(f"the first writer: {bench.said()}")


def main() -> int:
    """Exit code 1 when something was wrong."""
    parser = argparse.ArgumentParser(description="Extract with real vLLM into a real S3 server.")
    parser.add_argument("--rows", type=int, default=ROWS)
    parser.add_argument("--folder", type=Path, help="keep everything here")
    options = parser.parse_args()
    adopt_orphans()
    with tempfile.TemporaryDirectory(prefix="live-store-") as name, running() as endpoint:
        os.environ.update(environment(endpoint))
        client().create_bucket(Bucket=BUCKET)
        root = options.folder or Path(name)
        root.mkdir(parents=True, exist_ok=True)
        bench, whole = Bench(root, options.rows, 0), root / "whole"
        print(f"{bench.rows} rows, {bench.tokens} tokens", flush=True)
        bench.cli(bench.arguments(whole))
        bench.cli(bench.arguments(Path(f"s3://{BUCKET}/one")))
        compare(bench, "one engine", "one", whole)
        refused(bench)
        killed(bench, whole)
    return bench.verdict()


if __name__ == "__main__":
    sys.exit(main())
