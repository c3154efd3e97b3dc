"""Train a draft on a model's own answers, serve it, and serve it wrongly; write the figures.

    python -m benchmarks.acceptance --model MODEL --work FOLDER --out FILE [--parts answers,training,…]

Run again, it goes on. The parts after ``training`` may run beside each other on devices of their own.
"""

from __future__ import annotations

import argparse
import datetime
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.acceptance.stages import Plan, answer, check, learn, serve, shift
from benchmarks.run import device
from pipeline import manifest
from pipeline.evaluation.report import JSON_NAME

MADE = ("answers", "training")
SERVED = ("trained", "shifted", "exact")


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="folder of a small chat model")
    parser.add_argument("--work", type=Path, required=True, help="folder for everything this makes")
    parser.add_argument("--out", type=Path, help="JSON file for the figures; only of finished parts")
    parser.add_argument("--parts", default=",".join(MADE + SERVED), help="which parts to run (default: %(default)s)")
    parser.add_argument("--questions", type=int, default=20000)
    parser.add_argument("--asked", type=int, default=64)
    parser.add_argument("--reply-tokens", type=int, default=256)
    parser.add_argument("--draft-vocab", type=int, default=16384)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch-tokens", type=int, default=4096)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.8, help="share of the device for vLLM")
    parser.add_argument("--eager", action="store_true", help="engines uncompiled: they start faster and run slower")
    options = parser.parse_args()
    plan = Plan(
        options.model, options.work, options.questions, options.asked, options.reply_tokens, options.draft_vocab,
        options.epochs, options.batch_tokens, options.dtype, options.workers, options.processes, options.eager,
        options.gpu_memory_utilization,
    )  # fmt: skip
    parts = options.parts.split(",")
    if "answers" in parts:
        answer(plan)
    if "training" in parts:
        learn(plan)
    ids = shift(plan) if set(parts) & set(SERVED) else []
    if "trained" in parts:
        serve(plan, "trained", "--untrained", "--dtype", plan.dtype)
    if "shifted" in parts:
        (plan.work / "check.json").write_text(json.dumps(check(plan)), encoding="utf-8")
        serve(plan, "shifted", "--force", "--layer-ids", ids[0], "--layer-ids", ids[1], "--layer-ids", ids[2],
              "--no-replay", "--dtype", plan.dtype, shifted=True)  # fmt: skip
    if "exact" in parts:
        # Without the rounding of half precision, greedy answers have to be the same ones.
        serve(plan, "exact", "--dtype", "float32", "--no-replay")
    if options.out:
        options.out.write_text(json.dumps(figures(plan), indent=1) + "\n", encoding="utf-8")


def figures(plan: Plan) -> dict[str, Any]:
    """What is finished, for `benchmarks/results/acceptance/`."""
    training = manifest.require(plan.at.training, "train", "acceptance")
    kept = ("steps", "seconds", "metrics", "versions")
    checked = plan.work / "check.json"
    settings = {name: value for name, value in asdict(plan).items() if name not in ("model", "work")}
    return {
        "device": device(),
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "settings": settings,
        "training": {name: training[name] for name in kept},
        "check": json.loads(checked.read_text(encoding="utf-8")) if checked.is_file() else None,
        "evaluations": {
            name: _without_paths(json.loads((plan.evaluation(name) / JSON_NAME).read_text(encoding="utf-8")))
            for name in SERVED
            if (plan.evaluation(name) / JSON_NAME).is_file()
        },
    }


def _without_paths(report: dict[str, Any]) -> dict[str, Any]:
    """Names in place of this machine's paths."""
    return {**report, "draft": Path(report["draft"]).name, "verifier": Path(report["verifier"]).name}


if __name__ == "__main__":
    main()
