"""Everything a training needs to go on exactly where it was: written whole or not at all.

`checkpoints/step-00000120/` holds `weights.safetensors` (the trainable parameters, float32), `optimizer.pt`
(optimizers, schedulers and random numbers; read with ``weights_only=True``) and `progress.json`, which comes last.
"""

from __future__ import annotations

import json
import random
import re
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pipeline.atomic import sync_content, sync_folder
from pipeline.disk import DiskFull, free_bytes, human
from shims.errors import SpecshimError

FOLDER = "checkpoints"
METRICS_NAME = "metrics.jsonl"
DRAFT_NAME = "draft"
_NAME = re.compile(r"step-(\d{8,})")
_WEIGHTS, _OPTIMIZER, _PROGRESS = "weights.safetensors", "optimizer.pt", "progress.json"
_UNDER_WAY = ".new"


@dataclass
class Progress:
    """How far a training is."""

    step: int = 0
    """Optimizer steps done."""
    epoch: int = 0
    position: int = 0
    """Batches of this epoch that are done."""
    start: dict[str, float] = field(default_factory=dict)
    """Held-out metrics before the first step."""
    last: dict[str, float] = field(default_factory=dict)
    """Held-out metrics of the latest validation."""
    best: dict[str, float] = field(default_factory=dict)
    """Held-out metrics of the published draft."""
    best_step: int = 0
    not_better: int = 0
    """Validations since the best one."""
    stopped: str = ""
    """Why the training ended before its last epoch; empty where it did not."""
    metrics_bytes: int = 0
    """Length of the metrics file at this point."""
    seconds: float = 0.0
    speculators: str = ""


def latest(folder: Path) -> Path | None:
    """The newest whole checkpoint below ``folder``; None where there is none."""
    found = sorted((int(m[1]), path) for path in folder.glob("step-*") if (m := _NAME.fullmatch(path.name)))
    return next((path for _, path in reversed(found) if (path / _PROGRESS).is_file()), None)


def read_progress(checkpoint: Path) -> Progress:
    """How far the training was.

    Raises:
        SpecshimError: the file is not one of this version.
    """
    try:
        return Progress(**json.loads((checkpoint / _PROGRESS).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise _unreadable(checkpoint / _PROGRESS, error) from error


def write(folder: Path, progress: Progress, weights: dict[str, Any], training: dict[str, Any], keep: int) -> Path:
    """Write a checkpoint and remove all but the newest ``keep``.

    Args:
        weights: contiguous tensors by name.
        training: what ``torch.load(weights_only=True)`` takes.

    Raises:
        DiskFull: it does not fit; the checkpoints before are whole.
    """
    import torch
    from safetensors.torch import save_file

    target = folder / f"step-{progress.step:08d}"
    new = target.with_name(f".{target.name}{_UNDER_WAY}")
    shutil.rmtree(new, ignore_errors=True)
    needed, free = _bytes_of([weights, training]), free_bytes(folder)
    if needed > free:
        raise DiskFull(
            str(target),
            f"{human(needed)} for a checkpoint",
            f"{human(free)} free",
            "make room, then run the same command again: it goes on from the last checkpoint (--keep-checkpoints says "
            "how many are kept)",
        )
    new.mkdir(parents=True)
    save_file(weights, new / _WEIGHTS)
    with (new / _OPTIMIZER).open("wb") as file:  # a file of ours says why it cannot be written
        torch.save(training, file)
    (new / _PROGRESS).write_text(json.dumps(asdict(progress), indent=2) + "\n", encoding="utf-8")
    sync_content(new)
    shutil.rmtree(target, ignore_errors=True)
    new.rename(target)
    sync_folder(folder)
    clear(folder, keep)
    return target


def _bytes_of(value: Any) -> int:
    """Of all tensors in nested dictionaries and lists."""
    if isinstance(value, dict):
        return sum(map(_bytes_of, value.values()))
    if isinstance(value, list | tuple):
        return sum(map(_bytes_of, value))
    return int(value.nbytes) if hasattr(value, "nbytes") else 0


def clear(folder: Path, keep: int) -> None:
    """Remove what a killed run left half written, and all but the newest ``keep`` checkpoints."""
    for path in folder.glob(f".step-*{_UNDER_WAY}"):
        shutil.rmtree(path, ignore_errors=True)
    whole = sorted((int(m[1]), path) for path in folder.glob("step-*") if (m := _NAME.fullmatch(path.name)))
    for _, path in whole[: max(0, len(whole) - keep)]:
        shutil.rmtree(path, ignore_errors=True)


def read(checkpoint: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Weights by name, and the rest; nothing in the files is run.

    Raises:
        SpecshimError: a file cannot be read.
    """
    import torch
    from safetensors.torch import load_file

    try:
        weights = load_file(checkpoint / _WEIGHTS)
        training = torch.load(checkpoint / _OPTIMIZER, weights_only=True, map_location="cpu")
    except Exception as error:  # torch and safetensors raise what they like
        raise _unreadable(checkpoint, error) from error
    return weights, training


def random_state() -> dict[str, Any]:
    """The random numbers of this process, as `torch.load(weights_only=True)` takes them."""
    import torch

    kind, numbers, gauss = random.getstate()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return {"torch": torch.get_rng_state(), "cuda": cuda, "python": [kind, list(numbers), gauss]}


def set_random_state(state: dict[str, Any]) -> None:
    """Undo :func:`random_state`."""
    import torch

    torch.set_rng_state(state["torch"])
    # It may go on where there are fewer devices.
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    torch.cuda.set_rng_state_all(state["cuda"][:devices])
    kind, numbers, gauss = state["python"]
    random.setstate((kind, tuple(numbers), gauss))


def _unreadable(path: Path, error: Exception) -> SpecshimError:
    text = str(error).splitlines()[0] if str(error) else "unreadable"
    return SpecshimError(
        str(path),
        "a checkpoint of this version",
        f"{type(error).__name__}: {text}",
        "remove that checkpoint; the same command goes on from the one before, or from the start",
    )
