"""``rows_{a}-{b}/data_{i}.ckpt``: one dictionary a row, as SpecForge's offline training reads it.

Entries: ``input_ids`` and ``loss_mask`` int64 [T], ``aux_hidden_state`` [1, T, 3H] (three layers side
by side), ``hidden_state`` [1, T, H]: the *normed* last state, N, where speculators stores it before
the final norm. A folder holds the rows of its name, so that no folder grows without bound; ``.ckpt.gz``
is the same, compressed.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from pipeline.formats import DamagedRow, StateRow, Wanted, torch_files, torch_row

ROWS_PER_FOLDER = 2000
AUXILIARY = 3
_LARGEST = 1 << 34
"""Bytes that a compressed row may unpack to."""


def relative_path(index: int) -> Path:
    """Where row ``index`` lies in the folder."""
    first = index - index % ROWS_PER_FOLDER
    return Path(f"rows_{first}-{first + ROWS_PER_FOLDER}") / f"data_{index}.ckpt"


def encode(row: StateRow, header: Mapping[str, str]) -> bytes:
    """The file of a row of four states, the last of them normed already; states must not be float8."""
    content = {
        "input_ids": row.token_ids.contiguous(),
        "loss_mask": row.loss_mask.contiguous(),
        "hidden_state": row.states[None, :, -1].contiguous(),
        "aux_hidden_state": row.states[None, :, :-1].flatten(2).contiguous(),
    }
    return torch_files.to_bytes(content | torch_row.header_entry(row, header))


def read(path: Path) -> StateRow:
    """Read one row; its last state is N.

    Raises:
        DamagedRow: the file cannot be read as a row.
        FileNotFoundError: there is no such file.
    """
    import torch

    if path.name.endswith(".gz"):
        loaded = torch_files.load_bytes(torch_files.unzipped(path, _LARGEST))
    else:
        loaded = torch_files.load(path)
    content = torch_row.dictionary(loaded, "input_ids", "loss_mask", "hidden_state", "aux_hidden_state")
    last, aux = (torch_row.tensor(content, name, "floating", 3) for name in ("hidden_state", "aux_hidden_state"))
    hidden = last.shape[2]
    if list(last.shape) != [1, *aux.shape[1:2], hidden] or aux.shape[2] != AUXILIARY * hidden or aux.shape[0] != 1:
        raise DamagedRow(f"hidden_state {list(last.shape)}, aux_hidden_state {list(aux.shape)}, not [1,T,H], [1,T,3H]")
    if last.dtype != aux.dtype:
        raise DamagedRow(f"hidden_state {last.dtype}, aux_hidden_state {aux.dtype}")
    ids, mask = torch_row.ids_and_mask(content, last.shape[1])
    header = torch_row.header_of(content)
    states = torch.cat([aux[0].reshape(-1, AUXILIARY, hidden), last[0][:, None]], dim=1)
    return StateRow(states, ids, mask, str(header.get("row_id", "")), None, header)


def read_tokens(path: Path) -> tuple[list[int], list[int]]:
    """A row's token ids and loss mask alone.

    Raises:
        DamagedRow: the file cannot be read as a row.
        FileNotFoundError: there is no such file.
    """
    row = read(path)
    return row.token_ids.tolist(), row.loss_mask.tolist()


def check(path: Path, wanted: Wanted) -> int:
    """Check one row.

    Raises:
        DamagedRow: the file is not the row wanted.
        FileNotFoundError: there is no such file.
    """
    return torch_row.check_row(read(path), wanted)
