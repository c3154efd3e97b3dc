"""What a draft is taught is what the verifier says, in families whose norm or head is not a Llama's."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pipeline_fixtures
import pytest

import shims  # noqa: F401  without it, speculators 0.4 cannot be imported beside a newer transformers

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("safetensors")
pytest.importorskip("speculators")

from safetensors.torch import load_file  # noqa: E402

from pipeline import training_compat as compat  # noqa: E402
from pipeline.config import TrainConfig  # noqa: E402
from pipeline.decoder_parts import decoder_layers  # noqa: E402
from pipeline.model_info import read_model  # noqa: E402
from pipeline.train import train  # noqa: E402
from pipeline.training_attention import choose_attention  # noqa: E402
from pipeline.training_draft import build_draft  # noqa: E402
from pipeline.training_targets import teach_as_verifier  # noqa: E402
from shims.errors import UsageError  # noqa: E402

LAYERS, HIDDEN, VOCABULARY, TOKENS = 8, 32, 96, 20
_COMMON = {
    "vocab_size": VOCABULARY, "hidden_size": HIDDEN, "intermediate_size": 64, "num_hidden_layers": LAYERS,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
    "tie_word_embeddings": False, "pad_token_id": None, "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
# Family: (its name in transformers, what its config says beside the above, words of the adaptations).
FAMILIES: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "llama": ("Llama", {}, ()),
    "gemma": ("Gemma", {}, ("GemmaRMSNorm",)),
    "gemma2": ("Gemma2", {"final_logit_softcapping": 3.0}, ("Gemma2RMSNorm", "capped at 3")),
    "granite": ("Granite", {"logits_scaling": 8.0}, ("times 0.125",)),
    "qwen3_next": (
        "Qwen3Next",
        {
            "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
            "linear_key_head_dim": 8, "linear_value_head_dim": 8,
        },
        ("Qwen3NextRMSNorm",),
    ),
    # Its config has no rms_norm_eps, which speculators 0.4 asks for: see `by_hand`.
    "cohere": ("Cohere", {"logit_scale": 0.0625}, ("CohereLayerNorm", "times 0.0625")),
}  # fmt: skip


def write_model(folder: Path, name: str, **config: Any) -> Any:
    torch.manual_seed(0)
    made = getattr(transformers, f"{name}Config")(**_COMMON, **config)
    model = getattr(transformers, f"{name}ForCausalLM")(made).float().eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3) if parameter.dim() > 1 else torch.nn.init.uniform_(parameter, 0.3, 2)
    model.save_pretrained(folder)
    return model


def draft_of(folder: Path, kept: list[int]) -> Any:
    """speculators' draft of that model, over some of its tokens."""
    compat.let_configs_construct()
    t2d = np.isin(np.arange(VOCABULARY), kept)
    data: Any = SimpleNamespace(
        model=read_model(str(folder)),
        d2t=np.array(kept) - np.arange(len(kept)),
        t2d=t2d,
        layers=SimpleNamespace(native=(2, 4, 5, LAYERS)),
    )
    config = TrainConfig(folder, folder, str(folder), folder, ttt_steps=1, device="cpu")
    return build_draft(config, data, compat.load_trainer_parts(), choose_attention("cpu"), None)


def by_hand(model: Any, kept: list[int]) -> Any:
    """What speculators, from 0.5 on, builds of any verifier's norm and head."""
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    draft = torch.nn.Module()
    draft.verifier_norm = LlamaRMSNorm(HIDDEN, eps=1e-6)
    draft.verifier_norm.load_state_dict({"weight": model.model.norm.weight})
    draft.verifier_lm_head = torch.nn.Linear(HIDDEN, len(kept), bias=False)
    draft.verifier_lm_head.load_state_dict({"weight": model.get_output_embeddings().weight[kept]})
    return draft


