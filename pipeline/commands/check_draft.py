"""`specshim check-draft`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from pipeline.serving.check import MISMATCH, NOTE, CheckConfig, Checked, check_draft


def check_draft_command(
    draft: Annotated[Path, typer.Argument(help="The draft, or the output folder of `train`.")],
    vllm: Annotated[str | None, typer.Option(help="The release that will serve (default: the installed one).")] = None,
    model: Annotated[
        str | None, typer.Option(help="The verifier it will be served with (default: the one the draft names).")
    ] = None,
    trained_layer_ids: Annotated[
        list[int] | None,
        typer.Option(help="Native ids of the auxiliary layers it was trained on, where no manifest tells."),
    ] = None,
    from_facts: Annotated[
        bool, typer.Option("--from-facts", help="Judge by what is known of the release, even if it is installed.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run Python code that the model folder brings.")
    ] = False,
) -> None:
    """Say what a server will use of a draft. Exit code 0: it fits; 1: it does not; 2: that cannot be told."""
    result = check_draft(
        CheckConfig(
            draft,
            vllm,
            model,
            tuple(trained_layer_ids) if trained_layer_ids else None,
            not from_facts,
            trust_remote_code,
        )
    )
    if as_json:
        typer.echo(json.dumps(result.as_dict()))
    else:
        _show(result)
    raise typer.Exit(result.exit_code)


def table_of(result: Checked) -> Table:
    """What the server will use, for a person."""
    served = result.served
    table = Table(title=f"vLLM {served.release}, from {served.known_by}", show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for runner, layers in served.layers.items():
        table.add_row(f"layers, runner {runner}", f"{' '.join(map(str, layers.ids))} (native, from {layers.origin})")
    learned, known_by = result.trained.layers, result.trained.known_by
    known = f"{' '.join(map(str, learned))} (native, from {known_by})" if learned else "unknown"
    table.add_row("layers trained on", known)
    table.add_row("method", f"{served.method or 'eagle3'}, {served.speculative_tokens or '?'} draft tokens a step")
    table.add_row("draft vocabulary", f"{served.draft_vocab_size} of {result.verifier.vocab_size} tokens")
    table.add_row("verifier", str(served.verifier or result.verifier.path))
    for note in served.notes:
        table.add_row("note", note)
    return table


def _show(result: Checked) -> None:
    out, errors = Console(), Console(stderr=True)
    out.print(table_of(result))
    for finding in sorted(result.findings, key=lambda finding: finding.kind != MISMATCH):
        target = out if finding.kind == NOTE else errors
        target.print(f"{finding.kind}: {finding}", highlight=False, soft_wrap=True, markup=False)
    out.print(result.verdict, highlight=False)
