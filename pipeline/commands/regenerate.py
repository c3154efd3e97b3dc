"""`specshim regenerate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pipeline.commands import prepare_options as preparing
from pipeline.config import RegenerateConfig


def regenerate(
    model_path: Annotated[str, typer.Option(help="Model folder, or a hub name.")],
    input: Annotated[Path, typer.Option(help="Conversations, read as by `prepare`; replies in them are not used.")],
    output_dir: Annotated[Path, typer.Option(help="Folder for conversations.jsonl.")],
    max_reply_tokens: Annotated[int, typer.Option(help="Longest reply.")] = 1024,
    max_model_len: Annotated[
        int, typer.Option(help="Longest conversation, in tokens (at most the model's context).")
    ] = 4096,
    temperature: Annotated[float, typer.Option(help="Of sampling; 0 takes the likeliest token.")] = 0.7,
    top_p: Annotated[float, typer.Option(help="Share of probability to sample from.")] = 0.95,
    seed: Annotated[int, typer.Option(help="Of sampling.")] = 0,
    batch_size: Annotated[int, typer.Option(help="Conversations asked at once, and made durable together.")] = 256,
    tp_size: Annotated[int, typer.Option(help="GPUs to spread the model over.")] = 1,
    gpu_memory_utilization: Annotated[float, typer.Option(help="Share of device memory for vLLM.")] = 0.90,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16; auto is float32 on a CPU.")] = "auto",
    split: preparing.Split = None,
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="Leave out unusable rows and list them.")] = False,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run Python code that the model folder brings.")
    ] = False,
) -> None:
    """Ask the questions anew, so that the replies are the model's own words."""
    from pipeline.regenerate import NAME
    from pipeline.regenerate import regenerate as run

    result = run(
        RegenerateConfig(
            model_path=model_path,
            input=input,
            output_dir=output_dir,
            max_reply_tokens=max_reply_tokens,
            max_model_len=max_model_len,
            temperature=temperature,
            top_p=top_p,
            seed=seed,
            batch_size=batch_size,
            tp_size=tp_size,
            gpu_memory_utilization=gpu_memory_utilization,
            dtype=dtype,
            split=split,
            skip_bad=skip_bad,
            trust_remote_code=trust_remote_code,
        )
    )
    kept = f", {result.kept} found finished" if result.kept else ""
    typer.echo(f"{result.conversations} conversations, {result.replies} replies{kept} -> {output_dir / NAME}")
    if result.cut_replies:
        typer.echo(f"{result.cut_replies} replies were cut at {max_reply_tokens} tokens or the end of the context")
    if result.shortened:
        typer.echo(f"{result.shortened} conversations end early: an empty reply, or no room for another one")
    for line in result.skipped[:10]:
        typer.echo(f"skipped {line}", err=True)
    if len(result.skipped) > 10:
        typer.echo(f"… and {len(result.skipped) - 10} more", err=True)
