"""Every format by its name: who reads it, what it can hold, how it is opened, what lies beside the rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pipeline.formats import hs_safetensors, shards, sidecars, specforge, speculators_pt
from pipeline.formats.safetensors_row import encode as encode_safetensors
from pipeline.formats.sidecars import Summary
from pipeline.formats.stores import FileStore, Layout, RowStore
from shims.errors import UsageError

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
    finish: Callable[[Path, Summary], None] = lambda folder, summary: None
    """Write what lies beside the rows, once all of them are there."""


_HS = Layout(
    relative_path=lambda index: Path(hs_safetensors.FOLDER) / f"hs_{index}.safetensors",
    pattern=f"{hs_safetensors.FOLDER}/hs_*.safetensors",
    encode=encode_safetensors,
    read=hs_safetensors.read_stored,
    check=hs_safetensors.check_file,
    write=hs_safetensors.write_row,
)
_PT = Layout(
    speculators_pt.relative_path, "data_*.pt", speculators_pt.encode, speculators_pt.read, speculators_pt.check
)
_FORGE = Layout(
    relative_path=specforge.relative_path,
    pattern="rows_*/data_*.ckpt*",
    encode=specforge.encode,
    read=specforge.read,
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
    ),
    Format(
        "speculators-0.4",
        "speculators 0.4 (and 0.5 to 0.7 with --legacy-data)",
        lambda folder, _: FileStore(folder, _PT),
        root="",
        four_states=True,
        finish=sidecars.speculators_04,
    ),
    Format(
        "speculators-0.5",
        "speculators 0.5 to 0.7",
        lambda folder, _: FileStore(folder, _HS),
        root=hs_safetensors.FOLDER,
        four_states=True,
        finish=sidecars.speculators_05,
    ),
    Format(
        "speculators-0.8",
        "speculators 0.8 and 0.9",
        lambda folder, _: FileStore(folder, _HS),
        root=hs_safetensors.FOLDER,
        four_states=True,
        finish=sidecars.speculators_08,
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


def recognised(folder: Path) -> list[Format]:
    """The formats whose rows lie in ``folder``; several where formats share their row files."""
    return [item for item in _ALL if item.open(folder, shards.ROWS_PER_FILE).indices()]
