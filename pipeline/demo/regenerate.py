"""Answers from the demo model itself, through vLLM: the conversations that the demo trains on.

A draft learns to guess what its model says, so the replies must be that model's own. Run as
``python -m pipeline.demo.regenerate --model FOLDER [--output FILE]``; the committed
conversations.jsonl was written by it.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from pipeline.atomic import write_text

PROMPTS = Path(__file__).with_name("prompts.jsonl")
CONVERSATIONS = Path(__file__).with_name("conversations.jsonl")
MAX_REPLY_TOKENS = 128
TEMPERATURE = 0.6


def read_prompts(path: Path = PROMPTS) -> list[list[str]]:
    """User turns by conversation: one JSON list a line, one entry a turn."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def regenerate(model: Path, output: Path, seed: int = 0) -> int:
    """Ask every question, round by round, and write the conversations.

    Args:
        model: the demo model's folder.
        output: JSONL with ``id``, ``messages`` and ``finish`` (why each reply ended).
        seed: for sampling; one seed a conversation is derived from it.

    Returns:
        Conversations written.
    """
    from vllm import LLM, SamplingParams

    questions = read_prompts()
    rows: list[dict[str, Any]] = [
        {"id": f"demo-{index}", "messages": [], "finish": []} for index in range(len(questions))
    ]
    # float32: this runs on a CPU, where bfloat16 is often emulated.
    llm: Any = LLM(model=str(model), dtype="float32", max_model_len=2048, enforce_eager=True, max_num_seqs=16)
    for round_number in range(max(map(len, questions))):
        asked = [index for index, turns in enumerate(questions) if round_number < len(turns)]
        for index in asked:
            rows[index]["messages"].append({"role": "user", "content": questions[index][round_number]})
        sampling = [
            SamplingParams(temperature=TEMPERATURE, top_p=0.95, max_tokens=MAX_REPLY_TOKENS, seed=seed * 1000 + index)
            for index in asked
        ]
        replies = llm.chat([rows[index]["messages"] for index in asked], sampling)
        for index, reply in zip(asked, replies, strict=True):
            answer = reply.outputs[0]
            rows[index]["messages"].append({"role": "assistant", "content": answer.text.strip()})
            rows[index]["finish"].append(answer.finish_reason)
    # An empty reply cannot be trained on.
    kept = [row for row in rows if all(message["content"] for message in row["messages"])]
    write_text(output, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in kept))
    return len(kept)


def main() -> None:
    """Command line of this module."""
    parser = argparse.ArgumentParser(description="Answer the demo's questions with the demo's model.")
    parser.add_argument("--model", type=Path, required=True, help="folder of the demo model")
    parser.add_argument("--output", type=Path, default=CONVERSATIONS, help="JSONL to write")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    print(f"{regenerate(options.model, options.output, options.seed)} conversations -> {options.output}")


if __name__ == "__main__":
    main()
