"""All ways one after the other, and the file of results.

python -m benchmarks.run tiny [--ways plain-eager,direct-files] [--folder DIR] [--out FILE]
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.models import SHAPES, write
from benchmarks.way import WAYS

RESULTS = Path(__file__).with_name("results")
# Compiling takes minutes on a CPU and vLLM's connector wants CUDA.
CPU_WAYS = ("plain-eager", "direct-drop", "direct-files", "stock", "transformers")
_LIMIT = 900  # seconds for one way


def measure(way: str, shape: str, path: Path, folder: Path) -> dict[str, Any]:
    """Run one way in a process of its own; a failure is a result without a speed."""
    command = [sys.executable, "-m", "benchmarks.way", way, shape, str(path), str(folder)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT, check=False)
    except subprocess.TimeoutExpired:
        return {"way": way, "model": shape, "reason": f"more than {_LIMIT} s"}
    found = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if found:
        result: dict[str, Any] = json.loads(found[-1].removeprefix("RESULT "))
        return result
    print(done.stdout[-2000:], done.stderr[-4000:], sep="\n", file=sys.stderr)
    last = [line for line in done.stderr.splitlines() if line.strip()]
    return {"way": way, "model": shape, "reason": last[-1][:300] if last else f"exit code {done.returncode}"}


def rows(measured: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The measurements with their share of the plain one, of the same model: compiled, else eager."""
    finished = []
    for one in measured:
        plain = [m for m in measured if m["model"] == one["model"] and m["way"].startswith("plain") and "tok_s" in m]
        limit = max(plain, key=lambda m: (m["way"] == "plain-compiled", m["tok_s"]), default=None)
        of = round(one["tok_s"] / limit["tok_s"], 3) if limit and "tok_s" in one else None
        finished.append({**one, "of_plain": of})
    return finished


def device() -> str:
    """The name of the accelerator, or `cpu` and its cores."""
    import torch

    return str(torch.cuda.get_device_name()) if torch.cuda.is_available() else f"CPU, {os.cpu_count()} cores"


def _slug(name: str) -> str:
    return "-".join("".join(c if c.isalnum() else " " for c in name.lower()).split())


def main() -> None:
    """See the module's docstring."""
    import shims

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shapes", nargs="+", choices=list(SHAPES))
    parser.add_argument("--ways", help="default: all that this device takes")
    parser.add_argument(
        "--folder", type=Path, help="where rows are written (default: memory, else the temporary folder)"
    )
    parser.add_argument("--tp-size", type=int, default=1, help="devices to split each model over")
    parser.add_argument("--out", type=Path, help="default: results/<date>-<device>.json")
    options = parser.parse_args()
    os.environ["SPECSHIM_BENCH_TP"] = str(options.tp_size)
    # A parent that has as much as asked for a GPU cannot be forked.
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    here = device()
    on_cpu = here.startswith("CPU")
    ways = options.ways.split(",") if options.ways else CPU_WAYS if on_cpu else list(WAYS)
    memory = Path("/dev/shm")
    folder = options.folder or (memory if memory.is_dir() else None)
    out = options.out or RESULTS / f"{datetime.date.today().isoformat()}-{_slug(here)}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    data: dict[str, Any] = {
        "device": here,
        "date": datetime.date.today().isoformat(),
        "stack": shims.report().as_dict()["stack"],
        "rows": [],
    }
    measured = []
    with tempfile.TemporaryDirectory(prefix="specshim-bench-", dir=folder) as scratch:
        for shape in options.shapes:
            path = write(shape, Path(scratch))
            for way in ways:
                one = measure(way, shape, path, Path(scratch) / f"{shape}-{way}")
                print(json.dumps(one), flush=True)
                measured.append(one)
                # After each: a run that is cut keeps what it has.
                data["rows"] = rows(measured)
                out.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    for row in data["rows"]:
        print(f"{row['model']:12} {row['way']:20} {row.get('tok_s', row.get('reason'))!s:>10} {row['of_plain'] or ''}")


if __name__ == "__main__":
    main()
