"""`specshim fetch`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pipeline.commands import extract_options as storing


def fetch(
    source: Annotated[Path, typer.Argument(help="s3://BUCKET/FOLDER, written by `extract`.")],
    output_dir: Annotated[Path, typer.Option(help="Folder for the copy.")],
    min_free: storing.MinFree = 1.0,
) -> None:
    """Copy a finished set of rows from an object store to a folder.

    Run it again to go on where it stopped.
    """
    from pipeline.object_store.address import shown
    from pipeline.object_store.fetch import FetchConfig
    from pipeline.object_store.fetch import fetch as run

    result = run(FetchConfig(source, output_dir, min_free))
    kept = f", {result.kept} found here" if result.kept else ""
    typer.echo(f"{result.files} files copied{kept}: {shown(source)} -> {output_dir}")
    if result.others:
        typer.echo(f"{result.others} objects there are no part of the set and were left")
