"""Every format by its name: who reads it, what it can hold, how it is opened, what lies beside the rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.formats import Wanted, float8, hs_safetensors, shards, sidecars, specforge, speculators_pt
from pipeline.formats.sidecars import Summary
from pipeline.formats.stores import FileStore, Layout, RowStore
from pipeline.layers import LayerIds
from shims.errors import UsageError

_FOUR = 4
RESIDUAL, NORMED = "residual", "normed"
"""What the last state is: R_n, before the final norm, or N = norm(R_n). See docs/layer_ids.md."""


@dataclass(frozen=True)
class Format:
    """One way to lay out a folder of rows."""

    name: str
    readers: str
    """Who reads it."""
    open: Callable[[Path, int], RowStore]
    """(folder, rows per file) -> its rows; the number is ignored where a file holds one row."""
    root: str
    """The entry of the folder that the rows are in; "" where they lie in the folder itself."""
    last_states: tuple[str, ...] = (RESIDUAL,)
    """What the last state may be."""
    float8: bool = False
    """Whether its rows may be float8; readers that are not ours know nothing of scales."""
    needs_mask: bool = True
    four_states: bool = False
    """Whether its readers take exactly three auxiliary states and the last one."""
    many_rows_per_file: bool = False
    finish: Callable[[Path, Summary], None] | None = None
    """Write what lies beside the rows, once all of them are there; None where nothing does."""

    check_sidecars: Callable[[Path, Sequence[int], RowStore, Sequence[str]], list[str]] = lambda *_: []
    """(folder, whole rows, store, strangers elsewhere) -> what is wrong with the files beside the rows."""

    def refuse_unfit(self, layers: LayerIds, num_layers: int, store_dtype: str, flag: str = "--format") -> None:
        """Stop before anything is computed that this format cannot hold, or its readers would misread.

        Args:
            layers: the states to store.
            num_layers: decoder layers of the model.
            store_dtype: what they are stored in.

        Raises:
            UsageError: the format cannot hold them.
        """
        where = f"{flag} {self.name}"
        if store_dtype == float8.NAME and not self.float8:
            raise UsageError(
                where,
                f"a --store-dtype that {self.readers} reads",
                store_dtype,
                f"use {', '.join(item.name for item in _ALL if item.float8)}, and convert when you train",
            )
        if self.four_states and len(layers.ids) != _FOUR:
            raise UsageError(
                where, "three auxiliary states and the last one", f"layers {layers}", "give four --layer-ids"
            )
        last = layers.native[-1]
        if (self.four_states or self.last_states == (NORMED,)) and last != num_layers:
            raise UsageError(
                where,
                f"the state after the last of {num_layers} layers as the last one (native {num_layers})",
                f"layers {layers} = native {' '.join(map(str, layers.native))}",
                "give --layer-ids that end with it",
            )


_HS = Layout(
    relative_path=hs_safetensors.relative_path,
    pattern=f"{hs_safetensors.FOLDER}/hs_*.safetensors",
    encode=hs_safetensors.encode_row,
    read=hs_safetensors.read_stored,
    tokens=hs_safetensors.read_tokens,
    check=hs_safetensors.check_file,
    write=hs_safetensors.write_row,
    safetensors=True,
)
_PT = Layout(
    relative_path=speculators_pt.relative_path,
    pattern="data_*.pt",
    encode=speculators_pt.encode,
    read=speculators_pt.read,
    tokens=speculators_pt.read_tokens,
    check=speculators_pt.check,
)
_FORGE = Layout(
    relative_path=specforge.relative_path,
    pattern="rows_*/data_*.ckpt*",
    encode=specforge.encode,
    read=specforge.read,
    tokens=specforge.read_tokens,
    check=specforge.check,
)

DEFAULT = "hs_safetensors"
_ALL = (
    Format(
        DEFAULT,
        "specshim train; what the other formats are made from",
        lambda folder, _: FileStore(folder, _HS),
        root=hs_safetensors.FOLDER,
        float8=True,
        needs_mask=False,
    ),
    Format(
        "sharded",
        "specshim train, for millions of rows; any tar program",
        shards.ShardStore,
        root=shards.FOLDER,
        last_states=(RESIDUAL, NORMED),
        float8=True,
        needs_mask=False,
        many_rows_per_file=True,
    ),
    Format(
        "speculators-0.3",
        "speculators 0.3",
        lambda folder, _: FileStore(folder, _PT),
        root="",
        four_states=True,
        finish=sidecars.speculators_03,
        check_sidecars=sidecars.no_strangers,
    ),
    Format(
        "speculators-0.4",
        "speculators 0.4 (and 0.5 to 0.7 with --legacy-data)",
        lambda folder, _: FileStore(folder, _PT),
        root="",
        four_states=True,
        finish=sidecars.speculators_04,
        check_sidecars=sidecars.check_lengths,
    ),
    Format(
        "speculators-0.5",
        "speculators 0.5 to 0.7",
        lambda folder, _: FileStore(folder, _HS),
        root=hs_safetensors.FOLDER,
        four_states=True,
        finish=sidecars.speculators_05,
        check_sidecars=sidecars.check_table,
    ),
    Format(
        "speculators-0.8",
        "speculators 0.8 and 0.9",
        lambda folder, _: FileStore(folder, _HS),
        root=hs_safetensors.FOLDER,
        four_states=True,
        finish=sidecars.speculators_08,
        check_sidecars=sidecars.check_table,
    ),
    Format(
        "specforge",
        "SpecForge, offline training",
        lambda folder, _: FileStore(folder, _FORGE),
        root="",
        last_states=(NORMED,),
        four_states=True,
        finish=sidecars.specforge,
    ),
)
FORMATS = {item.name: item for item in _ALL}


def get_format(name: str, flag: str = "--format") -> Format:
    """A format by its name.

    Raises:
        UsageError: there is none of that name.
    """
    if name not in FORMATS:
        raise UsageError(flag, ", ".join(FORMATS), repr(name), "use one of these")
    return FORMATS[name]


def open_rows(folder: Path, record: Mapping[str, Any]) -> RowStore:
    """The rows of a folder that a manifest describes.

    Args:
        record: the manifest of `extract` or `convert`.

    Raises:
        UsageError: it names a format that this version does not know.
    """
    form = get_format(record.get("format", DEFAULT), f"{folder}/manifest.json, format")
    return form.open(folder, record.get("rows_per_file", shards.ROWS_PER_FILE))


def wanted_row(record: Mapping[str, Any], index: int) -> Wanted:
    """What the row of this number has to be, by the manifest: sizes, and that it is this row of this model."""
    header = {
        "row": str(index),
        "layer_ids": " ".join(map(str, record["layers"]["ids"])),
        "layer_convention": record["layers"]["convention"],
        "model_fingerprint": record["model"]["fingerprint"],
    }
    if record.get("last_state", RESIDUAL) != RESIDUAL:
        header["last_state"] = record["last_state"]
    dtype = record.get("store_dtype", record["dtype"])
    return Wanted(len(record["layers"]["ids"]), record["model"]["hidden_size"], dtype, header)


def recognised(folder: Path) -> list[Format]:
    """The formats whose rows lie in ``folder``; several where formats share their row files."""
    return [item for item in _ALL if item.open(folder, shards.ROWS_PER_FILE).indices()]
