"""Questions to a served draft, each stage the public command in a process of its own; what is finished is kept."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.acceptance.questions import questions
from pipeline import manifest
from pipeline.prepared import DATA_NAME
from pipeline.regenerate import NAME as ANSWERS

IDS_KEY = "eagle_aux_hidden_state_layer_ids"
_REFUSED = 1  # exit code of check-draft and evaluate for a draft that does not fit
_BOX = "┌│└"  # of a table, which names paths
_ENVIRONMENT = {"VLLM_LOGGING_LEVEL": "WARNING", "VLLM_NO_USAGE_STATS": "1", "TOKENIZERS_PARALLELISM": "false"}


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
    seed: int = 0

    @property
    def prepared(self) -> Path:
        """Token ids and vocabulary."""
        return self.work / "prepared"

    @property
    def states(self) -> Path:
        """Hidden states of the model's own answers."""
        return self.work / "states"

    @property
    def training(self) -> Path:
        """The draft and its manifest."""
        return self.work / "training"

    @property
    def shifted(self) -> Path:
        """A copy of them whose config names each layer one later."""
        return self.work / "shifted"

    def evaluation(self, name: str) -> Path:
        """Folder of a report."""
        return self.work / f"evaluation-{name}"


def run(
    module: str, *arguments: object, accepted: tuple[int, ...] = (0,), errors: int | None = None
) -> subprocess.CompletedProcess[str]:
    """``python -m module arguments``; its messages go to the screen as well.

    Args:
        errors: subprocess.STDOUT to have its errors in the result.

    Raises:
        SystemExit: another exit code than those accepted.
    """
    command = [sys.executable, "-m", module, *map(str, arguments)]
    print("$", " ".join(command), flush=True)
    done = subprocess.run(
        command, env=_ENVIRONMENT | os.environ, check=False, text=True, stdout=subprocess.PIPE, stderr=errors
    )
    print(done.stdout, end="", flush=True)
    if done.returncode not in accepted:
        raise SystemExit(f"exit code {done.returncode}; see above, and run the same command again to go on")
    return done


def answer(plan: Plan) -> None:
    """The model's own answers, and their states."""
    plan.work.mkdir(parents=True, exist_ok=True)
    every = questions(plan.count + plan.asked, plan.seed)
    learned, fresh = plan.work / "questions.jsonl", plan.work / "fresh.jsonl"
    _write(learned, [{"messages": [{"role": "user", "content": text}]} for text in every[: plan.count]])
    _write(fresh, [{"prompt": text} for text in every[plan.count :]])
    model, data = ("--model-path", plan.model), plan.prepared
    # Greedily, as the draft will be served.
    asking = ("--temperature", 0, "--top-p", 1, "--max-reply-tokens", plan.reply_tokens, "--batch-size", 4096)
    answers = plan.work / "answers"
    run("pipeline", "regenerate", *model, "--input", learned, "--output-dir", answers, *asking,
        "--max-model-len", 1024, "--dtype", plan.dtype)  # fmt: skip
    run("pipeline", "prepare", *model, "--input", answers / ANSWERS, "--output-dir", data, "--workers", plan.workers)
    run("pipeline", "vocab", "--prepared", data, "--draft-vocab-size", plan.draft_vocab)
    run("pipeline", "extract", *model, "--prepared-data", data / DATA_NAME, "--output-dir", plan.states,
        "--dtype", plan.dtype, "--batch-size", 1024)  # fmt: skip


def learn(plan: Plan) -> None:
    """The draft."""
    settings = ("--epochs", plan.epochs, "--lr", 1e-3, "--scheduler", "cosine", "--max-seq-len", plan.batch_tokens)
    inputs = ("--data", plan.states, "--vocab", plan.prepared, "--model", plan.model, "--output-dir", plan.training)
    kept = ("--val-share", 0.02, "--save-steps", 500, "--workers", plan.workers)
    if plan.processes == 1:
        run("pipeline", "train", *inputs, *settings, *kept)
    else:
        run("torch.distributed.run", "--standalone", "--nproc-per-node", plan.processes, "-m", "pipeline", "train",
            *inputs, *settings, *kept)  # fmt: skip


def serve(plan: Plan, name: str, *options: object, shifted: bool = False) -> Path:
    """The draft, or its shifted copy, in vLLM; the fresh questions are asked.

    Returns:
        The folder of the report.
    """
    folder = plan.evaluation(name)
    draft = plan.shifted if shifted else plan.training
    run("pipeline", "evaluate", "--draft", draft, "--data", plan.states, "--output-dir", folder,
        "--prompts", plan.work / "fresh.jsonl", "--max-prompts", plan.asked, "--max-tokens", plan.reply_tokens,
        "--max-rows", 200, *options, *(["--enforce-eager"] if plan.eager else []), accepted=(0, _REFUSED))  # fmt: skip
    return folder


def check(plan: Plan) -> dict[str, Any]:
    """What check-draft says of the draft and of its shifted copy."""
    found = {}
    for name, draft in (("trained", plan.training), ("shifted", plan.shifted)):
        done = run("pipeline", "check-draft", draft, accepted=(0, _REFUSED))
        found[name] = {
            "exit_code": done.returncode,
            "said": [line for line in done.stdout.splitlines() if line.strip()],
        }
    return found


def shift(plan: Plan) -> list[int]:
    """Copy the draft, with each layer id one too high: what mixed conventions look like.

    Returns:
        The ids of the copy.
    """
    shutil.copytree(plan.training / "draft", plan.shifted / "draft", dirs_exist_ok=True)
    shutil.copy(plan.training / manifest.FILE_NAME, plan.shifted / manifest.FILE_NAME)
    path = plan.shifted / "draft" / "config.json"
    config = json.loads((plan.training / "draft" / "config.json").read_text(encoding="utf-8"))
    ids = [number + 1 for number in config[IDS_KEY]]
    path.write_text(json.dumps(config | {IDS_KEY: ids}, indent=2), encoding="utf-8")
    return ids


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
