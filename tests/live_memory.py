"""Memory does not grow with the data: 20,000 short rows through a real engine, watched.

``python tests/live_memory.py [--rows 20000] [--engine direct]``; `nox -s live-memory` runs it. What the processes of
the extraction hold for themselves is read every half second. Exit code 1 where the peak of the last quarter of the rows
is more than 5 % above that of the second.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from contract_tests.live.devices import write_rows
from contract_tests.live.models import make
from pipeline.prepared import DATA_NAME
from shims.guardian import below

GROWTH = 0.05
EVERY = 0.5  # seconds
LENGTHS = range(4, 25)  # tokens


def held(pid: int) -> int:
    """KiB that a process and those below it have in memory, files that they only look at left out."""
    total = 0
    for each in (pid, *below(pid)):
        try:
            lines = Path(f"/proc/{each}/status").read_text().splitlines()
        except OSError:
            continue
        total += sum(int(line.split()[1]) for line in lines if line.startswith(("RssAnon:", "RssShmem:")))
    return total


def finished(folder: Path) -> int:
    """Rows that are there."""
    states = folder / "hidden_states"
    return sum(entry.name.endswith(".safetensors") for entry in os.scandir(states)) if states.is_dir() else 0


def watch(process: subprocess.Popen[bytes], folder: Path, rows: int) -> list[int]:
    """The peak, in KiB, of each quarter of the rows."""
    peaks = [0, 0, 0, 0]
    while process.poll() is None:
        done = finished(folder)
        if 0 < done < rows:
            quarter = 4 * done // rows
            peaks[quarter] = max(peaks[quarter], held(process.pid))
        time.sleep(EVERY)
    return peaks


def main() -> int:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=20000)
    parser.add_argument("--engine", default="direct")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="specshim-memory-") as root:
        model, data, folder = make("llama", Path(root)), Path(root) / DATA_NAME, Path(root) / "states"
        write_rows(data, options.rows, LENGTHS)
        command = [
            *(sys.executable, "-m", "pipeline", "extract", "--engine", options.engine, "--model-path", str(model)),
            *("--prepared-data", str(data), "--output-dir", str(folder), "--dtype", "float32"),
            *("--max-seq-len", "64", "--batch-size", "256", "--gpu-memory-utilization", "0.1"),
        ]
        log = Path(root) / "log"
        with log.open("wb") as said:
            # A large cache for keys and values would hide what grows.
            environment = {"VLLM_CPU_KVCACHE_SPACE": "1", **os.environ}
            process = subprocess.Popen(command, stdout=said, stderr=said, env=environment)
            peaks = watch(process, folder, options.rows)
        if process.returncode or finished(folder) != options.rows:
            print(log.read_text(encoding="utf-8", errors="replace")[-3000:], file=sys.stderr)
            return 1
    growth = peaks[3] / peaks[1] - 1 if all(peaks) else float("nan")
    print(json.dumps({"rows": options.rows, "engine": options.engine, "peaks_kib": peaks, "growth": round(growth, 4)}))
    return 0 if growth <= GROWTH else 1


if __name__ == "__main__":
    sys.exit(main())
