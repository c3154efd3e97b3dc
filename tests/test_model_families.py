"""Models of other families than Llama's: what a config calls its numbers, and where transformers keeps the parts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.layers import LayerIds
from pipeline.model_info import read_model
from shims.errors import UsageError

LAYERS, HIDDEN, VOCABULARY, POSITIONS = 4, 64, 96, 48
_GPT2 = {"n_layer": LAYERS, "n_embd": HIDDEN, "n_positions": POSITIONS, "n_head": 4}
_COMMON = {
    "num_hidden_layers": LAYERS, "hidden_size": HIDDEN, "max_position_embeddings": POSITIONS,
    "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96,
}  # fmt: skip
# Family: (its classes in transformers, its config).
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2", _GPT2),
    "mpt": ("Mpt", {"n_layers": LAYERS, "d_model": HIDDEN, "max_seq_len": POSITIONS, "n_heads": 4}),
    "gpt_neox": ("GPTNeoX", _COMMON),
    "opt": ("OPT", _COMMON | {"ffn_dim": 96, "word_embed_proj_dim": HIDDEN}),
    "cohere": ("Cohere", _COMMON),
    "bloom": ("Bloom", {"n_layer": LAYERS, "hidden_size": HIDDEN, "n_head": 4}),
    "lfm2": ("Lfm2", _COMMON | {"full_attn_idxs": [1, 3]}),
}


def write_config(folder: Path, **config: Any) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"vocab_size": VOCABULARY, **config}))
    return folder


@pytest.mark.parametrize(
    "config",
    [
        _COMMON,
        _GPT2,
        {"n_layer": LAYERS, "hidden_size": HIDDEN, "max_position_embeddings": POSITIONS},
        {"n_layers": LAYERS, "d_model": HIDDEN, "max_seq_len": POSITIONS},
        {"text_config": {**_GPT2, "vocab_size": VOCABULARY}, "hidden_size": 7},
    ],
)
def test_a_config_by_any_of_its_names(tmp_path: Path, config: dict[str, Any]) -> None:
    model = read_model(str(write_config(tmp_path / "model", **config)))
    assert (model.num_layers, model.hidden_size, model.max_positions) == (LAYERS, HIDDEN, POSITIONS)


@pytest.mark.parametrize(
    ("config", "found"),
    [
        ({"is_encoder_decoder": True, "num_hidden_layers": LAYERS, "d_model": HIDDEN}, "an encoder and a decoder"),
        (_COMMON | {"model_type": "bert", "architectures": ["BertModel"]}, "an encoder, whose tokens"),
        (_COMMON | {"architectures": ["BertForMaskedLM"]}, "BertForMaskedLM"),
        (_COMMON | {"architectures": ["Qwen2ForSequenceClassification"]}, "Qwen2ForSequenceClassification"),
    ],
)
def test_what_generates_no_text_is_refused(tmp_path: Path, config: dict[str, Any], found: str) -> None:
    with pytest.raises(UsageError, match=rf"wanted: a decoder-only(.|\n)*found: .*{found}"):
        read_model(str(write_config(tmp_path / "model", **config)))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_reference_of_another_family(tmp_path: Path, family: str) -> None:
    """The last state is the un-normed one of which norm and head make the model's own next tokens."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from pipeline.reference import Reference

    name, config = FAMILIES[family]
    torch.manual_seed(0)
    made = getattr(transformers, f"{name}Config")(vocab_size=VOCABULARY, **config, bos_token_id=0, eos_token_id=1)
    whole = transformers.AutoModelForCausalLM.from_config(made)
    for weight in whole.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    whole.save_pretrained(tmp_path / "model")
    reference = Reference(
        read_model(str(tmp_path / "model")), LayerIds((0, 2, LAYERS), "native"),
        weights_dtype="float32", device="cpu", trust_remote_code=False,
    )  # fmt: skip
    ids = [5, 6, 7, 8, 9, 10]
    states, next_tokens = reference.states(ids)
    entries = reference.model(torch.tensor([ids]), output_hidden_states=True).hidden_states
    assert torch.equal(states[:, 0], entries[0][0]) and torch.equal(states[:, 1], entries[2][0])
    assert not torch.allclose(states[:, 2], reference.normed(states[:, 2]), atol=1e-2)
    assert torch.equal(reference.next_tokens(states[:, 2]), next_tokens)


def test_the_text_models_layers_not_the_vision_encoders(tmp_path: Path) -> None:
    """Both have as many, and the encoder's come first."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from pipeline.reference import Reference

    torch.manual_seed(0)
    vision = {"model_type": "clip_vision_model", "hidden_size": 32, "num_attention_heads": 2, "patch_size": 14}
    vision |= {"num_hidden_layers": LAYERS, "intermediate_size": 32, "image_size": 28}
    text = {"model_type": "llama", "vocab_size": VOCABULARY, **_COMMON}
    whole = transformers.LlavaForConditionalGeneration(
        transformers.LlavaConfig(text_config=text, vision_config=vision, image_token_index=90)
    )
    whole.save_pretrained(tmp_path / "model")
    reference = Reference(
        read_model(str(tmp_path / "model")), LayerIds((0, LAYERS), "native"),
        weights_dtype="float32", device="cpu", trust_remote_code=False,
    )  # fmt: skip
    states, next_tokens = reference.states([5, 6, 7])
    assert states.shape == (3, 2, HIDDEN)
    assert torch.equal(reference.next_tokens(states[:, 1]), next_tokens)
