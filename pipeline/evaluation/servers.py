"""The parts of an evaluation that run vLLM: without speculation, with n-gram's, with the draft's."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from typing import Any

from pipeline import manifest
from pipeline.devices import computing_dtype
from pipeline.evaluation import prompts as asking
from pipeline.evaluation.request import NGRAM, NONE, EngineAnswer, EngineRequest, first_difference, speculation
from pipeline.evaluation.results import Results
from pipeline.evaluation.serving import ask
from pipeline.evaluation.task import FILES, SEED, Task, chosen_rows, facts_of
from pipeline.progress import console
from pipeline.serving.draft_folder import DraftFolder
from shims.errors import SpecshimError, UsageError
from shims.precision import VARIABLE as FLOAT32_IN_TRITON
from shims.precision import keep_float32
from shims.versions import installed

_DECIDING = ("VLLM_USE_V2_MODEL_RUNNER", "VLLM_ATTENTION_BACKEND", FLOAT32_IN_TRITON)
"""Settings of the environment that decide what runs."""
_MARGIN = 16
"""Tokens of context beyond prompt and answer, for the draft's own."""


def serve(task: Task, results: Results, drafts: Mapping[str, DraftFolder]) -> list[list[int]]:
    """Run each engine, put its answers into the results, and return what was asked."""
    config = task.config
    if not config.serve:
        results.not_run["served"] = "--no-serve"
        return []
    if installed("vllm") is None:
        results.not_run["served"] = "no vLLM is installed"
        return []
    if config.prompts is not None:
        prompts = asking.of_file(config.prompts, task.verifier, config.max_prompts, config.trust_remote_code)
    else:
        prompts = asking.of_rows(chosen_rows(task))[: config.max_prompts]
    if not prompts:
        raise UsageError("--data", "rows with something before the answer", "none", "give questions: --prompts FILE")
    keep_float32(computing_dtype(config.dtype, task.verifier.dtype))
    for kind in (NONE, NGRAM, *drafts):
        draft = drafts.get(kind)
        request = _request(task, kind, draft, prompts)
        made_from = request.as_dict() | (facts_of(task, draft) if draft else {"verifier": task.verifier.fingerprint})
        made_from["versions"] = manifest.installed_versions()
        made_from["environment"] = {name: os.environ.get(name) for name in _DECIDING}
        try:
            found = task.parts.get(
                f"served_{FILES[kind]}", made_from,
                partial(_asked, task, request, f"engine_{FILES[kind]}"),
            )  # fmt: skip
        except SpecshimError as error:
            # A release may serve one kind and not another; what it says about that is part of the result.
            results.not_run[f"served, {kind}"] = error.found
            console.print(str(error), highlight=False, markup=False, soft_wrap=True)
            continue
        results.engines[kind] = EngineAnswer(**found)
    _look_at_differences(task, results, prompts)
    return prompts


def _asked(task: Task, request: EngineRequest, name: str) -> dict[str, Any]:
    return asdict(ask(request, task.parts.folder, name))


def _request(task: Task, kind: str, draft: DraftFolder | None, prompts: list[list[int]]) -> EngineRequest:
    import torch

    config = task.config
    longest = max(map(len, prompts)) + config.max_tokens + task.steps + _MARGIN
    on_gpu = torch.cuda.is_available()
    options: dict[str, Any] = {
        "dtype": computing_dtype(config.dtype, task.verifier.dtype),
        "max_model_len": min(longest, task.verifier.max_positions or longest),
        "max_num_seqs": min(config.max_num_seqs, len(prompts)),
        "enforce_eager": not on_gpu if config.enforce_eager is None else config.enforce_eager,
        "tensor_parallel_size": config.tp_size,
        "trust_remote_code": config.trust_remote_code,
        "seed": SEED,
    }
    if on_gpu:
        options["gpu_memory_utilization"] = config.gpu_memory_utilization
    return EngineRequest(
        kind=kind,
        model=str(task.verifier.path),
        prompts=prompts,
        max_tokens=config.max_tokens,
        options=options,
        speculative_config=speculation(kind, str(draft.path) if draft else None, task.steps),
    )


def _look_at_differences(task: Task, results: Results, prompts: list[list[int]]) -> None:
    """Where answers with speculation differ, ask the verifier alone how close the call was."""
    base = results.engines.get(NONE)
    if base is None:
        return
    for kind, answer in results.engines.items():
        places = [first_difference(a, b) for a, b in zip(base.outputs, answer.outputs, strict=True)]
        contexts = [
            [*prompt, *said[:place]]
            for prompt, said, place in zip(prompts, base.outputs, places, strict=True)
            if place is not None and place < len(said)
        ]
        if not contexts:
            continue
        plain = _request(task, NONE, None, contexts)
        request = EngineRequest(plain.kind, plain.model, contexts, 1, plain.options, None, logprobs=2)
        try:
            found = task.parts.get(
                f"gaps_{FILES[kind]}", request.as_dict(),
                partial(_asked, task, request, f"engine_gaps_{FILES[kind]}"),
            )  # fmt: skip
        except SpecshimError as error:
            results.not_run[f"gaps, {kind}"] = error.found
            continue
        results.gaps[kind] = EngineAnswer(**found).gaps
