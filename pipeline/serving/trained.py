"""What a draft was trained on: its training manifest, or what the user says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline import manifest
from pipeline.model_info import ModelInfo
from pipeline.serving.draft_folder import DraftFolder
from pipeline.serving.facts import KEY, NESTED_V2


@dataclass(frozen=True)
class Trained:
    """The verifier and the states that a draft has learned from."""

    known_by: str
    """Where this was found."""
    layers: tuple[int, ...] | None
    """Native ids of the auxiliary states; None where nobody says."""
    fingerprint: str | None = None
    """Of the verifier's files."""
    model_path: str | None = None
    hidden_size: int | None = None
    vocab_size: int | None = None
    draft_vocab_size: int | None = None
    record: dict[str, Any] | None = None
    """The whole manifest."""


def trained_on(draft: DraftFolder, stated: Sequence[int] | None = None) -> Trained:
    """What the draft has learned from.

    Args:
        stated: native ids that the user names, for a draft without manifest.

    Raises:
        UsageError: there is a manifest that cannot be read.
    """
    record = manifest_of(draft.path)
    if record is None:
        if stated:
            return Trained("--trained-layer-ids", tuple(stated))
        # A config that names layers is a claim of who trained it; one that names none says nothing.
        return Trained("its own config", draft.top_level_ids or draft.nested_ids(KEY) or draft.nested_ids(NESTED_V2))
    model = record["model"]
    layers = record.get("auxiliary_layers_native")
    return Trained(
        known_by=f"the training's {manifest.FILE_NAME}",
        layers=tuple(stated or layers or ()) or None,
        fingerprint=model["fingerprint"],
        model_path=model["path"],
        hidden_size=model["hidden_size"],
        vocab_size=model["vocab_size"],
        draft_vocab_size=record.get("draft_vocab_size"),
        record=record,
    )


def manifest_of(draft: Path) -> dict[str, Any] | None:
    """The manifest of the training that wrote this draft, beside or above it."""
    for folder in (draft, draft.resolve().parent):
        if (folder / manifest.FILE_NAME).is_file():
            return manifest.read(folder, "train")
    return None


def same_model(trained: Trained, verifier: ModelInfo) -> bool | None:
    """Whether the verifier is the one the draft has learned from; None where nobody says."""
    return None if trained.fingerprint is None else verifier.fingerprint == trained.fingerprint
