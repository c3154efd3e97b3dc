"""Token counts to a draft vocabulary: d2t.npy and t2d.npy.

A draft token i stands for target token ``i + d2t[i]``; ``t2d`` marks the target tokens that
have a draft token. Selection follows speculators: the most frequent trainable tokens, the
smaller id first among equals, padded with the smallest unseen ids.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline import manifest
from pipeline.atomic import write_bytes
from pipeline.config import VocabConfig
from pipeline.lock import exclusive
from pipeline.model_info import sha256_file
from pipeline.prepare import FREQ_NAME
from shims.errors import SpecshimError, UsageError

D2T_NAME = "d2t.npy"
T2D_NAME = "t2d.npy"
# prepare's manifest.json lies in the same folder.
MANIFEST_NAME = "vocab_manifest.json"


@dataclass(frozen=True)
class VocabResult:
    """What a run chose."""

    draft_vocab_size: int
    target_vocab_size: int
    seen: int
    """Distinct trainable tokens in the data."""
    padded: int
    """Unseen ids added to reach the size."""
    coverage: float
    """Share of the trainable tokens that have a draft token, 0 to 1."""


def select_tokens(frequency: Mapping[int, int], draft_vocab_size: int, target_vocab_size: int) -> list[int]:
    """The target ids of the draft vocabulary, ascending.

    Args:
        frequency: token id -> count; ids below ``target_vocab_size``.

    Raises:
        ValueError: more draft than target tokens, or an id outside the target vocabulary.
    """
    if not 1 <= draft_vocab_size <= target_vocab_size:
        raise ValueError(f"draft vocabulary of {draft_vocab_size} for a target vocabulary of {target_vocab_size}")
    if frequency and not 0 <= min(frequency) <= max(frequency) < target_vocab_size:
        raise ValueError(
            f"token ids from {min(frequency)} to {max(frequency)}, target vocabulary of {target_vocab_size}"
        )
    chosen = sorted(frequency, key=lambda token: (-frequency[token], token))[:draft_vocab_size]
    taken = set(chosen)
    unseen = (token for token in range(target_vocab_size) if token not in taken)
    while len(chosen) < draft_vocab_size:
        chosen.append(next(unseen))
    return sorted(chosen)


def mapping_arrays(chosen: list[int], target_vocab_size: int) -> tuple[Any, Any]:
    """The two numpy arrays for ascending target ids.

    Returns:
        d2t int64 [draft], t2d bool [target].
    """
    import numpy as np

    ids = np.asarray(chosen, dtype=np.int64)
    t2d: Any = np.zeros(target_vocab_size, dtype=np.bool_)
    t2d[ids] = True
    return ids - np.arange(len(chosen), dtype=np.int64), t2d


def fault_of(d2t: Any, t2d: Any) -> str | None:
    """What is wrong with a pair of mapping arrays; None when they agree."""
    import numpy as np

    if d2t.dtype != np.int64 or d2t.ndim != 1 or t2d.dtype != np.bool_ or t2d.ndim != 1:
        return f"d2t {d2t.dtype}{list(d2t.shape)}, t2d {t2d.dtype}{list(t2d.shape)}, not int64[n] and bool[m]"
    marked = np.flatnonzero(t2d)
    if len(marked) != len(d2t):
        return f"t2d marks {len(marked)} tokens, d2t has {len(d2t)}"
    wrong = np.flatnonzero(np.arange(len(d2t)) + d2t != marked)
    if len(wrong):
        return f"draft token {wrong[0]} maps to {wrong[0] + d2t[wrong[0]]}, t2d says {marked[wrong[0]]}"
    return None


def load_mapping(folder: Path, flag: str = "--vocab", fingerprint: str | None = None) -> tuple[Any, Any]:
    """Read and check d2t.npy and t2d.npy; never unpickles.

    Raises:
        UsageError: a file is missing or unreadable, or the two disagree.
    """
    d2t, t2d = (_load_array(folder / name, flag) for name in (D2T_NAME, T2D_NAME))
    fault = fault_of(d2t, t2d)
    if fault:
        raise UsageError(f"{flag} {folder}", "i + d2t[i] == nonzero(t2d)[i]", fault, "run `specshim vocab` again")
    return d2t, t2d


def _load_array(path: Path, flag: str) -> Any:
    import numpy as np

    try:
        return np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise UsageError(
            f"{flag} {path.parent}",
            f"a readable {path.name}",
            f"{type(error).__name__}: {error}",
            "run `specshim vocab` first",
        ) from error


def load_frequency(path: Path) -> dict[int, int]:
    """Read token_freq.pt without running anything in it.

    Raises:
        UsageError: unreadable, or not a dictionary of counts.
    """
    import torch

    try:
        content = torch.load(path, weights_only=True)
    except Exception as error:
        raise UsageError(
            str(path),
            "the token counts of `specshim prepare`",
            f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'unreadable'}",
            "run `specshim prepare` again",
        ) from error
    if not isinstance(content, dict) or not all(
        type(k) is int and type(v) is int and v >= 0 for k, v in content.items()
    ):
        raise UsageError(
            str(path), "a dictionary token id -> count", type(content).__name__, "run `specshim prepare` again"
        )
    return content


def build_vocab(config: VocabConfig) -> VocabResult:
    """Choose the draft vocabulary and write the two mapping files.

    Raises:
        UsageError: the prepared folder or the size cannot be used.
    """
    source = manifest.require(config.prepared, "prepare", "--prepared")
    target = int(source["model"]["vocab_size"])
    if not 1 <= config.draft_vocab_size <= target:
        raise UsageError(
            "--draft-vocab-size",
            f"1 to {target} (the model's vocabulary)",
            str(config.draft_vocab_size),
            "give a size in that range",
        )
    frequency = load_frequency(config.prepared / FREQ_NAME)
    try:
        chosen = select_tokens(frequency, config.draft_vocab_size, target)
    except ValueError as error:
        raise UsageError(
            str(config.prepared / FREQ_NAME),
            "counts of this model's tokens",
            str(error),
            "run `specshim prepare` again",
        ) from error
    d2t, t2d = mapping_arrays(chosen, target)
    fault = fault_of(d2t, t2d)
    if fault:
        raise SpecshimError("vocab", "a consistent mapping", fault, "report this as a defect of specshim")
    covered = set(chosen)
    total = sum(frequency.values())
    result = VocabResult(
        draft_vocab_size=config.draft_vocab_size,
        target_vocab_size=target,
        seen=len(frequency),
        padded=max(0, config.draft_vocab_size - len(frequency)),
        coverage=sum(count for token, count in frequency.items() if token in covered) / total if total else 0.0,
    )
    output = config.output_dir or config.prepared
    with exclusive(output):
        _refuse_foreign_folder(output, source, config.draft_vocab_size)
        for name, values in ((D2T_NAME, d2t), (T2D_NAME, t2d)):
            write_bytes(output / name, _npy_bytes(values))
        record = manifest.compose(
            "vocab",
            model=source["model"],
            draft_vocab_size=result.draft_vocab_size,
            target_vocab_size=target,
            counts={"seen": result.seen, "padded": result.padded, "coverage": round(result.coverage, 6)},
            inputs={FREQ_NAME: sha256_file(config.prepared / FREQ_NAME)},
        )
        manifest.write(output, record, MANIFEST_NAME)
    return result


def _refuse_foreign_folder(folder: Path, source: Mapping[str, Any], draft_vocab_size: int) -> None:
    existing = manifest.read(folder, "vocab", MANIFEST_NAME)
    if existing is not None:
        wanted = {"model.fingerprint": source["model"]["fingerprint"], "draft_vocab_size": draft_vocab_size}
        manifest.require_same(
            str(folder / MANIFEST_NAME), wanted, existing, "choose another --output-dir, or remove the old mapping"
        )


def _npy_bytes(values: Any) -> bytes:
    import numpy as np

    buffer = io.BytesIO()
    np.save(buffer, values, allow_pickle=False)
    return buffer.getvalue()