def off_by(draft: Any, model: Any, kept: list[int]) -> float:
    """Relative error of the draft's targets."""
    last: list[Any] = []
    layer = decoder_layers(model, LAYERS)[-1]
    hook = layer.register_forward_hook(lambda m, i, out: last.append(out[0] if isinstance(out, tuple) else out))
    with torch.no_grad():
        wanted = model(torch.arange(TOKENS)[None], use_cache=False).logits[0][:, kept]
        got = draft.verifier_lm_head(draft.verifier_norm(last[0].reshape(TOKENS, HIDDEN)))
    hook.remove()
    return float((got - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("family", FAMILIES)
def test_targets_are_the_verifiers_own_logits(family: str, tmp_path: Path) -> None:
    name, config, words = FAMILIES[family]
    model = write_model(tmp_path / "model", name, **config)
    kept = [3, 5, 8, 13, 21, 34, 55, 89]
    draft = by_hand(model, kept) if family == "cohere" else draft_of(tmp_path / "model", kept)
    assert (off_by(draft, model, kept) > 1e-2) == bool(words), "speculators alone"
    told = teach_as_verifier(draft, read_model(str(tmp_path / "model")), False)
    assert off_by(draft, model, kept) < 1e-5
    assert len(told) == len(words) and all(word in line for word, line in zip(words, told, strict=True))
    kept_in_checkpoints = {key for key in draft.state_dict() if key.startswith("verifier_norm")}
    assert kept_in_checkpoints <= {"verifier_norm.weight"}, "what is not the draft's own is not stored with it"


def test_logits_that_are_not_understood_are_refused(tmp_path: Path) -> None:
    write_model(tmp_path / "model", "Llama")
    draft = draft_of(tmp_path / "model", [3, 5])
    model = read_model(str(tmp_path / "model"))
    model.config["logits_scaling"] = 8.0
    with pytest.raises(UsageError, match=r"logits_scaling = 8.0 in a model of type llama"):
        teach_as_verifier(draft, model, False)


def test_a_norm_that_cannot_be_built_is_told(tmp_path: Path) -> None:
    write_model(tmp_path / "model", "Llama")
    draft = draft_of(tmp_path / "model", [3, 5])
    (tmp_path / "model" / "model.safetensors").unlink()
    [told] = teach_as_verifier(draft, read_model(str(tmp_path / "model")), False)
    assert "was not compared" in told and "no tensor norm" in told


def test_a_factor_that_transformers_itself_does_not_have(tmp_path: Path) -> None:
    """MiniCPM divides the last states; its class is remote code, and its numbers are a Llama's but for that."""
    kept = [3, 5, 8]
    llama = write_model(tmp_path / "model", "Llama")
    draft = by_hand(llama, kept)
    model = read_model(str(tmp_path / "model"))
    model.config.update(model_type="minicpm", dim_model_base=8)
    assert teach_as_verifier(draft, model, False) == ["the verifier's logits are times 0.25, as its config says"]
    states = torch.randn(5, HIDDEN)
    wanted = torch.nn.functional.linear(states, draft.verifier_lm_head.weight) / 4
    assert torch.allclose(draft.verifier_lm_head(states), wanted)


def test_a_gemma_is_trained_on_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_weights = pipeline_fixtures.write_weights

    def gemma(folder: Path) -> None:
        stated = json.loads((folder / "config.json").read_text())
        stated |= {"architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "final_logit_softcapping": 30.0}
        stated |= {"head_dim": 32, "num_key_value_heads": 2, "query_pre_attn_scalar": 32, "sliding_window": 64}
        (folder / "config.json").write_text(json.dumps(stated))
        write_weights(folder)

    monkeypatch.setattr(pipeline_fixtures, "write_weights", gemma)
    model = pipeline_fixtures.write_states(tmp_path, rows=8)
    settings: dict[str, Any] = {"max_steps": 2, "max_seq_len": 256, "ttt_steps": 1, "device": "cpu"}
    place = TrainConfig(tmp_path / "states", tmp_path / "prepared", str(model), tmp_path / "training", **settings)
    trained = train(place)
    assert "Gemma2RMSNorm" in " ".join(trained.adaptations) and "capped at 30" in " ".join(trained.adaptations)
    assert not [name for name in load_file(trained.draft / "model.safetensors") if name.startswith("verifier")]
