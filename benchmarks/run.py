"""All ways of some shapes, and the file of results; of three passes over the same prompts, the fastest counts.

    python -m benchmarks.run tiny [--ways plain-eager,direct-files] [--together] [--folder DIR] [--out FILE]

One way after the other; with `--together`, all of a shape are loaded at once and take their passes in turn, so that
a device that changes its pace changes it for all of them.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.child import Child, WayFailed
from benchmarks.models import SHAPES, write
from benchmarks.way import TP_VARIABLE, WAYS

RESULTS = Path(__file__).with_name("results")
# Compiling takes minutes on a CPU and vLLM's connector wants CUDA.
CPU_WAYS = ("plain-eager", "direct-drop", "direct-files", "stock", "transformers")
PASSES = 3


def measure(ways: list[str], shape: str, path: Path, folder: Path) -> list[dict[str, Any]]:
    """Load these ways of a shape together, each in a process of its own, and let them take their passes in turn.

    Returns:
        A row each; a failure is a row without a speed.
    """
    children = [Child(way, shape, path, folder / f"{shape}-{way}", len(ways)) for way in ways]
    failed: dict[str, str] = {}
    # Every one is ready before the first is measured: starting takes cores and memory bandwidth.
    for act in (Child.ready, *[Child.measure] * PASSES):
        for child in children:
            if child.way not in failed:
                try:
                    act(child)
                except WayFailed as error:
                    failed[child.way] = str(error)
    for child in children:
        child.close()
    return [_row(child, failed.get(child.way)) for child in children]


def _row(child: Child, reason: str | None) -> dict[str, Any]:
    if reason is not None:
        return {"way": child.way, "model": child.shape, "reason": reason}
    tokens = SHAPES[child.shape].prompts * SHAPES[child.shape].length
    row = {"way": child.way, "model": child.shape, "tokens": tokens, "tok_s": round(tokens / min(child.seconds))}
    tp_size = int(os.environ[TP_VARIABLE])
    return row | ({"tp_size": tp_size} if tp_size > 1 else {}) | {"seconds": [round(s, 3) for s in child.seconds]}


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
    parser.add_argument("--together", action="store_true", help="all ways of a shape share the device, loaded at once")
    parser.add_argument("--tp-size", type=int, default=1, help="devices to split each model over")
    parser.add_argument("--out", type=Path, help="default: results/<date>-<device>.json")
    options = parser.parse_args()
    os.environ[TP_VARIABLE] = str(options.tp_size)
    # A parent that has as much as asked for a GPU cannot be forked.
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    here = device()
    on_cpu = here.startswith("CPU")
    if options.tp_size > 1 and not on_cpu:
        here = f"{options.tp_size} x {here}"
    ways = options.ways.split(",") if options.ways else list(CPU_WAYS if on_cpu else WAYS)
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
            for group in [ways] if options.together else [[way] for way in ways]:
                found = measure(group, shape, path, Path(scratch))
                print(*map(json.dumps, found), sep="\n", flush=True)
                measured += found
                # After each: a run that is cut keeps what it has.
                data["rows"] = rows(measured)
                out.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    for row in data["rows"]:
        print(f"{row['model']:12} {row['way']:20} {row.get('tok_s', row.get('reason'))!s:>10} {row['of_plain'] or ''}")


if __name__ == "__main__":
    main()
