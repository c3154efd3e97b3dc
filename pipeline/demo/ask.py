"""Does the converted model speak sense? ``python -m pipeline.demo.ask FOLDER QUESTION WORD``.

A wrong conversion (a transposed weight, a wrong rotary order, a shifted vocabulary) answers
with noise, so one greedy answer that names the expected word is a sharp test.
"""

from __future__ import annotations

import sys
from pathlib import Path

from shims.errors import SpecshimError


def answer(model: Path, question: str) -> str:
    """The model's greedy answer, computed with transformers."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    speaker = AutoModelForCausalLM.from_pretrained(model).eval()
    asked = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=True, return_tensors="pt"
    )
    with torch.no_grad():
        generated = speaker.generate(**asked, max_new_tokens=24, do_sample=False)
    text: str = tokenizer.decode(generated[0][asked["input_ids"].shape[1] :], skip_special_tokens=True)
    return text


def main() -> int:
    """Print the answer; exit code 1 when it lacks the word."""
    folder, question, word = sys.argv[1:]
    said = answer(Path(folder), question)
    print(f"{question} -> {said}")
    if word not in said:
        print(
            SpecshimError(
                "demo model", f"an answer with {word!r}", repr(said), "delete the model folder and run the demo again"
            )
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
