"""How fast packed training batches are read: our loader next to the installed speculators' own, on the same rows.

``python -m benchmarks.loader --output benchmarks/results/loader``; `nox -s bench-loader` runs it beside each release.
Both read in the process that trains, pack the same batches by speculators' sampler, and give tensors of the same
type; the passes alternate, files come from the page cache, and the figure is a ratio within one run.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from pipeline.formats import StateRow
from pipeline.formats.registry import get_format
from pipeline.formats.sidecars import Summary
from pipeline.formats.stores import Claim
from pipeline.training_batches import BatchStream, PackedRows
from pipeline.training_compat import load_trainer_parts

HIDDEN, STATES, ROWS, LONGEST, BATCH = 1024, 4, 48, 2048, 4096
PASSES = 5


def write_rows(folder: Path, form_name: str) -> list[int]:
    """Random rows in a trainer's format, the same ones in every format; returns their lengths."""
    import torch

    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(LONGEST // 16, LONGEST + 1, (ROWS,), generator=generator).tolist()
    form = get_format(form_name)
    store = form.open(folder, 1)
    store.begin(Claim(ROWS))
    tokens = []
    for index, length in enumerate(lengths):
        states = torch.randn(length, STATES, HIDDEN, generator=generator).to(torch.bfloat16)
        ids = torch.randint(0, 30000, (length,), generator=generator)
        mask = (torch.arange(length) > length // 4).long()
        store.write(index, StateRow(states, ids, mask, str(index)), {"row": str(index)})
        tokens.append((ids.tolist(), mask.tolist()))
    store.close()
    if form.finish is not None:
        form.finish(folder, Summary(dict(enumerate(lengths)), lambda: iter(tokens), {}))
    return lengths


def own_loader(folder: Path, dtype: Any) -> Any:
    """speculators' data set, sampler and collate function in a DataLoader, as its training command joins them."""
    from speculators.train import data
    from torch.utils.data import DataLoader

    parts = load_trainer_parts()
    if parts.series.name == "0.4":
        dataset: Any = data.Eagle3SampleFileDataset(BATCH, datapath=str(folder), hidden_states_dtype=dtype)
        collate: Any = data.create_collate_fn(BATCH)
    else:
        from speculators.models.eagle3.data import shift_batch

        dataset = data.ArrowDataset(BATCH, datapath=str(folder), on_missing="raise", hidden_states_dtype=dtype)
        # 0.5.0 never sets it where the whole table is read.
        dataset.start_file_idx = 0
        options = {"preprocess": shift_batch} | ({} if parts.series.name == "0.5" else {"dtype": dtype})
        collate = (data.CollateFn if hasattr(data, "CollateFn") else data.create_collate_fn)(BATCH, HIDDEN, **options)
    sampler = parts.sampler_class(batch_max_length=BATCH, lengths=dataset.approx_lengths, num_replicas=1, rank=0)
    return DataLoader(dataset, batch_sampler=sampler, collate_fn=collate)


def our_loader(folder: Path, lengths: list[int], dtype: Any) -> BatchStream:
    """What `specshim train` reads with."""
    parts = load_trainer_parts()
    store = get_format("hs_safetensors").open(folder, 1)
    rows = PackedRows(store, list(range(ROWS)), lengths, parts.series, max_tokens=BATCH, dtype=dtype)
    sampler = parts.sampler_class(batch_max_length=BATCH, lengths=lengths, num_replicas=1, rank=0)
    return BatchStream(rows, [sampler])


def seconds(batches: Iterable[Any]) -> float:
    """Time to read all of them; each is looked at once, so that nothing stays unread."""
    began = time.perf_counter()
    for batch in batches:
        assert batch["hidden_states"].shape == (1, BATCH, (STATES - 1) * HIDDEN)
    return time.perf_counter() - began


def measure(loaders: dict[str, Callable[[], Iterable[Any]]]) -> dict[str, list[float]]:
    """Seconds of each pass; the loaders take turns, after one pass that is not counted."""
    found: dict[str, list[float]] = {name: [] for name in loaders}
    for number in range(PASSES + 1):
        for name, make in loaders.items():
            taken = seconds(make())
            if number:
                found[name].append(round(taken, 4))
    return found


def main() -> None:
    """Measure and write one result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder for the result")
    options = parser.parse_args()
    import torch

    series = load_trainer_parts().series
    form = {"0.4": "speculators-0.4", "0.8": "speculators-0.8"}.get(series.name, "speculators-0.5")
    results = []
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        lengths = write_rows(root / "theirs", form)
        # From 0.5 on both read the very same files.
        ours = root / "theirs" if series.name != "0.4" else root / "ours"
        if ours != root / "theirs":
            write_rows(ours, "hs_safetensors")
        for kind in ("bfloat16", "float32"):
            dtype = getattr(torch, kind)
            own, packed = own_loader(root / "theirs", dtype), our_loader(ours, lengths, dtype)
            taken = measure({"speculators": lambda own=own: own, "specshim": lambda packed=packed: packed})  # type: ignore[misc]
            ratios = [a / b for a, b in zip(taken["speculators"], taken["specshim"], strict=True)]
            results.append({"dtype": kind, "seconds": taken, "ratio": round(statistics.median(ratios), 2)})
    outcome = {
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "speculators": version("speculators"), "torch": version("torch"), "threads": torch.get_num_threads(),
        "cores": os.cpu_count(), "tokens": sum(lengths), "hidden": HIDDEN, "rows": ROWS, "results": results,
    }  # fmt: skip
    options.output.mkdir(parents=True, exist_ok=True)
    path = options.output / f"{version('speculators')}.json"
    path.write_text(json.dumps(outcome, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(outcome))


if __name__ == "__main__":
    main()
