"""The part of docs/performance.md about the upgrade gate, from the newest run of `contract_tests.gate.bench`."""

from __future__ import annotations

import json
from pathlib import Path

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results" / "gate"


def lines() -> list[str]:
    """The section; nothing where nothing was run."""
    newest = max(RESULTS.glob("*.json"), default=None)
    if newest is None:
        return []
    run = json.loads(newest.read_text(encoding="utf-8"))
    found = [
        "",
        "## The upgrade gate",
        "",
        f"`nox -s bench-gate`, {run['date']}: a verdict on all {run['releases']} releases, on {run['cores']} cores.",
        "",
        "| | seconds of processor | by the clock | MB on disk |",
        "|---|---|---|---|",
    ]
    for name, cost in run["costs"].items():
        disk = "" if cost["megabytes"] is None else f"{cost['megabytes']:,.0f}"
        found.append(f"| {name} | {cost['processor']:.1f} | {cost['seconds']:.1f} | {disk} |")
    return found
