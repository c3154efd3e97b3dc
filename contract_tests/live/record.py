"""Put the outcomes of a live run into `contract_tests/results/<release>.json`.

python -m contract_tests.live.record RELEASE FILE
"""

from __future__ import annotations

import argparse
import datetime
import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "results"


def merge(release: str, stack: dict[str, Any], cases: list[dict[str, Any]], into: dict[str, Any]) -> dict[str, Any]:
    """The release's results, `cases` in the place of earlier ones of the same speculators, engine, model and place."""
    replaced = {_place(c) for c in cases}
    kept = [c for c in into.get("cases", []) if _place(c) not in replaced]
    ordered = sorted([*kept, *cases], key=lambda c: (*_place(c), c["case"]))
    # Each case names its speculators; the rest of the stack may differ by device only.
    stacks = {**into.get("stacks", {}), **{case["device"]: {**stack, "speculators": None} for case in cases}}
    return {
        "release": release,
        "date": datetime.date.today().isoformat(),
        "stack": stacks.get("cpu", stack),
        "stacks": stacks,
        "cases": ordered,
    }


def _place(case: dict[str, Any]) -> tuple[str, ...]:
    where = tuple(str(case[key]) for key in ("speculators", "engine", "device", "runner", "model"))
    return (*where, str(case.get("tp_size", 1)))  # the oldest results do not say it


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("release")
    parser.add_argument("file", type=Path)
    options = parser.parse_args()
    run = json.loads(options.file.read_text(encoding="utf-8"))
    path = RESULTS / f"{options.release}.json"
    before = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    merged = merge(options.release, run["stack"], run["cases"], before)
    RESULTS.mkdir(exist_ok=True)
    path.write_text(json.dumps(merged, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
