"""``data_{i}.pt``: one dictionary a row, as the trainers of speculators 0.3 and 0.4 read it.

Entries: ``input_ids`` and ``loss_mask`` int64 [T], ``hidden_states`` a list of L tensors [T, H], the
last of them the verifier's. Any file below the folder whose name ends in "pt" is taken for a
sample there, so nothing else may be called so.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.formats import DamagedRow, StateRow, Wanted, torch_files, torch_row


def relative_path(index: int) -> Path:
    """Where row ``index`` lies in the folder."""
    return Path(f"data_{index}.pt")


def encode(row: StateRow, header: Mapping[str, str]) -> bytes:
    """The file of a row; states must not be float8."""
    content = {
        "input_ids": row.token_ids.contiguous(),
        "hidden_states": [layer.contiguous() for layer in row.states.unbind(dim=1)],
        "loss_mask": row.loss_mask.contiguous(),
    }
    return torch_files.to_bytes(content | torch_row.header_entry(row, header))


def read(path: Path) -> StateRow:
    """Read one row.

    Raises:
        DamagedRow: the file cannot be read as a row.
        FileNotFoundError: there is no such file.
    """
    import torch

    layers, row = _read_parts(path)
    return StateRow(torch.stack(layers, dim=1), row.token_ids, row.loss_mask, row.row_id, None, row.header)


def read_tokens(path: Path) -> tuple[list[int], list[int]]:
    """A row's token ids and loss mask alone.

    Raises:
        DamagedRow: the file cannot be read as a row.
        FileNotFoundError: there is no such file.
    """
    _, row = _read_parts(path)
    return row.token_ids.tolist(), row.loss_mask.tolist()


def check(path: Path, wanted: Wanted) -> int:
    """Check one row; its states stay on the disk unless their content is asked for.

    Raises:
        DamagedRow: the file is not the row wanted.
        FileNotFoundError: there is no such file.
    """
    if wanted.content:
        return torch_row.check_row(read(path), wanted)
    import torch

    layers, row = _read_parts(path)
    # Of the right shape and type, and made of nothing: enough to compare with.
    outline = torch.empty((len(layers[0]), len(layers), layers[0].shape[1]), dtype=layers[0].dtype, device="meta")
    return torch_row.check_row(StateRow(outline, row.token_ids, row.loss_mask, row.row_id, None, row.header), wanted)


def _read_parts(path: Path) -> tuple[list[Any], StateRow]:
    """The layers, and a row that lacks only them."""
    content = torch_row.dictionary(torch_files.load(path), "input_ids", "hidden_states", "loss_mask")
    layers = content["hidden_states"]
    if not isinstance(layers, list) or not layers:
        raise DamagedRow(f"hidden_states {type(layers).__name__}, not a list of tensors")
    for index, layer in enumerate(layers):
        torch_row.dense_tensor(layer, f"hidden_states[{index}]", "floating", 2)
        if layer.shape != layers[0].shape or layer.dtype != layers[0].dtype:
            raise DamagedRow(
                f"hidden_states[{index}] {layer.dtype}{list(layer.shape)}, the first is "
                f"{layers[0].dtype}{list(layers[0].shape)}"
            )
    ids, mask = torch_row.ids_and_mask(content, len(layers[0]))
    header = torch_row.header_of(content)
    return layers, StateRow(None, ids, mask, str(header.get("row_id", "")), None, header)
