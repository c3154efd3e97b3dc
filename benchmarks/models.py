"""Shapes to measure on; vLLM fills them with weights of its own making (`load_format=dummy`)."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from contract_tests.live.kimi import QUANTIZATION

_COMMON = {"bos_token_id": 1, "eos_token_id": 2, "rms_norm_eps": 1e-6, "tie_word_embeddings": False}


@dataclass(frozen=True)
class Shape:
    """A model's configuration and the prompts to give it.

    Args:
        layers: native ids of the states taken.
        dtype: what the engine computes in.
        cache_gib: for keys and values of six steps, where ways share a device: vLLM's connector keeps a request's
            blocks until its file is written.
    """

    config: dict[str, Any]
    prompts: int
    length: int
    layers: tuple[int, ...]
    dtype: str
    cache_gib: int = 16


_TINY = {
    **_COMMON,
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 2048,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": 4096,
}
# The shape of Qwen3-8B.
_DENSE_8B = {
    **_COMMON,
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rope_theta": 1000000,
}
# The shape of DeepSeek-V2-Lite: latent attention, 64 routed experts.
_LATENT = {
    **_COMMON,
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "vocab_size": 102400,
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "greedy",
    "norm_topk_prob": False,
    "scoring_func": "softmax",
    "routed_scaling_factor": 1.0,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "max_position_embeddings": 4096,
    "rope_theta": 10000,
}

# Its experts as Kimi-K2.5 stores them; of their columns a power of two, which eight devices can share.
_LATENT_INT4 = {**_LATENT, "moe_intermediate_size": 2048, "quantization_config": QUANTIZATION}

SHAPES = {
    "tiny": Shape(_TINY, 64, 256, (2, 4, 5, 8), "float32"),
    "dense-8b": Shape(_DENSE_8B, 128, 2048, (3, 19, 34, 36), "bfloat16"),
    # As many tokens in the short rows of a chat: what a row costs by itself.
    "dense-8b-short": Shape(_DENSE_8B, 1024, 256, (3, 19, 34, 36), "bfloat16"),
    "latent-moe": Shape(_LATENT, 128, 2048, (2, 13, 24, 27), "bfloat16", cache_gib=4),
    "latent-int4": Shape(_LATENT_INT4, 128, 2048, (2, 13, 24, 27), "bfloat16", cache_gib=4),
}


# Prompts are token ids; a tokenizer is only asked for the id of its end token.
_TOKENIZER = {
    "version": "1.0",
    "added_tokens": [],
    "model": {"type": "WordLevel", "vocab": {"<unk>": 0, "<s>": 1, "</s>": 2}, "unk_token": "<unk>"},
}
_TOKENIZER_CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "unk_token": "<unk>",
    "bos_token": "<s>",
    "eos_token": "</s>",
}


def write(name: str, folder: Path) -> Path:
    """Write the configuration of a shape, and a tokenizer, below `folder`; returns its path."""
    path = folder / name
    path.mkdir(parents=True, exist_ok=True)
    config = {**SHAPES[name].config, "torch_dtype": SHAPES[name].dtype}
    for file, content in (
        ("config.json", config),
        ("tokenizer.json", _TOKENIZER),
        ("tokenizer_config.json", _TOKENIZER_CONFIG),
    ):
        (path / file).write_text(json.dumps(content), encoding="utf-8")
    return path


def prompts(shape: Shape) -> list[list[int]]:
    """Random token ids, the same in each process."""
    import random

    dice = random.Random(0)
    high = shape.config["vocab_size"] - 1
    return [[dice.randint(3, high) for _ in range(shape.length)] for _ in range(shape.prompts)]
