"""`specshim evaluate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pipeline.config import EvaluateConfig


def evaluate(
    draft: Annotated[Path, typer.Option(help="The draft, or the output folder of `train`.")],
    output_dir: Annotated[Path, typer.Option(help="Folder for the report; run again, it goes on where it stopped.")],
    data: Annotated[
        Path | None, typer.Option(help="Folder written by `extract`: the draft's held-out rows are in it.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="The verifier (default: the one the draft names).")] = None,
    vllm: Annotated[
        str | None, typer.Option(help="Release to check the draft for (default: the installed one).")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Draft tokens a step (default: as the draft proposes).")] = None,
    rows: Annotated[str, typer.Option(help="held-out, or all for data that no row of was trained on.")] = "held-out",
    max_rows: Annotated[int | None, typer.Option(help="Rows to look at, at most.")] = None,
    device: Annotated[str, typer.Option(help="Of the teacher-forced part: auto, cpu, cuda or cuda:N.")] = "auto",
    serve: Annotated[bool, typer.Option("--serve/--no-serve", help="Run the draft in vLLM.")] = True,
    replay: Annotated[
        bool, typer.Option("--replay/--no-replay", help="Teacher-force the server's own answers, with transformers.")
    ] = True,
    untrained: Annotated[bool, typer.Option("--untrained", help="The same draft with fresh weights, too.")] = False,
    prompts: Annotated[
        Path | None, typer.Option(help="Questions: prepared data, conversations, or JSONL with `prompt`.")
    ] = None,
    max_prompts: Annotated[int, typer.Option(help="Questions to ask, at most.")] = 16,
    max_tokens: Annotated[int, typer.Option(help="Tokens of an answer, at most.")] = 128,
    max_num_seqs: Annotated[int, typer.Option(help="Answers that an engine works on at once.")] = 16,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16; auto is float32 on a CPU.")] = "auto",
    tp_size: Annotated[int, typer.Option(help="GPUs to spread the verifier over.")] = 1,
    gpu_memory_utilization: Annotated[float, typer.Option(help="Share of device memory for vLLM.")] = 0.80,
    enforce_eager: Annotated[
        bool | None, typer.Option("--enforce-eager/--compile", help="Uncompiled (default: on a CPU only).")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Go on with a draft that does not fit.")] = False,
    layer_ids: Annotated[
        list[int] | None, typer.Option(help="With --force: native ids to feed the draft instead of its own.")
    ] = None,
    trained_layer_ids: Annotated[
        list[int] | None, typer.Option(help="Native ids it was trained on, where no manifest tells.")
    ] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run Python code that the model folder brings.")
    ] = False,
) -> None:
    """Measure a draft on held-out rows and in vLLM, beside no speculation and n-gram. Exit code 1: mismatched."""
    from pipeline.evaluate import evaluate as run
    from pipeline.evaluation.report import TEXT_NAME, summary
    from pipeline.evaluation.verdict import MISMATCHED

    results = run(
        EvaluateConfig(
            draft=draft,
            data=data,
            output_dir=output_dir,
            model=model,
            vllm=vllm,
            steps=steps,
            rows=rows,
            max_rows=max_rows,
            device=device,
            serve=serve,
            replay=replay,
            untrained=untrained,
            prompts=prompts,
            max_prompts=max_prompts,
            max_tokens=max_tokens,
            max_num_seqs=max_num_seqs,
            dtype=dtype,
            tp_size=tp_size,
            gpu_memory_utilization=gpu_memory_utilization,
            enforce_eager=enforce_eager,
            force=force,
            layer_ids=tuple(layer_ids) if layer_ids else None,
            trained_layer_ids=tuple(trained_layer_ids) if trained_layer_ids else None,
            trust_remote_code=trust_remote_code,
        )
    )
    for line in summary(results):
        typer.echo(line)
    typer.echo(f"report -> {output_dir / TEXT_NAME}")
    if MISMATCHED in results.verdict().words:
        raise typer.Exit(1)
