"""Hidden states to an EAGLE-3 draft, with the installed speculators' own model and trainer."""

from __future__ import annotations

import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import shims
from pipeline import manifest
from pipeline.config import TrainConfig
from pipeline.formats.registry import open_rows
from pipeline.lock import exclusive
from pipeline.progress import console, stage_progress
from pipeline.training_data import StateDataset, split_rows
from pipeline.training_inputs import TrainingData, check_inputs
from pipeline.training_metrics import metrics_to

METRICS_NAME = "metrics.jsonl"
DRAFT_NAME = "draft"
_CHECKPOINTS = "checkpoints"


@dataclass
class Trained:
    """What a run reached."""

    draft: Path
    metrics: Path
    start: dict[str, float] = field(default_factory=dict)
    """Validation metrics before the first step."""
    end: dict[str, float] = field(default_factory=dict)
    steps: int = 0
    seconds: float = 0.0
    adaptations: list[str] = field(default_factory=list)

    def summary(self) -> list[str]:
        """Lines for a person."""
        names = [name for name in self.end if name.startswith("full_acc")]
        lines = [f"{self.steps} steps in {self.seconds:.0f} s; used {', '.join(self.adaptations) or 'no adaptation'}"]
        lines.append(f"held-out loss {self.start['loss']:.3f} -> {self.end['loss']:.3f}")
        lines += [f"held-out {name} {self.start[name]:.1%} -> {self.end[name]:.1%}" for name in sorted(names)]
        lines.append(f"draft -> {self.draft}")
        return lines


def train(config: TrainConfig) -> Trained:
    """Train a draft and write it with its metrics.

    Returns:
        Validation metrics at start and end, and where everything lies. A finished run with the
        same settings is returned as it is.

    Raises:
        UsageError: see :func:`pipeline.training_inputs.check_inputs`.
        SpecshimError: speculators' training parts are missing, or training diverged.
    """
    data = check_inputs(config)
    with exclusive(config.output_dir):
        settings = _settings(config, data)
        done = _finished(config, settings)
        if done is not None:
            console.print("this training is finished already", highlight=False)
            return done
        return _run(config, data, settings)


def _settings(config: TrainConfig, data: TrainingData) -> dict[str, Any]:
    return {
        "model": manifest.describe_model(data.model),
        "inputs": {"prepared_data": data.record["inputs"]["prepared_data"], "rows": len(data.lengths)},
        "auxiliary_layers_native": list(data.layers.native[:-1]),
        "draft_vocab_size": len(data.d2t),
        "epochs": config.epochs,
        "lr": config.lr,
        "max_seq_len": config.max_seq_len,
        "ttt_steps": config.ttt_steps,
        "ttt_step_loss_decay": config.ttt_step_loss_decay,
        "num_layers": config.num_layers,
        "val_share": config.val_share,
        "noise_std": config.noise_std,
        "seed": config.seed,
    }


def _finished(config: TrainConfig, settings: dict[str, Any]) -> Trained | None:
    existing = manifest.read(config.output_dir, "train")
    # An unfinished training holds nothing to go on from, so another one may take its place.
    if existing is None or not existing["complete"]:
        return None
    manifest.require_same(
        str(config.output_dir / manifest.FILE_NAME),
        settings,
        existing,
        "choose another --output-dir, or repeat the command that began this one",
    )
    draft = config.output_dir / DRAFT_NAME
    if not (draft / "config.json").is_file():
        return None
    reached = existing["metrics"]
    return Trained(
        draft, config.output_dir / METRICS_NAME, reached["start"], reached["end"],
        existing["steps"], existing["seconds"], existing["adaptations"],
    )  # fmt: skip


