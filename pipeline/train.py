"""Hidden states to an EAGLE-3 draft, with the installed speculators' own model and trainer.

Killed at any step, the same command goes on from the last checkpoint, and ends where an undisturbed run ends.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import shims
from pipeline import manifest
from pipeline import training_checkpoint as checkpoints
from pipeline.config import TrainConfig
from pipeline.devices import check_device
from pipeline.formats.arrays import npy_bytes
from pipeline.lock import exclusive
from pipeline.model_info import sha256_file
from pipeline.progress import console
from pipeline.training_checkpoint import DRAFT_NAME, METRICS_NAME
from pipeline.training_inputs import TrainingData, check_inputs
from pipeline.training_parallel import Ranks, joined, ranks_of_environment
from shims.errors import UsageError
from shims.versions import installed


@dataclass
class Trained:
    """What a run reached."""

    draft: Path
    metrics: Path
    start: dict[str, float] = field(default_factory=dict)
    """Validation metrics before the first step."""
    end: dict[str, float] = field(default_factory=dict)
    best: dict[str, float] = field(default_factory=dict)
    """Validation metrics of the published draft."""
    best_step: int = 0
    steps: int = 0
    seconds: float = 0.0
    adaptations: list[str] = field(default_factory=list)
    stopped: str = ""
    """Why it ended before its last epoch; empty where it did not."""
    computed_in: str = ""
    """The dtype that `auto` came to."""
    first: bool = True
    """Whether this process is the one that tells."""

    def summary(self) -> list[str]:
        """Lines for a person."""
        names = [name for name in self.best if name.startswith("full_acc")]
        lines = [f"{self.steps} steps in {self.seconds:.0f} s; used {', '.join(self.adaptations) or 'no adaptation'}"]
        lines += [f"ended early: {self.stopped}"] if self.stopped else []
        lines.append(f"held-out loss {self.start['loss']:.3f} -> {self.best['loss']:.3f} at step {self.best_step}")
        lines += [f"held-out {name} {self.start[name]:.1%} -> {self.best[name]:.1%}" for name in sorted(names)]
        if self.best["loss"] > self.start["loss"]:
            lines.append("no validation was better than the one before the first step")
        lines.append(f"draft -> {self.draft}")
        return lines


def train(config: TrainConfig) -> Trained:
    """Train a draft and write it with its metrics.

    Returns:
        Validation metrics at start, best and end, and where everything lies. A finished run with the
        same settings is returned as it is.

    Raises:
        UsageError: see :func:`pipeline.training_inputs.check_inputs`.
        SpecshimError: speculators' training parts are missing, or training diverged.
    """
    ranks = ranks_of_environment()
    if ranks.size == 1:
        data = check_inputs(config)
        with joined(ranks, config.device), exclusive(config.output_dir):
            return _train(config, data, ranks, config.device)
    # The first process looks at the rows and holds the folder; the others take its word.
    console.quiet = not ranks.first
    device = ranks.device(config.device)
    check_device("--device", device)
    with joined(ranks, device):
        first = check_inputs(config) if ranks.first else None
        # Looking at millions of rows takes longer than NCCL waits.
        ranks.wait_for_first()
        lengths = ranks.told(None if first is None else first.lengths)
        data = first or check_inputs(config, lengths)
        if not ranks.first:
            return _train(config, data, ranks, device)
        with exclusive(config.output_dir):
            return _train(config, data, ranks, device)


def _train(config: TrainConfig, data: TrainingData, ranks: Ranks, device: str) -> Trained:
    from pipeline.training_init import read_initial

    initial = read_initial(config, data)
    settings = _settings(config, data, ranks, None if initial is None else initial.fingerprint)
    done = ranks.told(_finished(config, settings) if ranks.first else None)
    if done is not None:
        console.print("this training is finished already", highlight=False)
        done.first = ranks.first
        return done  # type: ignore[no-any-return]
    resume: Path | None = ranks.told(_checkpoint(config, settings) if ranks.first else None)
    # Importing shims armed the hooks that let speculators load on this transformers.
    shims.install()
    from pipeline.training_run import Run

    run = Run(config, data, initial, ranks, device)
    if ranks.first and resume is None:
        manifest.write(config.output_dir, manifest.compose("train", with_plan=True, complete=False, **settings))
    progress = run.train(resume)
    result = Trained(
        config.output_dir / DRAFT_NAME, config.output_dir / METRICS_NAME, progress.start, progress.last,
        progress.best, progress.best_step, progress.step, progress.seconds, run.adaptations, progress.stopped,
        run.dtype, ranks.first,
    )  # fmt: skip
    if ranks.first:
        manifest.write(config.output_dir, _manifest(settings, result))
        shutil.rmtree(config.output_dir / checkpoints.FOLDER, ignore_errors=True)
    ranks.wait()
    return result


def _manifest(settings: dict[str, Any], result: Trained) -> dict[str, Any]:
    return manifest.compose(
        "train",
        with_plan=True,
        complete=True,
        outputs={file.name: sha256_file(file) for file in sorted(result.draft.iterdir()) if file.is_file()},
        steps=result.steps,
        seconds=round(result.seconds, 1),
        adaptations=result.adaptations,
        metrics={"start": result.start, "end": result.end, "best": result.best},
        best_step=result.best_step,
        stopped=result.stopped,
        computed_in=result.computed_in,
        **settings,
    )


def _settings(config: TrainConfig, data: TrainingData, ranks: Ranks, initial: str | None) -> dict[str, Any]:
    """What decides the numbers; a run goes on, or counts as done, only where all of it is the same."""
    names = (
        "epochs", "lr", "max_seq_len", "ttt_steps", "ttt_step_loss_decay", "num_layers", "val_share", "noise_std",
        "seed", "dtype", "draft_dtype", "max_steps", "scheduler", "warmup_steps", "val_steps", "patience",
    )  # fmt: skip
    return {
        "model": manifest.describe_model(data.model),
        "inputs": _inputs(data) | {"init_from": initial},
        "auxiliary_layers_native": list(data.layers.native[:-1]),
        "draft_vocab_size": len(data.d2t),
        # n devices with one batch each take the same steps as one with n.
        "batches_per_step": ranks.size * config.accumulate,
        **{name: getattr(config, name) for name in names},
    }


def _inputs(data: TrainingData) -> dict[str, Any]:
    """Which states and which vocabulary: of other ones a step has other rows, or a row of the head another meaning."""
    record = data.record
    lengths = json.dumps(sorted(data.lengths.items())).encode()
    mapping = npy_bytes(data.d2t) + npy_bytes(data.t2d)
    return {
        "prepared_data": manifest.rows_identity(record),
        "states": {name: record.get(name) for name in ("dtype", "store_dtype", "row_limit")},
        "rows": len(data.lengths),
        "lengths": hashlib.sha256(lengths).hexdigest(),
        "vocab": hashlib.sha256(mapping).hexdigest(),
    }


def _finished(config: TrainConfig, settings: dict[str, Any]) -> Trained | None:
    existing = manifest.read(config.output_dir, "train")
    if existing is None or not existing["complete"]:
        return None
    _require_same(config, settings, existing)
    draft = config.output_dir / DRAFT_NAME
    if not draft.is_dir():
        return None
    for name, stated in existing.get("outputs", {}).items():
        found = sha256_file(draft / name) if (draft / name).is_file() else "no such file"
        if found != stated:
            raise UsageError(
                str(draft / name),
                f"sha256 {stated}, as the finished training wrote it",
                found,
                f"put the file back, or remove {draft} and train again",
            )
    reached = existing["metrics"]
    return Trained(
        draft, config.output_dir / METRICS_NAME, reached["start"], reached["end"], reached["best"],
        existing["best_step"], existing["steps"], existing["seconds"], existing["adaptations"], existing["stopped"],
        existing.get("computed_in", ""),
    )  # fmt: skip


def _checkpoint(config: TrainConfig, settings: dict[str, Any]) -> Path | None:
    """Where to go on from; an unfinished training without a checkpoint may be replaced by any other."""
    folder = config.output_dir / checkpoints.FOLDER
    found = checkpoints.latest(folder)
    if found is None:
        return None
    existing = manifest.require(config.output_dir, "train", "--output-dir")
    _require_same(config, settings, existing)
    stated, here = checkpoints.read_progress(found).speculators, installed("speculators")
    if stated != here:
        raise UsageError(
            str(found), f"speculators {stated}, which began this training", f"speculators {here}",
            "go on with that release, or choose another --output-dir",
        )  # fmt: skip
    return found


def _require_same(config: TrainConfig, settings: dict[str, Any], existing: dict[str, Any]) -> None:
    manifest.require_same(
        str(config.output_dir / manifest.FILE_NAME),
        settings,
        existing,
        "choose another --output-dir, or repeat the command that began this one",
    )
