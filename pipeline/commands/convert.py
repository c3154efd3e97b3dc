"""`specshim convert`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pipeline.commands import extract_options as storing
from pipeline.config import ConvertConfig

Ids = list[int] | None


def convert(
    source: Annotated[Path, typer.Argument(help="Folder of hidden states.")],
    to: Annotated[str, typer.Option(help="The format to write; names as for extract --format.")],
    output_dir: Annotated[Path, typer.Option(help="Folder for the new rows.")],
    source_format: Annotated[
        str | None, typer.Option("--from", help="The format of the source, where it cannot be seen.")
    ] = None,
    layer_ids: Annotated[Ids, typer.Option(help="Layers to keep (default: all).")] = None,
    layer_convention: Annotated[
        str | None, typer.Option(help="How to name the layers: after or native (default: as the source).")
    ] = None,
    source_layer_ids: Annotated[
        Ids, typer.Option(help="Layers of a source without manifest; proved by recomputing rows.")
    ] = None,
    source_layer_convention: Annotated[
        str | None, typer.Option(help="What the ids of a source without manifest mean: after or native.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="The model of the states: its final norm, or the proof.")] = None,
    prove: Annotated[int, typer.Option(help="Rows of a source without manifest to recompute.")] = 2,
    rows_per_file: storing.RowsPerFile = 1000,
    store_dtype: storing.StoreDtype = "auto",
    vocab: storing.VocabFolder = None,
    min_free: storing.MinFree = 1.0,
    ignore_space: storing.IgnoreSpace = False,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run Python code that the model folder brings.")
    ] = False,
) -> None:
    """Write finished hidden states in another trainer's format."""
    from pipeline.convert import convert as run

    result = run(
        ConvertConfig(
            source=source,
            output_dir=output_dir,
            format=to,
            source_format=source_format,
            layer_ids=tuple(layer_ids) if layer_ids else None,
            layer_convention=layer_convention,
            source_layer_ids=tuple(source_layer_ids) if source_layer_ids else None,
            source_layer_convention=source_layer_convention,
            model=model,
            prove=prove,
            rows_per_file=rows_per_file,
            store_dtype=store_dtype,
            vocab=vocab,
            min_free_gib=min_free,
            ignore_space=ignore_space,
            trust_remote_code=trust_remote_code,
        )
    )
    kept = f", {result.kept} found finished" if result.kept else ""
    typer.echo(f"{result.written} of {result.rows} rows written{kept} -> {output_dir}")
    if not result.exact:
        typer.echo("the source cannot be had back from it: states were rounded, normed or left out")
