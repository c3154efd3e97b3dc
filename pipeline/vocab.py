"""Token counts to a draft vocabulary: d2t-{size}.npy and t2d-{size}.npy.

A draft token i stands for target token ``i + d2t[i]``; ``t2d`` marks the target tokens that
have a draft token. Selection follows speculators: the most frequent trainable tokens, the
smaller id first among equals, padded with the smallest unseen ids. Before them come the special
tokens: a draft that cannot say the end of a turn never ends one. The names carry the size, so that a
mapping of another size is never taken for this one; speculators 0.8 and later name them so, too.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline import manifest
from pipeline.atomic import clear_leftovers, write_bytes
from pipeline.config import VocabConfig
from pipeline.formats.arrays import npy_bytes
from pipeline.lock import exclusive
from pipeline.model_info import sha256_file
from pipeline.object_store.address import refuse_addresses
from pipeline.prepare import FREQ_NAME
from shims.errors import SpecshimError, UsageError

_MANIFEST = re.compile(r"vocab-(\d+)\.json")


def names_of(size: int) -> tuple[str, str, str]:
    """Names of d2t, t2d and their manifest (prepare's manifest.json lies in the same folder)."""
    return f"d2t-{size}.npy", f"t2d-{size}.npy", f"vocab-{size}.json"


@dataclass(frozen=True)
class VocabResult:
    """What a run chose."""

    draft_vocab_size: int
    target_vocab_size: int
    seen: int
    """Distinct trainable tokens in the data."""
    special: int
    """Special tokens, kept whether seen or not."""
    padded: int
    """Unseen ordinary ids added to reach the size."""
    coverage: float
    """Share of the trainable tokens that have a draft token, 0 to 1."""


def select_tokens(
    frequency: Mapping[int, int], draft_vocab_size: int, target_vocab_size: int, special: Collection[int] = ()
) -> list[int]:
    """The target ids of the draft vocabulary, ascending.

    Args:
        frequency: token id -> count; ids below ``target_vocab_size``.
        special: ids that are taken whatever their count.

    Raises:
        ValueError: more draft than target tokens, more special than draft tokens, or an id outside the target
            vocabulary.
    """
    if not 1 <= draft_vocab_size <= target_vocab_size:
        raise ValueError(f"draft vocabulary of {draft_vocab_size} for a target vocabulary of {target_vocab_size}")
    named = {*frequency, *special}
    if named and not 0 <= min(named) <= max(named) < target_vocab_size:
        raise ValueError(f"token ids from {min(named)} to {max(named)}, target vocabulary of {target_vocab_size}")
    kept = set(special)
    if len(kept) > draft_vocab_size:
        raise ValueError(f"{len(kept)} special tokens for a draft vocabulary of {draft_vocab_size}")
    used = sorted(frequency.keys() - kept, key=lambda token: (-frequency[token], token))
    chosen = [*kept, *used[: draft_vocab_size - len(kept)]]
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


def load_mapping(
    folder: Path, flag: str = "--vocab", fingerprint: str | None = None, size: int | None = None
) -> tuple[Any, Any]:
    """Read and check the mapping in a folder of `specshim vocab`; never unpickles.

    Args:
        fingerprint: of the model that it has to belong to; None accepts any.
        size: of the draft vocabulary; None where the folder holds one size only.

    Returns:
        d2t int64 [draft], t2d bool [target].

    Raises:
        UsageError: a file is missing, unreadable, not what was written, another model's, or the two disagree.
    """
    size = _only_size(folder, flag) if size is None else size
    d2t_name, t2d_name, manifest_name = names_of(size)
    record = manifest.require(folder, "vocab", flag, manifest_name)
    if fingerprint is not None:
        manifest.require_same(
            str(folder / manifest_name), {"model.fingerprint": fingerprint}, record, "make it from this model's data"
        )
    for name in (d2t_name, t2d_name):
        found = sha256_file(folder / name) if (folder / name).is_file() else "no such file"
        stated = record["outputs"].get(name)
        if found != stated:
            raise UsageError(
                str(folder / name), f"sha256 {stated}, as {manifest_name} says", found, "run `specshim vocab` again"
            )
    d2t, t2d = (_load_array(folder / name, flag) for name in (d2t_name, t2d_name))
    fault = fault_of(d2t, t2d)
    if fault:
        raise UsageError(f"{flag} {folder}", "i + d2t[i] == nonzero(t2d)[i]", fault, "run `specshim vocab` again")
    return d2t, t2d


def _only_size(folder: Path, flag: str) -> int:
    sizes = sorted(int(found[1]) for path in folder.glob("vocab-*.json") if (found := _MANIFEST.fullmatch(path.name)))
    if len(sizes) == 1:
        return sizes[0]
    strange = sorted(path.name for path in folder.glob("[dt]2[dt]*.npy"))
    raise UsageError(
        f"{flag} {folder}",
        "a folder with one draft vocabulary of `specshim vocab`",
        f"those of {', '.join(map(str, sizes))} tokens"
        if sizes
        else f"{', '.join(strange)} without a manifest that says whose they are"
        if strange
        else "none",
        "keep each size in a folder of its own (`specshim vocab --output-dir`)" if sizes else "run `specshim vocab`",
    )


def _load_array(path: Path, flag: str) -> Any:
    import numpy as np

    try:
        return np.load(path, allow_pickle=False)
    except Exception as error:  # numpy parses the header with Python's own tokenizer, whose errors pass through
        raise UsageError(
            f"{flag} {path.parent}",
            f"a readable {path.name}",
            f"{type(error).__name__}: {error}",
            "run `specshim vocab` again",
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
    refuse_addresses(config)
    source = manifest.require(config.prepared, "prepare", "--prepared")
    target = int(source["model"]["vocab_size"])
    if not 1 <= config.draft_vocab_size <= target:
        raise UsageError(
            "--draft-vocab-size",
            f"1 to {target} (the model's vocabulary)",
            str(config.draft_vocab_size),
            "give a size in that range",
        )
    stated, found = (source.get("outputs") or {}).get(FREQ_NAME), sha256_file(config.prepared / FREQ_NAME)
    if stated != found:
        raise UsageError(
            str(config.prepared / FREQ_NAME),
            f"sha256 {stated}, as {manifest.FILE_NAME} beside it says",
            found,
            "run `specshim prepare` again, in another folder",
        )
    frequency = load_frequency(config.prepared / FREQ_NAME)
    special = source.get("special_token_ids", [])
    try:
        chosen = select_tokens(frequency, config.draft_vocab_size, target, special)
    except ValueError as error:
        raise UsageError(
            f"--draft-vocab-size, {config.prepared / FREQ_NAME}",
            "a size that holds the special tokens, and counts of this model's tokens",
            str(error),
            "give a larger size, or run `specshim prepare` again",
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
        special=len(special),
        padded=len(covered - frequency.keys() - set(special)),
        coverage=sum(count for token, count in frequency.items() if token in covered) / total if total else 0.0,
    )
    output = config.output_dir or config.prepared
    d2t_name, t2d_name, manifest_name = names_of(result.draft_vocab_size)
    with exclusive(output):
        clear_leftovers(output)
        _refuse_foreign_folder(output, source, manifest_name)
        contents = {d2t_name: npy_bytes(d2t), t2d_name: npy_bytes(t2d)}
        for name, content in contents.items():
            write_bytes(output / name, content)
        record = manifest.compose(
            "vocab",
            model=source["model"],
            draft_vocab_size=result.draft_vocab_size,
            target_vocab_size=target,
            counts={
                "seen": result.seen,
                "special": result.special,
                "padded": result.padded,
                "coverage": round(result.coverage, 6),
            },
            inputs={FREQ_NAME: found},
            outputs={name: hashlib.sha256(content).hexdigest() for name, content in contents.items()},
        )
        manifest.write(output, record, manifest_name)
    return result


def _refuse_foreign_folder(folder: Path, source: Mapping[str, Any], manifest_name: str) -> None:
    existing = manifest.read(folder, "vocab", manifest_name)
    if existing is not None:
        wanted = {"model.fingerprint": source["model"]["fingerprint"]}
        manifest.require_same(
            str(folder / manifest_name), wanted, existing, "choose another --output-dir, or remove the old mapping"
        )
