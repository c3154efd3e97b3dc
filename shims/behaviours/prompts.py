"""What a caller hands to `generate`, checked and cut."""

from __future__ import annotations

import logging
from typing import Any

logger = logging.getLogger("specshim")


def checked_prompts(model_config: Any, token_ids: Any) -> list[list[int]]:
    """The prompts as lists, cut to what the model may see.

    Args:
        model_config: vLLM's.
        token_ids: token ids of each prompt, as lists or a [prompts, tokens] tensor.

    Raises:
        ValueError: no prompts, an empty prompt, or a token id outside of the vocabulary.
    """
    rows = token_ids.tolist() if hasattr(token_ids, "tolist") else token_ids
    prompts = [row.tolist() if hasattr(row, "tolist") else list(row) for row in rows]
    if not prompts:
        raise ValueError("token_ids cannot be empty: give at least one prompt")
    vocabulary = model_config.get_vocab_size()
    for index, prompt in enumerate(prompts):
        if not prompt:
            raise ValueError(f"prompt {index} is empty: a prompt needs at least one token id")
        wrong = next((t for t in prompt if not 0 <= t < vocabulary), None)
        if wrong is not None:
            raise ValueError(f"prompt {index} holds token id {wrong}: the model's vocabulary is 0 to {vocabulary - 1}")
    limit = model_config.max_model_len - 1  # one place is kept for the token that vLLM samples
    cut = sum(len(prompt) > limit for prompt in prompts)
    if cut:
        logger.warning("%d of %d prompts are cut to %d tokens (max_model_len - 1)", cut, len(prompts), limit)
    return [prompt[:limit] for prompt in prompts]
