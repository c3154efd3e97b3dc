"""Are the stored states right? Structure always, numbers against an independent reference."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field, replace
from typing import Any

from rich.table import Table

from pipeline import manifest
from pipeline.config import VerifyConfig
from pipeline.devices import check_device, make_current
from pipeline.formats import StateRow, float8
from pipeline.formats.registry import NORMED, RESIDUAL
from pipeline.formats.stores import RowStore
from pipeline.layers import LayerIds
from pipeline.model_info import ModelInfo, read_model, refuse_remote_code
from pipeline.object_store.address import refuse_addresses
from pipeline.places import View, viewed
from pipeline.prepared import PreparedFile
from pipeline.progress import stage_progress
from pipeline.reference import Reference, relative_errors
from pipeline.thresholds import least_same_next, threshold_of
from pipeline.verify_files import check_files
from shims.errors import UsageError


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
    storage: float | None = None
    """The error that float8 alone makes: that of the reference's own states, stored so."""

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
    left_out: int = 0
    """Rows without states, named as bad in the manifest."""
    content: bool = False
    """Whether all states were read."""
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
        out = f"; {self.left_out} rows are left out, their states were bad" if self.left_out else ""
        if self.compared:
            return f"right: every file is whole, and {len(self.compared)} of {self.rows} rows equal the reference{out}"
        if self.content:
            return f"right as far as files tell: every row is what was written; no --model was compared with{out}"
        return f"right in structure; the states themselves were not looked at{out}"

    def as_dict(self) -> dict[str, Any]:
        """For --json."""
        return {
            "ok": not self.faults,
            "rows": self.rows,
            "tokens": self.tokens,
            "left_out": self.left_out,
            "content_checked": self.content,
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
                    "float8_error": row.storage,
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
        packed = any(row.storage is not None for row in self.compared)
        if packed:
            table.add_column("float8 alone", justify="right")
        for row in self.compared:
            cells = [f"{error:.1e}" if error <= self.threshold else f"[red]{error:.1e}[/]" for error in row.by_layer]
            same = "" if row.same_next is None else f"{row.same_next:.1%}"
            storage = [f"{row.storage:.1e}"] if packed and row.storage is not None else []
            table.add_row(str(row.index), str(row.tokens), *cells, same, *storage)
        return table


def verify(config: VerifyConfig) -> Verified:
    """Check a folder of hidden states.

    Raises:
        UsageError: the folder, the model or an option cannot be used. Wrong data is no
            exception: it is in ``faults``.
    """
    refuse_addresses(config, ("data",))
    with viewed(config.data, "data folder") as view:
        return _verify(replace(config, data=view.folder), view)


def _verify(config: VerifyConfig, view: View) -> Verified:
    record = manifest.require_rows(config.data, "data folder")
    layers = LayerIds(tuple(record["layers"]["ids"]), record["layers"]["convention"])
    result = Verified(layers, content=not config.structure_only)
    result.threshold = config.threshold or threshold_of(record["dtype"], record.get("store_dtype"))
    if config.sample < 1 and not config.structure_only:
        raise UsageError("--sample", "at least 1", str(config.sample), "give a number of rows, or --structure")
    if config.threshold is not None and not 0 < config.threshold < 1:
        raise UsageError("--threshold", "a number between 0 and 1", str(config.threshold), "give such a number")
    check_device("--device", config.device)
    make_current(config.device)
    model = None if config.structure_only or config.model is None else _matching_model(config, config.model, record)
    prepared = (
        PreparedFile(config.prepared, record["model"]["vocab_size"], "--prepared-data") if config.prepared else None
    )
    store = view.open_rows(record)
    strangers = view.fetch_beside(store)
    files = check_files(config.data, record, prepared, store, content=result.content, strangers=strangers)
    result.rows, result.tokens, result.left_out = files.rows, files.tokens, files.left_out
    result.faults += map(view.says, files.faults)
    if model is not None and files.good:
        sample = sorted(random.Random(config.seed).sample(files.good, min(config.sample, len(files.good))))
        _compare(config, record, model, store, sample, result)
    return result


def _matching_model(config: VerifyConfig, path: str, record: dict[str, Any]) -> ModelInfo:
    model = read_model(path, "--model")
    refuse_remote_code(model, config.trust_remote_code, "--model")
    manifest.require_same(
        str(config.data / manifest.FILE_NAME),
        {"model.fingerprint": model.fingerprint},
        record,
        f"give the model the states were extracted from ({record['model']['path']})",
    )
    return model


def _compare(
    config: VerifyConfig,
    record: dict[str, Any],
    model: ModelInfo,
    store: RowStore,
    sample: list[int],
    result: Verified,
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
            row = store.read(index)
            error = _row_error(index, row, reference, _Kind.of(record, result.layers, model))
            result.compared.append(error)
            # Not a number is never small enough.
            if not error.worst <= result.threshold:
                result.faults.append(f"row {index}: relative error {error.worst:.2e} above {result.threshold:g}")
            progress.advance(rows=1, tokens=len(row.token_ids))
    shares = [(row.same_next, row.tokens) for row in result.compared if row.same_next is not None]
    if shares:
        same = sum(share * tokens for share, tokens in shares) / sum(tokens for _, tokens in shares)
        least = least_same_next(record.get("store_dtype", record["dtype"]))
        if not same >= least:
            result.faults.append(
                f"the last states name the model's own next token at {same:.1%} of the positions, not {least:.0%}: "
                "another layer, or a norm too many or too few"
            )


@dataclass(frozen=True)
class _Kind:
    """How the states of a data set are stored."""

    last: bool
    """The last layer is among them."""
    normed: bool
    """Its state is N, not R_n."""
    packed: bool
    """In float8."""

    @classmethod
    def of(cls, record: dict[str, Any], layers: LayerIds, model: ModelInfo) -> _Kind:
        return cls(
            last=layers.native[-1] == model.num_layers,
            normed=record.get("last_state", RESIDUAL) == NORMED,
            packed=record.get("store_dtype") == float8.NAME,
        )


def _row_error(index: int, row: StateRow, reference: Reference, kind: _Kind) -> RowError:
    ids = row.token_ids.tolist()
    wanted, own_next = reference.states(ids)
    if kind.normed:
        wanted[:, -1] = reference.normed(wanted[:, -1])
    difference = relative_errors(row.states, wanted)
    same = None
    if kind.last:
        named = reference.next_tokens(row.states[:, -1], normed=kind.normed)
        same = float((named == own_next).float().mean())
    storage = None
    if kind.packed:
        stored = float8.dense(float8.compressed(StateRow(wanted, row.token_ids)))
        storage = float(relative_errors(stored.states, wanted).max())
    return RowError(index, row.row_id, len(ids), tuple(difference.tolist()), same, storage)
