"""One vLLM engine in a process of its own: ``python -m pipeline.evaluation.engine REQUEST.json ANSWER.json``."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pipeline import manifest
from pipeline.atomic import write_text
from pipeline.evaluation.request import EngineAnswer, EngineRequest

_WARM_UP_TOKENS = 8
_DRAFTS = "vllm:spec_decode_num_drafts"
_DRAFT_TOKENS = "vllm:spec_decode_num_draft_tokens"
_BY_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos"


def run(request: EngineRequest) -> EngineAnswer:
    """Build the engine, answer greedily, and read its counters."""
    from vllm import LLM, SamplingParams

    options = dict(request.options)
    if request.speculative_config is not None:
        options["speculative_config"] = request.speculative_config
    # Without prefix caching every prompt passes through model and draft; the counters need the statistics.
    llm: Any = LLM(model=request.model, enable_prefix_caching=False, disable_log_stats=False, **options)
    prompts = [{"prompt_token_ids": prompt} for prompt in request.prompts]
    llm.generate(prompts[:1], SamplingParams(temperature=0, max_tokens=_WARM_UP_TOKENS), use_tqdm=False)
    before = _counters(llm)
    started = time.perf_counter()
    said = llm.generate(
        prompts,
        SamplingParams(temperature=0, max_tokens=request.max_tokens, logprobs=request.logprobs),
        use_tqdm=False,
    )
    seconds = time.perf_counter() - started
    after = _counters(llm)
    gaps = [_gap(answer.outputs[0].logprobs) for answer in said] if request.logprobs else []
    return EngineAnswer(
        kind=request.kind,
        outputs=[list(answer.outputs[0].token_ids) for answer in said],
        seconds=seconds,
        drafts=after[0] - before[0],
        draft_tokens=after[1] - before[1],
        accepted_per_position=[now - was for now, was in zip(after[2], before[2] or [0] * len(after[2]), strict=True)],
        gaps=gaps,
        stack=manifest.installed_versions(),
    )


def _counters(llm: Any) -> tuple[int, int, list[int]]:
    """(drafts, draft tokens, accepted by position) since the engine began."""
    found: dict[str, Any] = {}
    for metric in llm.get_metrics():
        if metric.name in (_DRAFTS, _DRAFT_TOKENS):
            found[metric.name] = found.get(metric.name, 0) + metric.value
        elif metric.name == _BY_POSITION:
            found[metric.name] = [a + b for a, b in zip(found.get(_BY_POSITION, [0] * len(metric.values)),
                                                        metric.values, strict=True)]  # fmt: skip
    by_position = [int(value) for value in found.get(_BY_POSITION, [])]
    return int(found.get(_DRAFTS, 0)), int(found.get(_DRAFT_TOKENS, 0)), by_position


def _gap(logprobs: Any) -> float:
    best = sorted((entry.logprob for entry in logprobs[0].values()), reverse=True)
    return float(best[0] - best[1])


def main() -> None:
    """Entry point of the process."""
    request, answer = map(Path, sys.argv[1:])
    asked = EngineRequest(**json.loads(request.read_text(encoding="utf-8")))
    write_text(answer, json.dumps(asdict(run(asked))))


if __name__ == "__main__":
    main()
