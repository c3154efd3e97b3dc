"""Our data sets, read by the dataset classes of an installed speculators: the tensors are those that were extracted.

``python tests/live_formats.py --output result.json``; `nox -s live-formats` runs it beside each speculators release
in an environment of its own. The states come from a tiny model computed by transformers; no vLLM is involved.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import warnings
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from pipeline_fixtures import ReferenceEngine, write_conversations, write_model, write_weights

from pipeline import extract as extract_module
from pipeline import manifest
from pipeline.config import ConvertConfig, ExtractConfig, PrepareConfig, VerifyConfig, VocabConfig
from pipeline.convert import convert
from pipeline.formats.registry import open_rows
from pipeline.prepare import prepare
from pipeline.verify import verify
from pipeline.vocab import build_vocab, load_mapping

ROWS = 12
DRAFT = 64
Rows = dict[int, dict[str, Any]]


def expected(folder: Path, shifted: bool) -> Rows:
    """What a trainer's dataset should give for each row, in float32.

    Args:
        shifted: the dataset itself moves states against tokens by one (speculators 0.3 and 0.4).
    """
    store = open_rows(folder, manifest.require_rows(folder, "folder"))
    rows: Rows = {}
    for index in range(ROWS):
        row = store.read(index)
        before, after = (slice(None, -1), slice(1, None)) if shifted else (slice(None), slice(None))
        rows[index] = {
            "input_ids": row.token_ids[after],
            "hidden_states": row.states[:, :-1].flatten(1)[before].float(),
            "verifier_last_hidden_states": row.states[:, -1][after].float(),
            "loss_mask": row.loss_mask[after],
        }
    return rows


def differences(name: str, found: Rows, wanted: Rows) -> list[str]:
    """What is not equal, bit for bit."""
    import torch

    faults = [f"{name}: rows {sorted(found)}"] if sorted(found) != sorted(wanted) else []
    for index in sorted(found.keys() & wanted.keys()):
        for key, tensor in wanted[index].items():
            read = found[index][key]
            if read.shape != tensor.shape or not torch.equal(read.to(tensor.dtype), tensor):
                faults.append(f"{name}: row {index}, {key}")
    return faults


def read_samples(dataset_class: Any, folder: Path) -> tuple[Rows, list[int]]:
    """Rows and lengths as a dataset of ``.pt`` files gives them."""
    import torch

    dataset = dataset_class(4096, datapath=str(folder), hidden_states_dtype=torch.float32)
    numbers = [int(Path(path).stem.split("_")[-1]) for path in dataset.data]
    lengths = dict(zip(numbers, dataset.approx_lengths, strict=True))
    return {number: dataset[at] for at, number in enumerate(numbers)}, [lengths[number] for number in sorted(lengths)]


def read_table(dataset_class: Any, folder: Path, splits: list[tuple[dict[str, Any], int]]) -> tuple[Rows, list[int]]:
    """Rows and lengths as an Arrow dataset gives them, over all its splits."""
    import torch

    rows: Rows = {}
    lengths: list[int] = []
    for options, first in splits:
        dataset = dataset_class(
            4096, datapath=str(folder), on_missing="raise", hidden_states_dtype=torch.float32, **options
        )
        # A row whose token ids are not those of the table is dropped with a warning.
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            rows |= {first + at: dataset[at] for at in range(len(dataset))}
        lengths += dataset.approx_lengths
    return rows, lengths


def readers() -> dict[str, Callable[[Path], tuple[Rows, list[int]]]]:
    """The formats that this speculators should read, and how it does."""
    from speculators.train import data

    found: dict[str, Callable[[Path], tuple[Rows, list[int]]]] = {}
    if hasattr(data, "Eagle3SampleFileDataset"):
        for form in ("speculators-0.3", "speculators-0.4"):
            found[form] = lambda folder: read_samples(data.Eagle3SampleFileDataset, folder)
    if hasattr(data, "SampleFileDataset"):
        found["speculators-0.4"] = lambda folder: read_samples(data.SampleFileDataset, folder)
    if hasattr(data, "ArrowDataset"):
        form = (
            "speculators-0.8" if "train_ratio" in _options(data.ArrowDataset) and _minor() >= 8 else "speculators-0.5"
        )
        cut = int(ROWS * 0.75)
        if "split_ratio" in _options(data.ArrowDataset):
            # 0.5.0 itself fails at ratio 1.0: it then never sets the offset of its files.
            splits = [({"split_ratio": 0.75}, 0), ({"split_ratio": -0.25}, cut)]
        else:
            splits = [({"train_ratio": 0.75, "split": "train"}, 0), ({"train_ratio": 0.75, "split": "val"}, cut)]
        found[form] = lambda folder: read_table(data.ArrowDataset, folder, splits)
    return found


def _options(dataset_class: Any) -> set[str]:
    return set(dataset_class.__init__.__code__.co_varnames)


def _minor() -> int:
    return int(version("speculators").split(".")[1])


def mapping_faults(folder: Path, wanted: tuple[Any, Any]) -> list[str]:
    """The vocabulary mapping as the trainer finds it, where the wheel has that code (from 0.9)."""
    try:
        from speculators.train import cli
    except ImportError:
        return []
    d2t, t2d, size = cli._load_mappings(str(folder / f"d2t-{DRAFT}.npy"), str(folder / f"t2d-{DRAFT}.npy"), DRAFT)
    same = size == DRAFT and (d2t.numpy() == wanted[0]).all() and (t2d.numpy() == wanted[1]).all()
    return [] if same else ["the vocabulary mapping is another one"]


def build(root: Path) -> Path:
    """Model, prepared rows, vocabulary, and states in the neutral format."""
    model = write_model(root / "model", hidden=64)
    write_weights(model)
    write_conversations(root / "conversations.jsonl", count=ROWS)
    prepare(PrepareConfig(str(model), root / "conversations.jsonl", root / "prepared"))
    build_vocab(VocabConfig(root / "prepared", DRAFT))
    return model


def main() -> int:
    """Extract directly in each format and convert to it; the trainer must read both alike. Exit code 1 if not."""
    parser = argparse.ArgumentParser(description="Read our formats with the installed speculators.")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    extract_module.open_engine = lambda name, engine_options: ReferenceEngine(engine_options)
    faults: list[str] = []
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        model = build(root)
        data = root / "prepared" / "tokenized_data.jsonl"
        base = {"engine": "stock", "model_path": str(model), "prepared_data": data}
        extract_module.extract(ExtractConfig(output_dir=root / "neutral", dtype="float32", **base))
        found = readers()
        for form, read in found.items():
            direct, moved = root / f"direct {form}", root / f"moved {form}"
            extract_module.extract(
                ExtractConfig(output_dir=direct, dtype="float32", format=form, vocab=root / "prepared", **base)
            )
            convert(ConvertConfig(root / "neutral", moved, form, vocab=root / "prepared"))
            for folder in (direct, moved):
                faults += verify(VerifyConfig(folder, str(model), sample=ROWS)).faults
                shifted = form in ("speculators-0.3", "speculators-0.4") and _minor() < 5
                rows, lengths = read(folder)
                faults += differences(folder.name, rows, expected(root / "neutral", shifted))
                stated = [len(row["input_ids"]) + shifted for _, row in sorted(rows.items())]
                # 0.3 has no file of lengths and estimates them from the sizes of the files.
                if form != "speculators-0.3" and lengths != stated:
                    faults.append(f"{folder.name}: lengths {lengths}, not {stated}")
                if form == "speculators-0.8":
                    faults += mapping_faults(folder, load_mapping(root / "prepared"))
    outcome = {
        "speculators": version("speculators"), "torch": version("torch"), "transformers": version("transformers"),
        "datasets": version("datasets"), "formats": sorted(found), "rows": ROWS, "faults": faults,
    }  # fmt: skip
    print(json.dumps(outcome))
    if options.output:
        options.output.write_text(json.dumps(outcome, indent=2) + "\n")
    return int(bool(faults) or not found)


if __name__ == "__main__":
    sys.exit(main())
