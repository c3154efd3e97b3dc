"""Are the stored states right? Structure always, numbers against an independent reference."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.table import Table

from pipeline import manifest
from pipeline.config import VerifyConfig
from pipeline.content_checks import fault_of_states
from pipeline.devices import check_device
from pipeline.formats import DamagedRow, StateRow
from pipeline.formats.hs_safetensors import check_row, read_row, row_indices, row_path
from pipeline.layers import LayerIds
from pipeline.model_info import ModelInfo, read_model, refuse_remote_code
from pipeline.prepared import PreparedFile
from pipeline.progress import stage_progress
from pipeline.reference import Reference
from shims.errors import UsageError

_THRESHOLDS = {"float32": 1e-4}
# A 30-layer model computed in bfloat16 was right with 2.0e-2 in its last layer; wrong rows are near 1.
_THRESHOLD_HALF = 4e-2


@dataclass(frozen=True)
class RowError:
    """One recomputed row."""

    index: int
    row_id: str
    tokens: int
    by_layer: tuple[float, ...]
    """Norm of the difference over norm of the reference, one per layer column."""
    same_next: float | None
    """Share of positions whose next token, read from the stored last state, is the model's own."""

    @property
    def worst(self) -> float:
        """The largest of the layers' errors; not a number if one of them is not."""
        return max(self.by_layer, key=lambda error: (math.isnan(error), error))


@dataclass
class Verified:
    """What was found."""

    layers: LayerIds
    rows: int = 0
    tokens: int = 0
    threshold: float = 0.0
    compared: list[RowError] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    """Everything wrong, in words; empty when the data may be trained on."""

    @property
    def worst(self) -> float | None:
        """Largest relative error, None when no row was compared."""
        return max((row.worst for row in self.compared), default=None, key=lambda error: (math.isnan(error), error))

    def verdict(self) -> str:
        """The outcome in a line, and how far it reaches."""
        if self.faults:
            return "wrong"
        if self.compared:
            return f"right: every file is whole, and {len(self.compared)} of {self.rows} rows equal the reference"
        return "right in structure; the states themselves were not looked at"

    def as_dict(self) -> dict[str, Any]:
        """For --json."""
        return {
            "ok": not self.faults,
            "rows": self.rows,
            "tokens": self.tokens,
            "layers": self.layers.as_dict(),
            "threshold": self.threshold,
            "worst_relative_error": self.worst,
            "compared": [
                {
                    "row": row.index,
                    "id": row.row_id,
                    "tokens": row.tokens,
                    "relative_error": list(row.by_layer),
                    "same_next": row.same_next,
                }
                for row in self.compared
            ],
            "faults": self.faults,
        }

    def table(self) -> Table:
        """Relative error per compared row and layer."""
        table = Table(title=f"relative error against transformers in float32 (limit {self.threshold:g})")
        table.add_column("row", justify="right")
        table.add_column("tokens", justify="right")
        for layer in self.layers.ids:
            table.add_column(f"{self.layers.convention} {layer}", justify="right")
        table.add_column("same next token", justify="right")
        for row in self.compared:
            cells = [f"{error:.1e}" if error <= self.threshold else f"[red]{error:.1e}[/]" for error in row.by_layer]
            table.add_row(
                str(row.index), str(row.tokens), *cells, "" if row.same_next is None else f"{row.same_next:.1%}"
            )
        return table


def verify(config: VerifyConfig) -> Verified:
    """Check a folder of hidden states.

    Raises:
        UsageError: the folder, the model or an option cannot be used. Wrong data is no
            exception: it is in ``faults``.
    """
    record = manifest.require(config.data, "extract", "data folder")
    layers = LayerIds(tuple(record["layers"]["ids"]), record["layers"]["convention"])
    result = Verified(layers)
    result.threshold = (
        config.threshold if config.threshold is not None else _THRESHOLDS.get(record["dtype"], _THRESHOLD_HALF)
    )
    if config.sample < 1 and not config.structure_only:
        raise UsageError("--sample", "at least 1", str(config.sample), "give a number of rows, or --structure")
    if config.threshold is not None and not 0 < config.threshold < 1:
        raise UsageError("--threshold", "a number between 0 and 1", str(config.threshold), "give such a number")
    check_device("--device", config.device)
    model = None if config.structure_only else _matching_model(config, record)
    prepared = (
        PreparedFile(config.prepared, record["model"]["vocab_size"], "--prepared-data") if config.prepared else None
    )
    good = _check_structure(config.data, record, result, prepared)
    if model is not None and good:
        sample = sorted(random.Random(config.seed).sample(good, min(config.sample, len(good))))
        _compare(config, record, model, sample, result)
    return result


