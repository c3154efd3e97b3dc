"""Questions to a served draft, each stage the public command in a process of its own; what is finished is kept."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.acceptance.questions import questions
from pipeline import manifest
from pipeline.demo.places import Places
from pipeline.demo.runner import Runner
from pipeline.evaluation.as_fed import with_layers
from pipeline.prepared import DATA_NAME
from pipeline.regenerate import NAME as ANSWERS
from pipeline.serving.draft_folder import read_draft
from pipeline.serving.facts import KEY

_REFUSED = 1  # exit code of check-draft and evaluate for a draft that does not fit
_BOX = "┌│└"  # of a table, which names paths


@dataclass(frozen=True)
class Plan:
    """What to run."""

    model: Path
    work: Path
    count: int
    """Questions to learn from."""
    asked: int
    """Fresh questions to serve."""
    reply_tokens: int
    draft_vocab: int
    epochs: int
    batch_tokens: int
    dtype: str
    workers: int
    processes: int
    """That train, each on a device."""
    eager: bool
    """Serve uncompiled."""
    memory_share: float
    """Of the device, for vLLM."""
    seed: int = 0

    @property
    def memory(self) -> tuple[object, ...]:
        """The option of each stage that runs vLLM."""
        return ("--gpu-memory-utilization", self.memory_share)

    @property
    def at(self) -> Places:
        """Answers, states and draft."""
        return Places(self.work)

    @property
    def shifted(self) -> Path:
        """A copy of them whose config names each layer one later."""
        return self.work / "shifted"

    def evaluation(self, name: str) -> Path:
        """Folder of a report."""
        return self.work / f"evaluation-{name}"


run = Runner(sys.executable, "benchmark")


def answer(plan: Plan) -> None:
    """The model's own answers, and their states."""
    plan.work.mkdir(parents=True, exist_ok=True)
    every = questions(plan.count + plan.asked, plan.seed)
    learned, fresh = plan.work / "questions.jsonl", plan.work / "fresh.jsonl"
    _write(learned, [{"messages": [{"role": "user", "content": text}]} for text in every[: plan.count]])
    _write(fresh, [{"prompt": text} for text in every[plan.count :]])
    model, data = ("--model-path", plan.model), plan.at.prepared
    # Greedily, as the draft will be served.
    asking = ("--temperature", 0, "--top-p", 1, "--max-reply-tokens", plan.reply_tokens, "--batch-size", 4096)
    run("regenerate", "pipeline", "regenerate", *model, "--input", learned, "--output-dir", plan.at.answers, *asking,
        "--max-model-len", 1024, "--dtype", plan.dtype, *plan.memory)  # fmt: skip
    run(
        "prepare",
        "pipeline",
        "prepare",
        *model,
        "--input",
        plan.at.answers / ANSWERS,
        "--output-dir",
        data,
        "--workers",
        plan.workers,
    )
    run("vocab", "pipeline", "vocab", "--prepared", data, "--draft-vocab-size", plan.draft_vocab)
    run("extract", "pipeline", "extract", *model, "--prepared-data", data / DATA_NAME, "--output-dir", plan.at.states,
        "--dtype", plan.dtype, "--batch-size", 1024, *plan.memory)  # fmt: skip


def learn(plan: Plan) -> None:
    """The draft."""
    settings = ("--epochs", plan.epochs, "--lr", 1e-3, "--scheduler", "cosine", "--max-seq-len", plan.batch_tokens)
    inputs = (
        "--data",
        plan.at.states,
        "--vocab",
        plan.at.prepared,
        "--model",
        plan.model,
        "--output-dir",
        plan.at.training,
    )
    kept = ("--val-share", 0.02, "--save-steps", 500, "--workers", plan.workers)
    if plan.processes == 1:
        run("train", "pipeline", "train", *inputs, *settings, *kept)
    else:
        launcher = ("--standalone", "--nproc-per-node", plan.processes, "-m", "pipeline")
        run("train", "torch.distributed.run", *launcher, "train", *inputs, *settings, *kept)


def serve(plan: Plan, name: str, *options: object, shifted: bool = False) -> Path:
    """The draft, or its shifted copy, in vLLM; the fresh questions are asked.

    Returns:
        The folder of the report.
    """
    folder = plan.evaluation(name)
    draft = plan.shifted if shifted else plan.at.training
    places = (
        "--draft",
        draft,
        "--data",
        plan.at.states,
        "--prompts",
        plan.work / "fresh.jsonl",
        "--output-dir",
        folder,
    )
    bounds = ("--max-prompts", plan.asked, "--max-tokens", plan.reply_tokens, "--max-rows", 200)
    more = (*options, "--enforce-eager") if plan.eager else options
    run.ended(f"evaluate, {name}", "pipeline", "evaluate", *places, *bounds, *plan.memory, *more,
              accepted=(0, _REFUSED))  # fmt: skip
    return folder


def check(plan: Plan) -> dict[str, Any]:
    """What check-draft says of the draft and of its shifted copy."""
    found = {}
    for name, draft in (("trained", plan.at.training), ("shifted", plan.shifted)):
        # What it refuses stands in its errors.
        done = run.ended(f"check-draft, {name}", "pipeline", "check-draft", draft, accepted=(0, _REFUSED),
                         out=subprocess.PIPE, errors=subprocess.STDOUT)  # fmt: skip
        said = [line for line in done.stdout.splitlines() if line.strip() and line[0] not in _BOX]
        found[name] = {"exit_code": done.returncode, "said": said}
    return found


def shift(plan: Plan) -> list[int]:
    """Copy the draft, with each layer id one too high: what mixed conventions look like.

    Returns:
        The ids of the copy.
    """
    draft = read_draft(plan.at.training / "draft")
    ids = [number + 1 for number in draft.config[KEY]]
    with_layers(draft, ids, plan.shifted / "draft")
    shutil.copy(plan.at.training / manifest.FILE_NAME, plan.shifted / manifest.FILE_NAME)
    return ids


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
