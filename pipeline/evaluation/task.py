"""What all parts of an evaluation have in common, checked before anything is loaded."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from typing import Any

from pipeline import manifest
from pipeline.atomic import write_text
from pipeline.config import EvaluateConfig
from pipeline.devices import check_device, device_type
from pipeline.evaluation.as_fed import with_layers
from pipeline.evaluation.held_out import HeldOut, Row
from pipeline.evaluation.parts import Parts
from pipeline.evaluation.request import DRAFT, NGRAM, NONE, UNTRAINED
from pipeline.model_info import ModelInfo, sha256_file
from pipeline.progress import console
from pipeline.serving.check import CheckConfig, Checked, check_draft
from pipeline.serving.draft_folder import DraftFolder, read_draft
from pipeline.serving.facts import AUXILIARY_STATES
from shims.errors import UsageError
from shims.releases import known
from shims.versions import base_release, installed, newest_first

SEED = 0
_PARTS, _AS_FED, _UNTRAINED = "parts", "as_fed", "untrained"
_MADE_FROM = "made_from.json"
FILES = {NONE: "none", NGRAM: "ngram", DRAFT: "draft", UNTRAINED: "untrained"}
"""Kind of an engine -> how the files about it are called."""


@dataclass(frozen=True)
class Task:
    """One evaluation."""

    config: EvaluateConfig
    checked: Checked
    fed: DraftFolder
    """The draft as it is served: with other layers, where those are forced."""
    layers: tuple[int, ...]
    steps: int
    device: str
    parts: Parts
    held_out: HeldOut | None

    @property
    def verifier(self) -> ModelInfo:
        """The model that the draft is for."""
        return self.checked.verifier


def check_options(config: EvaluateConfig) -> None:
    """Everything that the options alone can be refused for.

    Raises:
        UsageError: with the option's name.
    """
    if config.layer_ids and not config.force:
        raise UsageError(
            "--layer-ids", "--force beside it", "no --force", "leave both out to evaluate the draft as it is"
        )
    if config.layer_ids and len(config.layer_ids) != AUXILIARY_STATES:
        found = str(len(config.layer_ids))
        raise UsageError("--layer-ids", f"{AUXILIARY_STATES} native ids", found, "give as many")
    if config.rows not in ("held-out", "all"):
        raise UsageError("--rows", "held-out or all", repr(config.rows), "give one of the two")
    for flag, number in (
        ("--max-prompts", config.max_prompts), ("--max-tokens", config.max_tokens),
        ("--max-num-seqs", config.max_num_seqs), ("--steps", config.steps), ("--max-rows", config.max_rows),
    ):  # fmt: skip
        if number is not None and number < 1:
            raise UsageError(flag, "at least 1", str(number), "give a larger number")
    if config.device != "auto":
        check_device("--device", config.device)
    here = installed("vllm")
    if config.serve and config.vllm and here and base_release(config.vllm) != base_release(here):
        raise UsageError(
            "--vllm", f"the release that will serve, {base_release(here)}, which is installed here", config.vllm,
            "leave it out, or add --no-serve",
        )  # fmt: skip
    if config.data is None and not config.serve:
        raise UsageError("--data, --no-serve", "something to evaluate", "neither rows nor a server", "give --data")
    if config.data is None and config.prompts is None:
        raise UsageError("--prompts", "questions, where there is no --data", "none", "give --prompts FILE")


def checked_draft(config: EvaluateConfig) -> Checked:
    """Does the draft fit the server? Nothing else is loaded before that is known.

    Raises:
        SpecshimError: it does not, and is not forced.
    """
    release = config.vllm or installed("vllm") or newest_first(known())[0]
    checked = check_draft(
        CheckConfig(config.draft, release, config.model, config.trained_layer_ids, True, config.trust_remote_code)
    )
    for finding in checked.findings:
        if finding not in checked.mismatches or config.force:
            console.print(f"{finding.kind}: {finding}", highlight=False, markup=False, soft_wrap=True)
    if checked.mismatches and not config.force:
        raise checked.mismatches[0].error()
    return checked


def task_of(config: EvaluateConfig, checked: Checked) -> Task:
    """Put together what the parts need.

    Raises:
        UsageError: the data is another model's, or no layers or rows are known.
    """

    served = next(iter(checked.served.layers.values()), None)
    layers = config.layer_ids or (tuple(served.ids) if served else checked.trained.layers)
    if not layers:
        raise UsageError(
            str(checked.draft.path), "layers that feed the draft", "none known", "say them: --trained-layer-ids"
        )
    last = checked.verifier.num_layers
    outside = [i for i in layers if not 0 <= i <= last]
    if outside:
        raise UsageError(
            "--layer-ids" if config.layer_ids else str(checked.draft.path),
            f"native ids from 0 to {last}, the verifier's layers", str(outside[0]), "name layers that there are",
        )  # fmt: skip
    fed = with_layers(checked.draft, layers, config.output_dir / _AS_FED) if config.layer_ids else checked.draft
    held_out = None
    if config.data is not None:
        held_out = HeldOut(config.data, checked.trained.record, config.rows)
        if held_out.fingerprint != checked.verifier.fingerprint:
            raise UsageError(
                f"--data {config.data}", f"states of {checked.verifier.path}",
                f"those of another model ({held_out.record['model']['path']})", "extract them from the verifier",
            )  # fmt: skip
        if not held_out.rows:
            raise UsageError(f"--data {config.data}", "at least one row", "none", "extract more rows")
    return Task(
        config=config,
        checked=checked,
        fed=fed,
        layers=tuple(layers),
        steps=config.steps or checked.draft.speculative_tokens or AUXILIARY_STATES,
        device=device_type(config.device),
        parts=Parts(config.output_dir / _PARTS),
        held_out=held_out,
    )


def untrained_draft(task: Task) -> DraftFolder:
    """The same draft with fresh weights, made once for each draft."""
    from pipeline.evaluation.draft_model import write_untrained

    folder = task.config.output_dir / _UNTRAINED
    told, made_from = folder / _MADE_FROM, json.dumps(facts_of(task, task.fed), sort_keys=True)
    if not told.is_file() or told.read_text(encoding="utf-8") != made_from:
        shutil.rmtree(folder, ignore_errors=True)
        write_untrained(task.fed, task.verifier, folder, SEED, task.config.trust_remote_code)
        write_text(told, made_from)
    return read_draft(folder)


def chosen_rows(task: Task) -> list[Row]:
    """The rows that are looked at; none without data."""
    if task.held_out is None:
        return []
    return [task.held_out.row(index) for index in task.held_out.rows[: task.config.max_rows]]


def facts_of(task: Task, draft: DraftFolder) -> dict[str, Any]:
    """What a part's result depends on, beside its own inputs."""
    files = sorted(draft.path.glob("*.safetensors"))
    return {
        "draft": {file.name: sha256_file(file) for file in [draft.path / "config.json", *files]},
        "verifier": task.verifier.fingerprint,
        "layers": task.layers,
        "steps": task.steps,
        "versions": manifest.installed_versions(),
    }