def _matching_model(config: VerifyConfig, record: dict[str, Any]) -> ModelInfo:
    if config.model is None:
        raise UsageError(
            "--model", "the model the states came from", "nothing", "give it, or --structure to check the files alone"
        )
    model = read_model(config.model, "--model")
    refuse_remote_code(model, config.trust_remote_code, "--model")
    manifest.require_same(
        str(config.data / manifest.FILE_NAME),
        {"model.fingerprint": model.fingerprint},
        record,
        f"give the model the states were extracted from ({record['model']['path']})",
    )
    return model


def _check_structure(
    folder: Path, record: dict[str, Any], result: Verified, prepared: PreparedFile | None
) -> list[int]:
    """Check every file without its states; returns the rows that passed."""
    if not record.get("complete"):
        result.faults.append(f"{folder / manifest.FILE_NAME}: the extraction has not finished")
    found = row_indices(folder)
    wanted = int((record.get("counts") or {}).get("rows", len(found)))
    if prepared is not None and len(prepared) != wanted:
        result.faults.append(f"{prepared.path}: {len(prepared)} rows, the manifest says {wanted}")
    for index in sorted(set(range(wanted)) - set(found)):
        result.faults.append(f"{row_path(folder, index)}: missing")
    for index in sorted(set(found) - set(range(wanted))):
        result.faults.append(f"{row_path(folder, index)}: beyond the {wanted} rows of the manifest")
    owner = {
        "layer_ids": " ".join(map(str, record["layers"]["ids"])),
        "layer_convention": record["layers"]["convention"],
        "model_fingerprint": record["model"]["fingerprint"],
    }
    good = []
    for index in found:
        path = row_path(folder, index)
        ids = mask = None
        if prepared is not None and index < len(prepared):
            # A cut row is a prefix; its length is checked by the extraction's own limit.
            ids = prepared[index].input_ids[: record["row_limit"]]
            mask = prepared[index].loss_mask[: record["row_limit"]]
        try:
            tokens = check_row(
                path,
                num_layers=len(record["layers"]["ids"]),
                hidden_size=record["model"]["hidden_size"],
                dtype=record["dtype"],
                metadata=owner | {"row": str(index)},
                token_ids=ids,
                loss_mask=mask,
            )
        except DamagedRow as damage:
            result.faults.append(f"{path}: {damage}")
            continue
        good.append(index)
        result.rows += 1
        result.tokens += tokens
    return good


def _compare(
    config: VerifyConfig, record: dict[str, Any], model: ModelInfo, sample: list[int], result: Verified
) -> None:
    reference = Reference(
        model,
        result.layers,
        weights_dtype=record["dtype"],
        device=config.device,
        trust_remote_code=config.trust_remote_code,
    )
    with stage_progress("verify", len(sample)) as progress:
        for index in sample:
            row = read_row(row_path(config.data, index))
            fault = fault_of_states(row.states, len(row.token_ids), len(result.layers.ids), model.hidden_size)
            if fault:
                result.faults.append(f"row {index}: {fault}")
                continue
            error = _row_error(index, row, reference, last=result.layers.native[-1] == model.num_layers)
            result.compared.append(error)
            # Not a number is never small enough.
            if not error.worst <= result.threshold:
                result.faults.append(f"row {index}: relative error {error.worst:.2e} above {result.threshold:g}")
            progress.advance(rows=1, tokens=len(row.token_ids))


def _row_error(index: int, row: StateRow, reference: Reference, last: bool) -> RowError:
    ids = row.token_ids.tolist()
    wanted, own_next = reference.states(ids)
    difference = (row.states.float() - wanted).norm(dim=(0, 2)) / wanted.norm(dim=(0, 2))
    same = None
    if last:
        same = float((reference.next_tokens(row.states[:, -1]) == own_next).float().mean())
    return RowError(index, row.row_id, len(ids), tuple(difference.tolist()), same)
