"""Where converted rows come from: a folder with a manifest, or one of other tools that the user describes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pipeline import manifest
from pipeline.bad_rows import BadRows
from pipeline.config import ConvertConfig
from pipeline.content_checks import fault_of_states, fault_of_tokens
from pipeline.formats import DamagedRow, StateRow, float8
from pipeline.formats.content import KEY, check_content
from pipeline.formats.registry import NORMED, RESIDUAL, Format, get_format, open_rows, recognised
from pipeline.formats.stores import RowStore
from pipeline.layers import LayerIds, resolve
from pipeline.model_info import ModelInfo, read_model, refuse_remote_code
from pipeline.source_identity import identity_of
from shims.errors import UsageError


@dataclass(frozen=True)
class Source:
    """Rows, and what is known of them."""

    folder: Path
    store: RowStore
    record: Mapping[str, Any]
    """The source's manifest, or what stands in for one."""
    layers: LayerIds
    last_state: str
    indices: list[int]
    absent: dict[int, tuple[list[int], list[int]]]
    """Rows that have no states, with their token ids and loss mask."""
    total: int
    foreign: bool
    """It has no manifest; the user said what it holds."""
    masks: Any = None
    """The Arrow table of a foreign source whose files have no masks."""

    def read(self, index: int) -> StateRow:
        """One row as stored, its content compared with its hash.

        Raises:
            UsageError: the row is damaged or missing, or its numbers cannot be right.
        """
        row = _whole_row(self.store, index)
        try:
            if not self.foreign or KEY in row.header:
                check_content(row)
            owner = row.header.get("row", str(index))
            if not self.foreign and owner != str(index):
                raise DamagedRow(f"metadata row is {owner!r}, not {str(index)!r}")
        except DamagedRow as damage:
            raise _damaged(self.store, index, damage) from damage
        row = row if row.loss_mask is not None else replace(row, loss_mask=self._mask(index, row))
        ids, mask = row.token_ids.tolist(), None if row.loss_mask is None else row.loss_mask.tolist()
        model, width = self.record["model"], len(self.layers.ids)
        self._refuse(index, fault_of_tokens(ids, mask, model["vocab_size"]))
        self._refuse(index, fault_of_states(float8.dense(row).states, len(ids), width, model["hidden_size"]))
        return row

    def _refuse(self, index: int, fault: str | None) -> None:
        """Stop at a row that nothing may be trained on; other tools do not look."""
        if fault:
            raise UsageError(
                f"row {index} in {self.store.locate(index)}",
                "a row that can be right",
                fault,
                "repair the source first, or leave the row out and number the others anew",
            )

    def _mask(self, index: int, row: StateRow) -> Any:
        listed = self._listed(index)
        if listed is None:
            return None
        if listed.get("input_ids") != row.token_ids.tolist() or len(listed["loss_mask"]) != len(row.token_ids):
            raise UsageError(
                f"row {index} in {self.store.locate(index)}",
                "the token ids of the Arrow table beside it",
                "others",
                "give a folder whose table and rows belong together",
            )
        import torch

        return torch.tensor(listed["loss_mask"], dtype=torch.int64)

    def _listed(self, index: int) -> dict[str, Any] | None:
        """The row in the Arrow table, if it has a mask there."""
        if self.masks is None or index >= len(self.masks):
            return None
        listed: dict[str, Any] = self.masks[index]
        return listed if listed.get("loss_mask") is not None else None

    def tokens(self, index: int) -> tuple[list[int], list[int] | None]:
        """Token ids and loss mask of a row, states or not.

        Raises:
            UsageError: the row is damaged or missing, or its numbers cannot be right.
        """
        if index in self.absent:
            return self.absent[index]
        try:
            ids, mask = self.store.tokens(index)
        except (DamagedRow, FileNotFoundError) as damage:
            raise _damaged(self.store, index, damage) from damage
        listed = self._listed(index) if mask is None else None
        mask = mask if listed is None else list(listed["loss_mask"])
        self._refuse(index, fault_of_tokens(ids, mask, self.record["model"]["vocab_size"]))
        return ids, mask


def _whole_row(store: RowStore, index: int) -> StateRow:
    """A row, states as stored.

    Raises:
        UsageError: it is damaged or missing.
    """
    try:
        return store.read_stored(index)
    except (DamagedRow, FileNotFoundError) as damage:
        raise _damaged(store, index, damage) from damage


def _damaged(store: RowStore, index: int, damage: Exception) -> UsageError:
    return UsageError(f"row {index} in {store.locate(index)}", "a whole row", str(damage), "repair the source first")


