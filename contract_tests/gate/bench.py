"""`python -m contract_tests.gate.bench`: what a verdict on all known releases costs, next to installing one vLLM.

The figures go into `benchmarks/results/gate/`, and from there into docs/performance.md.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from contract_tests.gate_page import RESULTS
from shims.releases import known

_GATE = (sys.executable, "-m", "contract_tests.gate", "all", "--format", "json")
_ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Cost:
    """What one command took.

    Args:
        seconds: by the clock.
        processor: seconds of processor time, of it and the processes that it started.
        megabytes: that it left on the disk, None where that was not looked at.
        code: its exit code.
    """

    seconds: float
    processor: float
    megabytes: float | None
    code: int

    def __str__(self) -> str:
        disk = "" if self.megabytes is None else f", {self.megabytes:.0f} MB on disk"
        failed = f" (exit code {self.code})" if self.code else ""
        return f"{self.seconds:6.1f} s, {self.processor:6.1f} s of processor{disk}{failed}"


def measured(command: tuple[str, ...], cache: Path, folder: Path | None = None) -> Cost:
    """Run a command with a cache of its own, and weigh it (and `folder`, if given)."""
    environment = {**os.environ, "SPECSHIM_CACHE": str(cache)}
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(command, cwd=_ROOT, env=environment, stdout=subprocess.DEVNULL, check=False)
    seconds, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    processor = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Cost(seconds, processor, None if folder is None else _size(folder), done.returncode)


def _size(folder: Path) -> float:
    return sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file()) / 1e6


def planned(uv: str) -> str:
    """What `uv pip install vllm` would do, by its own word: it resolves, and installs nothing."""
    with tempfile.TemporaryDirectory() as folder:
        environment = str(Path(folder) / "environment")
        subprocess.run([uv, "venv", "-q", "--python", sys.executable, environment], check=True)
        command = [uv, "pip", "install", "--dry-run", "--python", environment, "vllm"]
        started = time.perf_counter()
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        said = re.findall(r"^(?:Resolved|Would download|Would install) .*$", done.stderr, re.MULTILINE)
        return f"{'; '.join(said) or done.stderr.strip()[:200]}; resolved in {time.perf_counter() - started:.1f} s"


def installed(uv: str) -> Cost:
    """A real installation of vLLM in an environment that is thrown away: gigabytes, and minutes."""
    with tempfile.TemporaryDirectory() as folder:
        environment = Path(folder) / "environment"
        subprocess.run([uv, "venv", "-q", "--python", sys.executable, str(environment)], check=True)
        command = (uv, "pip", "install", "-q", "--no-cache", "--python", str(environment), "vllm")
        return measured(command, Path(folder), environment)


def main(arguments: list[str] | None = None) -> int:
    """Print the figures and write them; returns the exit code (1: the gate did not pass, and nothing is written)."""
    parser = argparse.ArgumentParser(prog="python -m contract_tests.gate.bench", description=__doc__)
    parser.add_argument(
        "--install", action="store_true", help="install vLLM for comparison (8 GB), not only resolve it"
    )
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        cache = Path(folder)
        print(f"specshim gate all ({len(known())} releases)", flush=True)
        cold = measured(_GATE, cache, cache)
        print(f"  cold, from the index     {cold}", flush=True)
        warm, offline = measured(_GATE, cache), measured((*_GATE, "--offline"), cache)
        print(f"  warm                     {warm}")
        print(f"  warm, --offline          {offline}", flush=True)
    costs = {"cold, from the index": cold, "warm": warm, "warm, `--offline`": offline}
    uv = shutil.which("uv")
    print("uv pip install vllm")
    if uv is None:
        print("  uv is not installed")
    elif options.install:
        costs["`uv pip install vllm`, for comparison"] = real = installed(uv)
        print(f"  real, without a cache    {real}")
    else:
        print(f"  --dry-run                {planned(uv)}")
    if any(cost.code for cost in costs.values()):
        return 1
    today = datetime.date.today().isoformat()
    found = {name: asdict(cost) for name, cost in costs.items()}
    data = {"date": today, "cores": os.cpu_count(), "releases": len(known()), "costs": found}
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / f"{today}.json").write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
