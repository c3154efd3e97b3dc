"""Tiny random models on disk, float32, with a tokenizer: made by transformers, read by vLLM.

Eight layers or more, so that no two default layer ids coincide; wide initial weights, so that every
layer matters; final-norm weights far from 1, so that a normed state cannot pass for an un-normed one.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from contract_tests.live.kimi import wrap

VOCABULARY = 512
LAYERS = 8
CONTEXT = 512

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "max_position_embeddings": CONTEXT,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
}


def _llama(**extra: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**_COMMON, num_key_value_heads=2, head_dim=32, **extra))


def _marker() -> Any:
    """A Llama whose layer i adds 1 to component i of the residual stream, and nothing else."""
    import torch

    model = _llama(mlp_bias=True)
    with torch.no_grad():
        model.model.embed_tokens.weight[:, :LAYERS] = 0
        for index, layer in enumerate(model.model.layers):
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
            layer.mlp.down_proj.bias.zero_()
            layer.mlp.down_proj.bias[index] = 1
    return model


def _qwen3() -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(Qwen3Config(**_COMMON, num_key_value_heads=2, head_dim=32))


def _mixture() -> Any:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            **_COMMON,
            num_key_value_heads=2,
            head_dim=32,
            num_experts=8,
            num_experts_per_tok=2,
            moe_intermediate_size=64,
            decoder_sparse_step=1,
            norm_topk_prob=True,
        )
    )


def _gemma() -> Any:
    """Gemma scales its embeddings in the model's forward: a replaced forward loses that."""
    from transformers import GemmaConfig, GemmaForCausalLM

    config = {**_COMMON, "tie_word_embeddings": True}
    return GemmaForCausalLM(GemmaConfig(**config, num_key_value_heads=2, head_dim=32))


def _deepseek(**sizes: int) -> Any:
    """DeepSeek-V3's layers (latent attention, shared and routed experts), as in Kimi-K2.5.

    Args:
        sizes: configuration entries to set otherwise.
    """
    import torch
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    # The CPU build's rotary kernel for interleaved pairs turns only the first of several query heads
    # right (compare vLLM's RotaryEmbedding.forward_cpu with forward_native), so there is one head there.
    heads = 4 if torch.cuda.is_available() else 1
    return DeepseekV3ForCausalLM(
        DeepseekV3Config(
            **{
                **_COMMON,
                "num_attention_heads": heads,
                "num_key_value_heads": heads,
                "q_lora_rank": 64,
                "kv_lora_rank": 512,
                "qk_nope_head_dim": 128,
                "qk_rope_head_dim": 64,
                "v_head_dim": 128,
                "n_routed_experts": 8,
                "num_experts_per_tok": 2,
                "n_group": 2,
                "topk_group": 1,
                "moe_intermediate_size": 64,
                "n_shared_experts": 1,
                "first_k_dense_replace": 1,
                "routed_scaling_factor": 1.0,
                # Not fields of transformers': vLLM reads the selection bias from the checkpoint only where the
                # method is named.
                "topk_method": "noaux_tc",
                "scoring_func": "sigmoid",
                **sizes,
            }
        )
    )


# Eight devices can share it: a head each, and as much of an expert as the INT4 kernels take.
_FOR_EIGHT: dict[str, Any] = {"num_attention_heads": 8, "num_key_value_heads": 8, "moe_intermediate_size": 512}


def save_deepseek(path: Path, layers: int, hidden: int, experts: int, dtype: str = "float32", **more: int) -> None:
    """A DeepSeek-V3 of these sizes, with wide weights, and its tokenizer."""
    import torch

    torch.manual_seed(0)
    sizes = {"num_hidden_layers": layers, "hidden_size": hidden, "n_routed_experts": experts}
    sizes |= {"intermediate_size": 2 * hidden, "moe_intermediate_size": hidden // 2, "n_group": 1, "topk_group": 1}
    model = _deepseek(**(sizes | more))
    _widen(model.to(torch.float32))
    model.to(getattr(torch, dtype)).save_pretrained(path)
    _tokenizer().save_pretrained(path)


def _dense_8b() -> Any:
    """The shape of an 8B dense model, in bfloat16: for a GPU."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=151936,
        hidden_size=4096,
        intermediate_size=12288,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=1,
    )
    with torch.device("cuda"):
        return Qwen3ForCausalLM(config).to(torch.bfloat16)


MAKERS: dict[str, Callable[[], Any]] = {
    "llama": _llama,
    "marker": _marker,
    "qwen3": _qwen3,
    "mixture": _mixture,
    "gemma": _gemma,
    "deepseek": _deepseek,
    "dense-8b": _dense_8b,
}


def make(name: str, folder: Path) -> Path:
    """Write the model `name` below `folder`, if it is not there yet; returns its path."""
    import torch

    path = folder / name
    if (path / "tokenizer.json").is_file():
        return path
    if name.startswith("kimi"):
        text, int4 = folder / f"{name}-text", name.endswith("int4")
        save_deepseek(text, LAYERS, hidden=256, experts=8, **(_FOR_EIGHT if int4 else {}))
        wrap(text, path, int4=int4)
        _tokenizer().save_pretrained(path)
        return path
    torch.manual_seed(0)
    model = MAKERS[name]()
    if name not in ("marker", "dense-8b"):
        _widen(model.to(torch.float32))
    model.save_pretrained(path)
    _tokenizer().save_pretrained(path)
    return path


def _widen(model: Any) -> None:
    import torch

    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.08)
        elif "norm" in name:
            torch.nn.init.uniform_(parameter, 0.2, 3.0)


def _tokenizer() -> Any:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = {"<s>": 0, "</s>": 1, **{f"w{i}": i for i in range(2, VOCABULARY)}}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="</s>")),
        bos_token="<s>",
        eos_token="</s>",
        pad_token="</s>",
    )
