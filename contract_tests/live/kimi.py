"""A small random model with Kimi-K2.5's architecture: a vision wrapper around DeepSeek-V3 layers (latent attention,
routed and shared experts), the routed experts' weights in compressed-tensors INT4 where asked for.

    python -m contract_tests.live.kimi FOLDER [--int4] [--layers 8] [--hidden 512] [--experts 8]

FOLDER holds the model as vLLM reads it; FOLDER/reference the same text model for transformers, with the
weights that INT4 leaves. Key names as in https://huggingface.co/moonshotai/Kimi-K2.5/blob/main/config.json.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
from pathlib import Path
from typing import Any

GROUP = 32  # weights that share a scale, as in Kimi-K2.5
_ROUTED = re.compile(r"mlp\.experts\.\d+\.(gate|up|down)_proj\.weight$")
QUANTIZATION = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "quantization_status": "compressed",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 4,
                "type": "int",
                "symmetric": True,
                "strategy": "group",
                "group_size": GROUP,
                "dynamic": False,
            },
            "input_activations": None,
            "output_activations": None,
        }
    },
    "ignore": [
        "lm_head",
        "re:.*self_attn.*",
        "re:.*shared_experts.*",
        r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
        "re:.*vision_tower.*",
        "re:.*mm_projector.*",
    ],
}


def wrap(text_model: Path, folder: Path, int4: bool) -> None:
    """Write the wrapper around a text model.

    Args:
        text_model: folder of a DeepSeek-V3 model, float32, as transformers saves it.
        folder: to write to.
        int4: round the routed experts' weights to 4 bits.
    """
    from safetensors.torch import load_file, save_file

    weights = {n: t for file in sorted(text_model.glob("*.safetensors")) for n, t in load_file(file).items()}
    config = json.loads((text_model / "config.json").read_text(encoding="utf-8"))
    reference = folder / "reference"
    shutil.copytree(text_model, reference, ignore=shutil.ignore_patterns("*.safetensors*"), dirs_exist_ok=True)
    packed: dict[str, Any] = {}
    for name, weight in weights.items():
        inside = f"language_model.{name}"
        if int4 and _ROUTED.search(name):
            parts, weights[name] = quantized(weight)
            packed.update({inside.removesuffix("weight") + part: tensor for part, tensor in parts.items()})
        else:
            packed[inside] = weight.contiguous()
    save_file(weights, reference / "model.safetensors", metadata={"format": "pt"})
    save_file(packed, folder / "model.safetensors", metadata={"format": "pt"})
    if int4:
        config["quantization_config"] = QUANTIZATION
    whole = {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "text_config": config,
        "vision_config": {
            "model_type": "kimi_k25_vision",
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_attention_heads": 2,
            "num_hidden_layers": 1,
            "mm_hidden_size": 32,
            "text_hidden_size": config["hidden_size"],
        },
        "media_placeholder_token_id": config["vocab_size"] - 1,
        "bos_token_id": config["bos_token_id"],
        "eos_token_id": config["eos_token_id"],
        "torch_dtype": config.get("dtype", config.get("torch_dtype", "float32")),
    }
    (folder / "config.json").write_text(json.dumps(whole, indent=1), encoding="utf-8")


def quantized(weight: Any) -> tuple[dict[str, Any], Any]:
    """Symmetric 4-bit integers with a scale for each group of a row.

    Args:
        weight: [out, in], `in` a multiple of GROUP.

    Returns:
        (tensors of the compressed-tensors format `pack-quantized`, the weight that they stand for).
    """
    import torch

    out, width = weight.shape
    groups = weight.reshape(out, width // GROUP, GROUP)
    scale = (groups.abs().amax(-1, keepdim=True) / 7).clamp(min=1e-8)
    whole = torch.round(groups / scale).clamp(-8, 7)
    # Eight values to a word, the first in the lowest bits, each stored with 8 added.
    nibbles = (whole + 8).to(torch.int64).reshape(out, width // 8, 8)
    words = (nibbles << (4 * torch.arange(8))).sum(-1)
    words = torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
    parts = {
        "weight_packed": words.contiguous(),
        "weight_scale": scale.squeeze(-1).contiguous(),
        "weight_shape": torch.tensor([out, width], dtype=torch.int64),
    }
    return parts, (whole * scale).reshape(out, width).contiguous()


def main() -> None:
    """See the module's docstring."""
    from contract_tests.live.models import save_deepseek

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--int4", action="store_true")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--experts", type=int, default=8)
    options = parser.parse_args()
    text = options.folder / "text"
    save_deepseek(text, layers=options.layers, hidden=options.hidden, experts=options.experts)
    wrap(text, options.folder, options.int4)
    shutil.rmtree(text)


if __name__ == "__main__":
    main()
