"""What model families call the same number in their config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Llama's name -> those of older families: GPT-2, GPT-J, Bloom, MPT, ChatGLM.
_OTHERS: dict[str, tuple[str, ...]] = {
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers"),
    "hidden_size": ("n_embd", "d_model"),
    "max_position_embeddings": ("n_positions", "max_seq_len"),
}


def stated(config: Mapping[str, Any], key: str) -> Any:
    """What a config says of one number, whichever of its names it uses; None where it says nothing.

    Args:
        config: config.json, or the text model's part of it.
        key: the name that Llama's config has.
    """
    names = (key, *_OTHERS.get(key, ()))
    return next((config[name] for name in names if config.get(name) is not None), None)