def open_source(config: ConvertConfig) -> Source:
    """Find out what a folder holds.

    Raises:
        UsageError: it cannot be told, or is not finished.
    """
    if (config.source / manifest.FILE_NAME).exists():
        return _with_manifest(config)
    return _foreign(config)


def _with_manifest(config: ConvertConfig) -> Source:
    record = manifest.require_rows(config.source, "source folder")
    where = str(config.source / manifest.FILE_NAME)
    if config.source_layer_ids is not None or config.source_layer_convention is not None:
        raise UsageError(
            "--source-layer-ids", "no such option: the source has a manifest", where, "leave the option out"
        )
    if not record.get("complete"):
        raise UsageError(where, "a finished set of rows", "complete = false", "finish it: run its command again")
    bad = BadRows(config.source).rows
    return Source(
        folder=config.source,
        store=open_rows(config.source, record),
        record=record,
        layers=LayerIds(tuple(record["layers"]["ids"]), record["layers"]["convention"]),
        last_state=record.get("last_state", RESIDUAL),
        indices=[index for index in range(record["counts"]["rows"]) if index not in bad],
        absent={index: (row.input_ids, row.loss_mask) for index, row in bad.items()},
        total=record["counts"]["rows"],
        foreign=False,
    )


def _foreign(config: ConvertConfig) -> Source:
    if not config.source.is_dir():
        found = "a file" if config.source.exists() else "no such folder"
        raise UsageError(f"source folder {config.source}", "a folder of rows", found, "check the path")
    form = _format_of(config)
    needed = {
        "--source-layer-ids": config.source_layer_ids,
        "--source-layer-convention": config.source_layer_convention,
        "--model": config.model,
    }
    lacking = [flag for flag, value in needed.items() if value is None]
    if lacking or config.model is None or config.source_layer_convention is None:
        raise UsageError(
            f"source folder {config.source}",
            f"{manifest.FILE_NAME} in it, or {', '.join(needed)}",
            f"no {manifest.FILE_NAME}, and no {', '.join(lacking)}",
            "say which layers it holds; some rows are recomputed with the model to prove it",
        )
    model = read_model(config.model, "--model")
    refuse_remote_code(model, config.trust_remote_code, "--model")
    store = form.open(config.source, config.rows_per_file)
    indices = store.indices()
    if not indices or indices != list(range(len(indices))):
        first = next((place for place, index in enumerate(indices) if place != index), 0)
        raise UsageError(str(config.source), "rows from 0 on without a gap", f"no row {first}", "complete the source")
    dtype = str(_whole_row(store, 0).states.dtype).removeprefix("torch.")
    layers = resolve(config.source_layer_ids, config.source_layer_convention, model.num_layers)
    return Source(
        folder=config.source,
        store=store,
        record={
            "model": manifest.describe_model(model),
            "dtype": dtype,
            "store_dtype": dtype,
            "format": form.name,
            "source_sha256": identity_of(config.source, store, indices),
        },
        layers=layers,
        last_state=NORMED if form.last_states == (NORMED,) and layers.native[-1] == model.num_layers else RESIDUAL,
        indices=indices,
        absent={},
        total=len(indices),
        foreign=True,
        masks=_table(config.source),
    )


def _format_of(config: ConvertConfig) -> Format:
    if config.source_format is not None:
        return get_format(config.source_format, "--from")
    found = recognised(config.source)
    if not found:
        raise UsageError(
            f"source folder {config.source}", "rows of a known format", "none", "check the path, or give --from"
        )
    # Formats that share their row files are read alike.
    return found[0]


def _table(folder: Path) -> Any:
    if not (folder / "state.json").is_file():
        return None
    import datasets

    try:
        return datasets.load_from_disk(str(folder)).with_format(None)
    except Exception as error:  # the library raises what it likes
        raise UsageError(
            f"source folder {folder}", "an Arrow table that can be read, since there is a state.json",
            f"{type(error).__name__}: {error}", "copy the folder again, or move state.json away if it is another's",
        ) from error  # fmt: skip


def model_of(config: ConvertConfig, source: Source) -> ModelInfo | None:
    """The model that the options name, if it is the source's.

    Raises:
        UsageError: it is another one.
    """
    if config.model is None:
        return None
    model = read_model(config.model, "--model")
    refuse_remote_code(model, config.trust_remote_code, "--model")
    manifest.require_same(
        str(source.folder / manifest.FILE_NAME),
        {"model.fingerprint": model.fingerprint},
        source.record,
        f"give the model of the states ({source.record['model']['path']})",
    )
    return model
