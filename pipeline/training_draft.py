"""The draft: built by speculators' own class, set up as a server must find it, written out."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from pipeline import training_compat as compat
from pipeline.atomic import sync_content, sync_folder, write_text
from pipeline.config import TrainConfig
from pipeline.model_info import ModelInfo
from pipeline.training_attention import FLEX_ATTENTION
from pipeline.training_init import InitialDraft
from pipeline.training_inputs import TrainingData
from shims.errors import SpecshimError

LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
_FLAGS = ("norm_before_fc", "fc_norm", "norm_output")


def build_draft(
    config: TrainConfig, data: TrainingData, parts: compat.TrainerParts, attention: str, initial: InitialDraft | None
) -> Any:
    """speculators' draft for this model, vocabulary and these layers, in float32.

    Args:
        attention: by name, as :func:`pipeline.training_attention.choose_attention` gives it.
        initial: what to begin with; None begins with random layers.

    Raises:
        SpecshimError: the installed release cannot build what ``initial`` is.
    """
    import torch

    full_vocabulary = len(data.d2t) == len(data.t2d)
    layer_config = draft_layer_config(data.model, config.num_layers, initial)
    layer_config._attn_implementation = FLEX_ATTENTION
    flags = {name: True for name in _FLAGS if initial is not None and initial.flags.get(name)}
    with (
        compat.verifier_named(layer_config, data.model),
        compat.quiet_loading(),
        compat.remote_code(config.trust_remote_code),
    ):
        draft = parts.draft_class.from_training_args(
            layer_config,
            num_layers=layer_config.num_hidden_layers,
            norm_before_residual=bool(initial is not None and initial.flags.get("norm_before_residual")),
            draft_vocab_size=len(data.d2t),
            t2d=None if full_vocabulary else torch.from_numpy(data.t2d),
            d2t=None if full_vocabulary else torch.from_numpy(data.d2t),
            ttt_steps=config.ttt_steps,
            verifier_name_or_path=str(data.model.path.resolve()),
            target_layer_ids=list(data.layers.native[:-1]),
            draft_attn_impl=FLEX_ATTENTION,
            trust_remote_code=config.trust_remote_code,
            **flags,
        )
    lost = [name for name in flags if not getattr(draft.config, name, False)]
    if lost:
        raise SpecshimError(
            "--init-from", f"a speculators that knows {', '.join(lost)}", parts.version, "install speculators 0.9.0"
        )
    # What the server must feed it; speculators 0.4 leaves this empty.
    setattr(draft.config, LAYER_IDS, list(data.layers.native[:-1]))
    draft.config.transformer_layer_config._attn_implementation = attention
    if initial is not None:
        _load(draft, initial)
    return draft.float()


def compute_in(draft: Any, dtype: Any) -> None:
    """Give a draft's weights another type. Its rotary frequencies stay float32, as in a server.

    Rounded to bfloat16, two tokens 500 apart are turned by up to 0.6 rad more or less than there.
    """
    exact = {name: value for name, value in draft.named_buffers() if name.rpartition(".")[2].endswith("inv_freq")}
    draft.to(dtype)
    for name, value in exact.items():
        owner, _, own = name.rpartition(".")
        draft.get_submodule(owner)._buffers[own] = value


def _load(draft: Any, initial: InitialDraft) -> None:
    missing, unexpected = draft.load_state_dict(initial.tensors(draft), strict=False)
    ignored = ("verifier_", "embed_tokens", "lm_head", "d2t", "t2d", "rotary_emb")
    absent = [name for name in missing if not name.startswith(ignored)]
    if absent or unexpected:
        raise SpecshimError(
            f"--init-from {initial.folder}",
            "the tensors of an EAGLE-3 draft",
            f"missing: {', '.join(absent) or 'none'}; unknown: {', '.join(unexpected) or 'none'}",
            "give an EAGLE-3 draft, or leave --init-from out",
        )


def draft_layer_config(model: ModelInfo, num_layers: int, initial: InitialDraft | None = None) -> Any:
    """A Llama configuration of the verifier's width for the draft's decoder layers.

    Whatever the verifier's architecture: vLLM serves EAGLE-3 drafts as Llama layers. An initial draft's own
    sizes take the place of the verifier's.
    """
    from transformers import LlamaConfig

    text = model.config.get("text_config")
    source: dict[str, Any] = text if isinstance(text, dict) else model.config
    heads = int(source["num_attention_heads"])
    # A latent-attention verifier states head sizes that mean something else.
    latent = "kv_lora_rank" in source
    options = {
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "intermediate_size": source.get("intermediate_size", 4 * model.hidden_size),
        "num_hidden_layers": num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads if latent else source.get("num_key_value_heads", heads),
        "head_dim": model.hidden_size // heads if latent else source.get("head_dim") or model.hidden_size // heads,
        "hidden_act": "silu",
        "max_position_embeddings": model.max_positions or 2048,
        "rms_norm_eps": source.get("rms_norm_eps", 1e-6),
        "rope_theta": rope_theta(source) or 10000.0,
        "initializer_range": source.get("initializer_range", 0.02),
        "attention_bias": False,
        "tie_word_embeddings": False,
        "pad_token_id": None,
    }
    if initial is not None:
        options |= initial.layer_options()
    return LlamaConfig(**options)


def rope_theta(config: dict[str, Any]) -> float | None:
    """The rotary base of a configuration, in either of the places where it is written."""
    rope = config.get("rope_parameters") or {}
    found = config.get("rope_theta") or rope.get("rope_theta")
    return float(found) if found else None


def write_draft(draft: Any, state: dict[str, Any], folder: Path, dtype: str, data: TrainingData) -> None:
    """Replace ``folder`` by a draft that a server and speculators load.

    Args:
        draft: speculators' model, for its configuration.
        state: its tensors, whole and on the CPU.
        dtype: of the floating-point tensors written.

    Raises:
        SpecshimError: what was written is not what a server needs.
    """
    import torch

    kind = getattr(torch, dtype)
    new, old = folder.with_name(f".{folder.name}.new"), folder.with_name(f".{folder.name}.old")
    for path in (new, old):
        shutil.rmtree(path, ignore_errors=True)
    converted = {name: value.to(kind) if value.is_floating_point() else value for name, value in state.items()}
    draft.save_pretrained(new, state_dict=converted)
    config = json.loads((new / "config.json").read_text(encoding="utf-8"))
    config[LAYER_IDS] = list(data.layers.native[:-1])
    # The configuration names the type of the weights in memory; both of its names are in use.
    for name in ("dtype", "torch_dtype"):
        if name in config:
            config[name] = dtype
    write_text(new / "config.json", json.dumps(config, indent=2) + "\n")
    refuse_incomplete(new, data)
    sync_content(new)
    if folder.exists():
        folder.rename(old)
    new.rename(folder)
    sync_folder(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def refuse_incomplete(folder: Path, data: TrainingData) -> None:
    """Check a written draft for what a server passes over in silence.

    Raises:
        SpecshimError: no layer ids, no verifier, or a vocabulary mapping that is absent where it is needed or
            there where it is not.
    """
    from safetensors import safe_open

    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    names: set[str] = set()
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            names |= set(opened.keys())
    needs_mapping = len(data.d2t) != len(data.t2d)
    verifier = (config.get("speculators_config") or {}).get("verifier") or {}
    faults = []
    if config.get(LAYER_IDS) != list(data.layers.native[:-1]):
        faults.append(f"{LAYER_IDS} = {config.get(LAYER_IDS)}")
    if not verifier.get("name_or_path"):
        faults.append("no verifier in speculators_config")
    if config.get("draft_vocab_size") != len(data.d2t):
        faults.append(f"draft_vocab_size = {config.get('draft_vocab_size')}")
    if ({"d2t", "t2d"} <= names) != needs_mapping or bool({"d2t", "t2d"} & names) != needs_mapping:
        faults.append(f"vocabulary mapping {sorted({'d2t', 't2d'} & names) or 'absent'}")
    if not {"fc.weight", "lm_head.weight"} <= names:
        faults.append("no fc.weight or lm_head.weight")
    if faults:
        raise SpecshimError(str(folder), "a draft that a server reads right", "; ".join(faults), "report this")
