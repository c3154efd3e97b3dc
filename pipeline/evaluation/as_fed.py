"""The draft as a server is to see it: itself, or a copy whose config names other layers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from pipeline.atomic import write_text
from pipeline.serving.draft_folder import WEIGHTS, DraftFolder, read_draft
from pipeline.serving.facts import KEY


def with_layers(draft: DraftFolder, ids: Sequence[int], output: Path) -> DraftFolder:
    """A draft whose config names these native ids; its weights are links to the first one's.

    Args:
        output: folder of the copy.
    """
    output.mkdir(parents=True, exist_ok=True)
    write_text(output / "config.json", json.dumps(draft.config | {KEY: list(ids)}, indent=2) + "\n")
    for link in output.glob(WEIGHTS):  # of another draft, maybe
        link.unlink()
    for file in draft.path.glob(WEIGHTS):
        (output / file.name).symlink_to(file.resolve())
    return read_draft(output)
