"""What trainers look for beside the rows: lengths, an Arrow table, token counts, the vocabulary mapping.

Which trainer reads which file: docs/formats.md.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline.at_once import answers, threads_for
from pipeline.atomic import sync_folder, write_bytes, write_text
from pipeline.formats import torch_files
from pipeline.formats.arrays import npy_bytes
from pipeline.formats.stores import RowStore
from shims.errors import UsageError


@dataclass(frozen=True)
class Summary:
    """A finished data set, as far as its sidecars need it."""

    lengths: Mapping[int, int]
    """Tokens by row, of the rows that are there."""
    tokens: Callable[[], Iterator[tuple[list[int], list[int]]]]
    """(token ids, loss mask) of every row from 0 on, those included whose states are absent."""
    description: Mapping[str, Any]
    """Model, layers, dtype and versions, as in the manifest."""
    mapping: tuple[Any, Any] | None = None
    """(d2t int64 [draft], t2d bool [target]), where a draft vocabulary was chosen."""
    frequency: Mapping[int, int] = field(default_factory=dict)
    """Trainable token -> occurrences."""


def speculators_03(folder: Path, summary: Summary) -> None:
    """Mapping and description; token_freq.pt would be taken for a sample here."""
    write_text(folder / "data_config.json", json.dumps(_data_config(summary), indent=2) + "\n")
    _write_mapping(folder, summary, "d2t.npy", "t2d.npy")


def speculators_04(folder: Path, summary: Summary) -> None:
    """The same, and the rows' lengths."""
    speculators_03(folder, summary)
    lengths = {str(index): length for index, length in sorted(summary.lengths.items())}
    write_text(folder / "sample_lengths.json", json.dumps(lengths) + "\n")


def speculators_05(folder: Path, summary: Summary) -> None:
    """An Arrow table of tokens, masks and lengths, counts, and the mapping."""
    _write_arrow(folder, summary)
    _write_frequency(folder, summary)
    _write_mapping(folder, summary, "d2t.npy", "t2d.npy")


def speculators_08(folder: Path, summary: Summary) -> None:
    """The same; the mapping's names carry its size."""
    _write_arrow(folder, summary)
    _write_frequency(folder, summary)
    size = len(summary.mapping[0]) if summary.mapping else 0
    _write_mapping(folder, summary, f"d2t-{size}.npy", f"t2d-{size}.npy")


def specforge(folder: Path, summary: Summary) -> None:
    """The mapping as one file."""
    if summary.mapping is not None:
        import torch

        d2t, t2d = (torch.from_numpy(array) for array in summary.mapping)
        content = torch_files.to_bytes({"d2t": d2t, "t2d": t2d})
        write_bytes(folder / "vocab_mapping" / "vocab_mapping.pt", content)


def no_strangers(folder: Path, rows: Sequence[int], store: RowStore, strangers: Sequence[str]) -> list[str]:
    """Files that a trainer would take for samples, because their names end in "pt".

    Args:
        strangers: what is no row and not beside the rows, where that does not lie in the folder.
    """
    samples: set[object] = {store.locate(index) for index in store.indices()}
    others = [path for path in folder.rglob("*pt") if path.is_file() and path not in samples]
    names = [*map(str, sorted(others)), *(name for name in strangers if name.endswith("pt"))]
    return [f"{name}: would be read as a sample, because its name ends in pt" for name in names]


def check_lengths(folder: Path, rows: Sequence[int], store: RowStore, strangers: Sequence[str]) -> list[str]:
    """The same, and sample_lengths.json against the rows."""
    faults = no_strangers(folder, rows, store, strangers)
    path = folder / "sample_lengths.json"
    try:
        stated = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        return [*faults, f"{path}: {type(error).__name__}: {error}"]
    ids = answers(lambda index: store.tokens(index)[0], rows, threads_for(store))
    found = {str(index): len(numbers) for index, numbers in zip(rows, ids, strict=True)}
    return faults if stated == found else [*faults, f"{path}: other rows or lengths than the files have"]


def check_table(folder: Path, rows: Sequence[int], store: RowStore, _strangers: Sequence[str]) -> list[str]:
    """The Arrow table against the rows: the trainer drops a row whose token ids differ, with a warning."""
    datasets = _datasets()
    try:
        table = datasets.load_from_disk(str(folder)).with_format(None)
    except Exception as error:  # noqa: BLE001  whatever the library cannot read is a fault of the folder
        return [f"{folder}: no Arrow table ({type(error).__name__}: {error})"]
    faults = []
    for index, (ids, mask) in zip(rows, answers(store.tokens, rows, threads_for(store)), strict=True):
        row = table[index] if index < len(table) else {}
        if row != {"input_ids": ids, "loss_mask": mask, "seq_len": len(ids)}:
            faults.append(f"{folder}: row {index} of the Arrow table is not what its file says")
    return faults


def _write_mapping(folder: Path, summary: Summary, d2t_name: str, t2d_name: str) -> None:
    if summary.mapping is not None:
        for name, array in zip((d2t_name, t2d_name), summary.mapping, strict=True):
            write_bytes(folder / name, npy_bytes(array))


def _write_frequency(folder: Path, summary: Summary) -> None:
    write_bytes(folder / "token_freq.pt", torch_files.to_bytes(dict(sorted(summary.frequency.items()))))


def _data_config(summary: Summary) -> dict[str, Any]:
    described = summary.description
    return {
        "generated_by": "specshim",
        "model": described.get("model"),
        "hidden_states": described.get("layers"),
        "dtype": described.get("dtype"),
        "num_samples": len(summary.lengths),
        "file_pattern": "data_{idx}.pt",
    }


def _write_arrow(folder: Path, summary: Summary) -> None:
    """Save the table as the datasets library does, under its final names only when it is whole."""
    datasets = _datasets()
    from datasets.arrow_writer import ArrowWriter

    work = folder / ".arrow.tmp"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    number, many = datasets.Value("int64"), datasets.Sequence(datasets.Value("int64"))
    features = datasets.Features({"input_ids": many, "loss_mask": many, "seq_len": number})
    datasets.disable_progress_bars()
    try:
        with ArrowWriter(path=str(work / "rows.arrow"), features=features) as writer:
            for ids, mask in summary.tokens():
                writer.write({"input_ids": ids, "loss_mask": mask, "seq_len": len(ids)})
            writer.finalize()
        table = datasets.Dataset.from_file(str(work / "rows.arrow"))
        # The trainers compare tensors; the format is stored with the table.
        table.set_format("torch")
        table.save_to_disk(str(work / "table"))
        for old in folder.glob("data-*-of-*.arrow"):
            old.unlink()
        # state.json names the others, so it comes last.
        for path in sorted((work / "table").iterdir(), key=lambda path: path.name == "state.json"):
            path.replace(folder / path.name)
        sync_folder(folder)
    finally:
        datasets.enable_progress_bars()
        shutil.rmtree(work, ignore_errors=True)


def check_datasets_installed(name: str) -> None:
    """Refuse early what would fail after days of extraction.

    Raises:
        UsageError: the datasets library is missing.
    """
    if name.startswith(("speculators-0.5", "speculators-0.8")):
        _datasets()


def _datasets() -> Any:
    try:
        import datasets
    except ImportError as error:
        raise UsageError(
            "--format", "the datasets library, which writes the Arrow table", str(error), "pip install datasets"
        ) from error
    return datasets
