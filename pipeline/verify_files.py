"""Does a folder hold the rows that its manifest promises, whole and unchanged? No model is needed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pipeline import manifest
from pipeline.at_once import answers, threads_for
from pipeline.content_checks import fault_of_states, fault_of_tokens
from pipeline.formats import DamagedRow
from pipeline.formats.content import check_content
from pipeline.formats.registry import DEFAULT, get_format, wanted_row
from pipeline.formats.stores import Located, RowStore
from pipeline.prepared import PreparedFile
from pipeline.progress import stage_progress


@dataclass
class Files:
    """What was found on disk."""

    rows: int = 0
    """Rows whose files are right."""
    tokens: int = 0
    left_out: int = 0
    """Rows without states, named as bad in the manifest."""
    good: list[int] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)


def check_files(
    folder: Path,
    record: Mapping[str, Any],
    prepared: PreparedFile | None,
    store: RowStore,
    *,
    content: bool,
    strangers: Sequence[str] = (),
) -> Files:
    """Check every row's file; nothing that is found wrong ends the check.

    Args:
        record: the folder's manifest.
        prepared: the rows that the states should belong to; None skips that comparison.
        store: its rows.
        content: read the states too: their hash, and whether they can be right.
        strangers: what is neither a row nor beside the rows, where that does not lie in the folder.
    """
    found = Files()
    if not record.get("complete"):
        found.faults.append(f"{folder / manifest.FILE_NAME}: the extraction has not finished")
    present = store.indices()
    left_out = {bad["row"] for bad in record.get("bad_rows", [])}
    found.left_out = len(left_out)
    wanted = int((record.get("counts") or {}).get("rows", len(present)))
    if prepared is not None and len(prepared) != wanted:
        found.faults.append(f"{prepared.path}: {len(prepared)} rows, the manifest says {wanted}")
    for index in sorted(set(range(wanted)) - set(present) - left_out):
        found.faults.append(f"{_named(store.locate(index), index)}: missing")
    for index in sorted(set(present) - set(range(wanted))):
        found.faults.append(f"{_named(store.locate(index), index)}: beyond the {wanted} rows of the manifest")
    for index in sorted(set(present) & left_out):
        found.faults.append(f"{_named(store.locate(index), index)}: there, though the manifest calls its states bad")
    with stage_progress("verify files", len(present)) as progress:
        threads = threads_for(store, whole=content)
        judged = answers(lambda index: _judged(store, index, record, prepared, content), present, threads)
        for index, outcome in zip(present, judged, strict=True):
            if isinstance(outcome, str):
                found.faults.append(f"{_named(store.locate(index), index)}: {outcome}")
                continue
            found.good.append(index)
            found.rows += 1
            found.tokens += outcome
            progress.advance(rows=1, tokens=outcome)
    form = get_format(record.get("format", DEFAULT))
    found.faults += form.check_sidecars(folder, found.good, store, strangers)
    return found


def _judged(
    store: RowStore, index: int, record: Mapping[str, Any], prepared: PreparedFile | None, content: bool
) -> int | str:
    """Tokens of a row, or what is wrong with it."""
    try:
        return _check_row(store, index, record, prepared, content)
    except (DamagedRow, FileNotFoundError) as damage:
        return str(damage)


def _check_row(
    store: RowStore, index: int, record: Mapping[str, Any], prepared: PreparedFile | None, content: bool
) -> int:
    ids = mask = None
    if prepared is not None and index < len(prepared):
        row = prepared[index]
        ids, mask = row.input_ids[: record.get("row_limit")], row.loss_mask[: record.get("row_limit")]
    width, hidden = len(record["layers"]["ids"]), record["model"]["hidden_size"]
    tokens = store.check(index, replace(wanted_row(record, index), token_ids=ids, loss_mask=mask))
    vocabulary = record["model"]["vocab_size"]
    if not content:
        _refuse(fault_of_tokens(*store.tokens(index), vocabulary))
        return tokens
    stored = store.read_stored(index)
    check_content(stored)
    read_mask = None if stored.loss_mask is None else stored.loss_mask.tolist()
    _refuse(fault_of_tokens(stored.token_ids.tolist(), read_mask, vocabulary))
    states = store.read(index).states if stored.scale is not None else stored.states
    _refuse(fault_of_states(states, tokens, width, hidden))
    return tokens


def _refuse(fault: str | None) -> None:
    if fault:
        raise DamagedRow(fault)


def _named(path: Located, index: int) -> str:
    return str(path) if str(index) in path.name else f"{path}, row {index}"
