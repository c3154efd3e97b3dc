"""DATA: settings for kinds of training. Flags and a configuration file override them."""

from __future__ import annotations

from typing import Any

RECIPES: dict[str, dict[str, Any]] = {
    # Does everything run? Minutes on two CPU cores, with a small model.
    "smoke": {"epochs": 100, "max_steps": 20, "max_seq_len": 256, "lr": 1e-3, "ttt_steps": 2, "val_steps": 10},
    # A model below a billion parameters with some hundred to some thousand rows, on one device.
    "small": {
        "epochs": 10, "max_seq_len": 1024, "lr": 1e-3, "ttt_steps": 3, "scheduler": "cosine", "save_steps": 200,
        "patience": 3,
    },
    # 61 layers of 7,168: a draft of one layer on 8 GPUs. Where to begin; nobody here has trained the real one.
    "kimi-k2.5": {
        "epochs": 5, "max_seq_len": 4096, "lr": 1e-4, "ttt_steps": 3, "scheduler": "cosine", "save_steps": 500,
        "val_steps": 2000, "patience": 5, "workers": 4,
    },
}  # fmt: skip
