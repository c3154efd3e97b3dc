"""The part of docs/performance.md about several devices, from committed runs that compare them with one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results" / "devices"

_WAYS = {"ddp": "a copy on each (DDP)", "fsdp": "spread (`--fsdp`)"}


def _runs(what: str) -> list[dict[str, Any]]:
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(RESULTS.glob(f"*-{what}-*.json"))]


def lines() -> list[str]:
    """The section; nothing where nothing was run."""
    extracted, trained = _runs("extract"), _runs("train")
    found = ["", "## Several devices"] if extracted or trained else []
    if extracted:
        found += [
            "",
            "`python -m contract_tests.live.devices`: `extract --tp-size N` beside `--tp-size 1`, row by row. What is "
            "rounding shows in one device beside itself, with other rows in its steps. Then the worker of rank 1 is "
            "killed among the rows, and the same command goes on.",
            "",
            "| devices | engine | model | dtype | rows | N beside 1: median token, worst row | 1 beside itself: worst "
            "row | rows written by | killed: ended after | resumed: worst row |",
            "|---|---|---|---|---|---|---|---|---|---|",
        ]
        found += [_extracted(run, model) for run in extracted for model in run["models"]]
    if trained:
        found += [
            "",
            "`python -m benchmarks.training_devices`: `torchrun … -m pipeline train` beside one process that takes the "
            "same steps with `--accumulate N`. Losses are compared at every step.",
            "",
            "| devices | speculators | dtype | steps | draft | loss, first to last | worst difference | steps/s "
            "| of one device |",
            "|---|---|---|---|---|---|---|---|---|",
        ]
        found += [line for run in trained for line in _trained(run)]
        found += [""] + [f"- {run['stack']['speculators']}, {run['dtype']}: {run['note']}." for run in trained]
    return found


def _extracted(run: dict[str, Any], model: dict[str, Any]) -> str:
    outcome = "; ".join(model["faults"]) or f"{model['after_resume']['worst_row']:.1e}"
    writers = ", ".join(name.removeprefix("VLLM::") for name in model["writers"]) or "the command"
    cells = [
        f"{run['tp_size']} x {run['device']}, vllm {run['stack']['vllm']}",
        model["engine"],
        model["model"],
        model["dtype"],
        f"{model['rows']:,}",
        f"{model['difference']['median_token']:.1e}, {model['difference']['worst_row']:.1e}",
        f"{model['one_device_beside_itself']['worst_row']:.1e}",
        writers,
        f"{model['killed']['ended_after']} s",
        outcome,
    ]
    return f"| {' | '.join(cells)} |"


def _trained(run: dict[str, Any]) -> list[str]:
    said = []
    for way, name in _WAYS.items():
        result = run["runs"].get(way)
        if result is None or "losses" not in result:
            continue
        cells = [
            f"{run['processes']} x {run['device']}",
            run["stack"]["speculators"],
            run["dtype"],
            str(run["steps"]),
            name,
            f"{result['losses'][0]:.2f} to {result['losses'][-1]:.2f}",
            f"{result['worst_loss_difference']:.1e}",
            # A device that was shared says nothing of the rate.
            *(("", "") if run.get("shared") else (f"{result['steps_per_second']:.2f}", f"{result['rate_of_one']:.2f}")),
        ]
        said.append(f"| {' | '.join(cells)} |")
    return said
