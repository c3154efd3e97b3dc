"""The installed speculators' trainer takes twenty steps on our data: the loss falls, the draft loads again.

``python tests/live_train.py --output result.json``; `nox -s live-train` runs it beside each speculators release in
an environment of its own. Also compared, tensor by tensor: our packed batches and those of the release's own collate
function. The states come from a tiny model computed by transformers; no vLLM is involved.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

from pipeline_fixtures import write_states

from pipeline.config import TrainConfig
from pipeline.formats.registry import open_rows
from pipeline.layers import default_ids
from pipeline.manifest import require_rows
from pipeline.train import train
from pipeline.training_batches import PackedRows
from pipeline.training_compat import let_configs_construct
from pipeline.training_draft import LAYER_IDS
from pipeline.training_metrics import read_metrics
from pipeline.training_series import installed_series
from pipeline.vocab import load_mapping

ROWS = 24
DRAFT = 64
HIDDEN = 64
LAYERS = 8
STEPS = 20
TOKENS = 256


def own_batch(items: list[dict[str, Any]], hidden: int) -> dict[str, Any]:
    """What the installed release's own shift and collate function make of whole rows."""
    import torch
    from speculators.train import data

    if hasattr(data, "shift_batch"):
        collate: Any = data.create_collate_fn(TOKENS)
        return dict(collate([data.shift_batch(item) for item in items]))
    from speculators.models.eagle3.data import shift_batch

    maker: Any = data.CollateFn if hasattr(data, "CollateFn") else data.create_collate_fn
    options = {"hidden_size": hidden, "preprocess": shift_batch}
    # 0.5 takes the type as it comes.
    if installed_series()[0].name != "0.5":
        options["dtype"] = torch.float32
    return dict(maker(TOKENS, **options)(items))


def batch_faults(root: Path) -> list[str]:
    """Where our packed batch is not the release's own."""
    import torch

    record = require_rows(root / "states", "states")
    store = open_rows(root / "states", record)
    series, _ = installed_series()
    rows = [3, 0, 5, 2]
    read = [store.read(row) for row in rows]
    packed = PackedRows(
        store, rows, [len(row.token_ids) for row in read], series, max_tokens=TOKENS, dtype=torch.float32
    )
    ours = packed[[range(len(rows))]]
    items = [
        {
            "hidden_states": row.states[:, :-1].flatten(1),
            "verifier_last_hidden_states": row.states[:, -1],
            "input_ids": row.token_ids,
            "loss_mask": row.loss_mask,
            "lengths": torch.tensor([len(row.token_ids)]),
            "position_ids": torch.arange(len(row.token_ids)),
        }
        for row in read
    ]
    theirs = own_batch(items, HIDDEN)
    ours.pop("tokens")
    faults = [] if set(ours) == set(theirs) else [f"batch: fields {sorted(ours)}, not {sorted(theirs)}"]
    for name in ours.keys() & theirs.keys():
        left, right = ours[name], theirs[name]
        same = torch.equal(left, right) and left.dtype == right.dtype if hasattr(left, "shape") else left == right
        if not same:
            faults.append(f"batch: {name} is not what speculators makes of these rows")
    return faults


def draft_faults(draft: Path, root: Path) -> list[str]:
    """Where a published draft is not what it should be, read back by speculators' own class."""
    import torch
    from safetensors.torch import load_file
    from speculators import SpeculatorModelConfig
    from speculators.models.eagle3 import Eagle3DraftModel

    let_configs_construct()
    d2t, t2d = (torch.from_numpy(array) for array in load_mapping(root / "prepared"))
    config = SpeculatorModelConfig.from_pretrained(str(draft))
    stored = load_file(draft / "model.safetensors")
    if installed_series()[0].name == "0.4":
        # Its from_pretrained hands its own draft class arguments that the class does not take.
        model = Eagle3DraftModel(config, t2d=t2d, d2t=d2t)
        model.load_state_dict(stored, strict=False)
    else:
        model = Eagle3DraftModel.from_pretrained(str(draft), config=config)
    loaded = model.state_dict()
    wanted = list(default_ids(LAYERS).native[:-1])
    faults = [] if getattr(config, LAYER_IDS) == wanted else [f"ids {getattr(config, LAYER_IDS)}, not {wanted}"]
    faults += [
        f"{name} changed when it was loaded"
        for name, value in stored.items()
        if name not in loaded or not torch.equal(loaded[name].to(value.dtype), value)
    ]
    if not torch.equal(stored["d2t"], d2t) or not torch.equal(stored["t2d"], t2d):
        faults.append("another vocabulary mapping")
    return faults


def main() -> int:
    """Train, look, read back. Exit code 1 if anything is wrong."""
    parser = argparse.ArgumentParser(description="Train with the installed speculators.")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        model = write_states(root, rows=ROWS, hidden=HIDDEN, layers=LAYERS, draft=DRAFT)
        faults = batch_faults(root)
        result = train(
            TrainConfig(
                root / "states", root / "prepared", str(model), root / "training",
                epochs=100, max_steps=STEPS, lr=3e-3, max_seq_len=TOKENS, device="cpu", ttt_steps=2, val_steps=10,
            )
        )  # fmt: skip
        losses = [line["loss"] for line in read_metrics(result.metrics) if line["kind"] == "train"]
        if len(losses) != STEPS or not all(map(math.isfinite, losses)):
            faults.append(f"{len(losses)} losses, {sum(map(math.isfinite, losses))} of them finite")
        elif not sum(losses[-5:]) < 0.9 * sum(losses[:5]) or not result.end["loss"] < 0.9 * result.start["loss"]:
            faults.append(f"the loss does not fall: {losses}")
        faults += draft_faults(result.draft, root)
    outcome = {
        "speculators": version("speculators"), "torch": version("torch"), "transformers": version("transformers"),
        "steps": len(losses), "first_loss": losses[0], "last_loss": losses[-1],
        "held_out": [result.start["loss"], result.end["loss"]],
        "held_out_first_token": [result.start["full_acc_0"], result.end["full_acc_0"]],
        "adaptations": result.adaptations, "faults": faults,
    }  # fmt: skip
    print(json.dumps(outcome))
    if options.output:
        options.output.write_text(json.dumps(outcome, indent=2) + "\n")
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
