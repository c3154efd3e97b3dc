"""A draft on disk, written by hand, and the model it is for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pipeline_fixtures import write_model

VOCAB, DRAFT_VOCAB, HIDDEN, LAYERS = 300, 40, 16, 20
DEFAULTS = (2, 10, 17)
TRAINED = (3, 9, 15)


def write_verifier(folder: Path, **config: Any) -> Path:
    """A model folder with a config, a tokenizer, and no weights worth the name."""
    write_model(folder, layers=LAYERS, hidden=HIDDEN)
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    return folder


def write_draft(
    folder: Path,
    verifier: Path,
    ids: tuple[int, ...] | None = TRAINED,
    *,
    leave_out: tuple[str, ...] = (),
    **config: Any,
) -> Path:
    """A draft in speculators' format.

    Args:
        ids: that its config names, None for none.
        leave_out: tensors.
        config: entries that are set or replaced.
    """
    import numpy as np
    from safetensors.numpy import save_file

    chosen = np.sort(np.random.default_rng(0).permutation(VOCAB)[:DRAFT_VOCAB])
    t2d = np.zeros(VOCAB, dtype=np.bool_)
    t2d[chosen] = True
    tensors = {
        "d2t": (chosen - np.arange(DRAFT_VOCAB)).astype(np.int64),
        "t2d": t2d,
        "lm_head.weight": np.zeros((DRAFT_VOCAB, HIDDEN), dtype=np.float32),
        "fc.weight": np.zeros((HIDDEN, 3 * HIDDEN), dtype=np.float32),
    }
    content = {
        "speculators_model_type": "eagle3",
        "draft_vocab_size": DRAFT_VOCAB,
        "norm_before_residual": False,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {"name_or_path": str(verifier), "architectures": ["LlamaForCausalLM"]},
        },
        "transformer_layer_config": {
            "model_type": "llama",
            "hidden_size": HIDDEN,
            "vocab_size": VOCAB,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "intermediate_size": 8,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 512,
        },
    } | ({"eagle_aux_hidden_state_layer_ids": list(ids)} if ids else {})
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(content | config))
    save_file({name: part for name, part in tensors.items() if name not in leave_out}, folder / "model.safetensors")
    return folder


def write_training(folder: Path, verifier: Path, ids: tuple[int, ...] = TRAINED, **fields: Any) -> Path:
    """The manifest of the training that wrote ``folder/draft``."""
    from pipeline import manifest
    from pipeline.model_info import read_model

    settings: dict[str, Any] = {
        "auxiliary_layers_native": list(ids), "draft_vocab_size": DRAFT_VOCAB, "inputs": {"prepared_data": "x"},
        "max_seq_len": 512, "val_share": 0.25, "seed": 0,
    }  # fmt: skip
    model = manifest.describe_model(read_model(str(verifier)))
    manifest.write(folder, manifest.compose("train", complete=True, model=model, **settings | fields))
    return folder
