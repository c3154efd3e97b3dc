"""The options of `specshim extract` that say how rows are stored, checked and shared out."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

FormatName = Annotated[
    str,
    typer.Option(
        help="hs_safetensors, sharded, speculators-0.3, speculators-0.4, speculators-0.5 (to 0.7), "
        "speculators-0.8 (and 0.9) or specforge."
    ),
]
RowsPerFile = Annotated[int, typer.Option(help="For --format sharded.")]
StoreDtype = Annotated[
    str, typer.Option(help="float32, bfloat16, float16, float8_e4m3 (half of bfloat16), or auto: as computed.")
]
VocabFolder = Annotated[
    Path | None, typer.Option(help="Folder of `vocab`; its mapping goes beside the rows where the format has a place.")
]
MaxBad = Annotated[int, typer.Option(help="Rows of zero, constant or not finite states to leave out before stopping.")]
Preflight = Annotated[int, typer.Option(help="Rows to compare with a reference before the bulk.")]
PreflightAgainst = Annotated[str, typer.Option(help="transformers, or solo: the engine itself, one row at a time.")]
ShardOf = Annotated[
    str | None, typer.Option("--shard", help="i/n: the i-th of n processes that share the output folder.")
]
MinFree = Annotated[float, typer.Option("--min-free-gib", help="Stop before less is left free on the disk.")]
IgnoreSpace = Annotated[bool, typer.Option("--ignore-space", help="Begin although it may not fit.")]
CheckContent = Annotated[
    bool, typer.Option("--check-content", help="Compare finished rows with their hashes, not by structure alone.")
]
StatusOnly = Annotated[
    bool, typer.Option("--status", help="Print what is done, missing and damaged, and change nothing.")
]
Replicas = Annotated[
    int | None,
    typer.Option(help="direct: engines side by side, each on --tp-size GPUs; needs Ray (pip install 'specshim[ray]')."),
]
RayAddress = Annotated[
    str, typer.Option(help="local: Ray on this machine alone; auto: the cluster it belongs to; or host:port.")
]
MaxRestarts = Annotated[int, typer.Option(help="Replicas that may die and be replaced in one run.")]