def _run(config: TrainConfig, data: TrainingData, settings: dict[str, Any]) -> Trained:
    # Importing shims armed the hooks that let speculators load on this transformers.
    shims.install()
    import torch

    from pipeline import training_compat as compat

    torch.manual_seed(config.seed)
    device = ("cuda" if torch.cuda.is_available() else "cpu") if config.device == "auto" else config.device
    parts = compat.load_trainer_parts()
    compat.refuse_missing_verifier_weights(data.model, config.trust_remote_code)
    attention = compat.choose_attention(device)
    adaptations = _adaptations(device, attention, configs_mended=compat.let_configs_construct())
    for line in adaptations:
        console.print(f"adaptation: {line}", highlight=False, soft_wrap=True)
    manifest.write(config.output_dir, manifest.compose("train", with_plan=True, complete=False, **settings))
    result = Trained(config.output_dir / DRAFT_NAME, config.output_dir / METRICS_NAME, adaptations=adaptations)
    draft = _build_draft(config, data, parts, attention)
    loaders = _loaders(config, data, parts)
    shutil.rmtree(config.output_dir / _CHECKPOINTS, ignore_errors=True)
    trainer = parts.trainer_class(
        model=draft,
        config=parts.config_class(
            lr=config.lr,
            num_epochs=config.epochs,
            save_path=str(config.output_dir / _CHECKPOINTS),
            local_rank=compat.trainer_device(device),
            **_call_options(config, parts),
        ),
        train_loader=loaders[0],
        val_loader=loaders[1],
    )
    steps = config.epochs * len(loaders[0])
    started = time.monotonic()
    with (
        stage_progress("train", steps, unit="steps") as progress,
        metrics_to(result.metrics, progress, config.max_seq_len) as log,
    ):
        trainer.val_epoch(0)
        result.start = log.validation()
        for epoch in range(config.epochs):
            trainer.train_epoch(epoch)
            trainer.val_epoch(epoch)
            log.validation()
        result.end = log.validation()
        trainer.save_checkpoint(config.epochs - 1)
    result.steps, result.seconds = log.steps, time.monotonic() - started
    _publish(config.output_dir / _CHECKPOINTS / str(config.epochs - 1), result.draft)
    manifest.write(
        config.output_dir,
        manifest.compose(
            "train",
            with_plan=True,
            complete=True,
            steps=result.steps,
            seconds=round(result.seconds, 1),
            adaptations=adaptations,
            metrics={"start": result.start, "end": result.end},
            **settings,
        ),
    )
    return result


def _adaptations(device: str, attention: str, configs_mended: bool) -> list[str]:
    from pipeline.training_compat import DENSE_ATTENTION

    used = []
    if configs_mended:
        used.append("speculators' config classes get their own constructor back from transformers 5")
    if attention == DENSE_ATTENTION:
        used.append(f"dense attention mask: flex_attention has no backward on {device} in this torch")
    if not device.startswith("cuda"):
        used.append(f"device {device} in place of a CUDA rank")
    return used


def _build_draft(config: TrainConfig, data: TrainingData, parts: Any, attention: str) -> Any:
    import torch

    from pipeline import training_compat as compat

    full_vocabulary = len(data.d2t) == len(data.t2d)
    layer_config = compat.draft_layer_config(data.model, config.num_layers, attention)
    with compat.verifier_named(layer_config, data.model), compat.quiet_loading():
        draft = parts.draft_class.from_training_args(
            layer_config,
            num_layers=config.num_layers,
            norm_before_residual=False,
            draft_vocab_size=len(data.d2t),
            t2d=None if full_vocabulary else torch.from_numpy(data.t2d),
            d2t=None if full_vocabulary else torch.from_numpy(data.d2t),
            ttt_steps=config.ttt_steps,
            verifier_name_or_path=str(data.model.path.resolve()),
        )
    # What the server must feed it; speculators 0.4 leaves this empty.
    draft.config.eagle_aux_hidden_state_layer_ids = list(data.layers.native[:-1])
    return draft.float()


def _loaders(config: TrainConfig, data: TrainingData, parts: Any) -> tuple[Any, Any]:
    from torch.utils.data import DataLoader

    long_rows = sum(length - 1 > config.max_seq_len for length in data.lengths.values())
    if long_rows:
        console.print(f"{long_rows} rows are longer than {config.max_seq_len} tokens and are cut", highlight=False)
    loaders = []
    store = open_rows(config.data, data.record)
    for rows, noise in zip(
        split_rows(list(data.lengths), config.val_share, config.seed),
        (parts.noise_class(std=config.noise_std) if config.noise_std else None, None),
        strict=True,
    ):
        dataset: Any = StateDataset(store, rows, [data.lengths[row] for row in rows], parts.align, noise)
        sampler = parts.sampler_class(
            batch_max_length=config.max_seq_len, lengths=dataset.lengths, num_replicas=1, rank=0, seed=config.seed
        )
        loaders.append(DataLoader(dataset, batch_sampler=sampler, collate_fn=parts.collate(config.max_seq_len)))
    return loaders[0], loaders[1]


def _call_options(config: TrainConfig, parts: Any) -> dict[str, Any]:
    train_options, val_options = parts.draft_class.get_trainer_kwargs(
        use_off_policy_tokens=False, ttt_steps=config.ttt_steps, ttt_step_loss_decay=config.ttt_step_loss_decay
    )
    return {"train_call_kwargs": train_options, "val_call_kwargs": val_options}


def _publish(checkpoint: Path, draft: Path) -> None:
    """Copy what a server needs; optimizer and scheduler stay with the checkpoint."""
    shutil.rmtree(draft, ignore_errors=True)
    shutil.copytree(checkpoint, draft, ignore=shutil.ignore_patterns("*.pt"))
