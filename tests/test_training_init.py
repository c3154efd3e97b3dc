"""A training that begins with another draft: what fits is taken, what does not is named or refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pipeline_fixtures import write_states

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("safetensors")
pytest.importorskip("speculators")

from safetensors.torch import load_file, save_file  # noqa: E402

from pipeline.config import TrainConfig, VocabConfig  # noqa: E402
from pipeline.train import Trained, train  # noqa: E402
from pipeline.training_init import read_initial  # noqa: E402
from pipeline.training_inputs import check_inputs  # noqa: E402
from pipeline.vocab import build_vocab, load_mapping  # noqa: E402
from shims.errors import UsageError  # noqa: E402

LAYER_IDS = "eagle_aux_hidden_state_layer_ids"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """States, a draft of another training in speculators' layout, and the same one in the older layout."""
    root: Path = tmp_path_factory.mktemp("drafts")
    write_states(root, rows=12)
    first = train(settings(root, "first", lr=3e-3, epochs=6, draft_dtype="float32"))
    (root / "speculators").mkdir()
    weights = load_file(first.draft / "model.safetensors")
    save_file(weights, root / "speculators" / "model.safetensors")
    (root / "speculators" / "config.json").write_text((first.draft / "config.json").read_text())
    older = {name.replace("layers.0.", "midlayer."): value for name, value in weights.items()}
    older.pop("embed_tokens.weight")
    stated = json.loads((first.draft / "config.json").read_text())
    flat = stated["transformer_layer_config"] | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": stated["draft_vocab_size"],
        "eagle_config": {LAYER_IDS: stated[LAYER_IDS]},
    }
    write_draft(root / "older", flat, older)
    return root


def settings(place: Path, name: str, **changed: Any) -> TrainConfig:
    base = {"max_seq_len": 256, "ttt_steps": 1, "device": "cpu", "noise_std": 0.0, "tensorboard": False}
    return TrainConfig(place / "states", place / "prepared", str(place / "model"), place / name, **base | changed)


def write_draft(folder: Path, config: dict[str, Any], weights: dict[str, Any], shards: int = 2) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    names = sorted(weights)
    where = {}
    for number in range(shards):
        file = f"model-{number + 1:05}-of-{shards:05}.safetensors"
        part = names[number::shards]
        save_file({name: weights[name].contiguous() for name in part}, folder / file)
        where |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return folder


def at_start(place: Path, name: str, **changed: Any) -> Trained:
    """Held-out metrics of the draft as it begins; one step of nearly no size."""
    return train(settings(place, name, max_steps=1, lr=1e-12, warmup_steps=0, draft_dtype="float32", **changed))


@pytest.mark.parametrize("layout", ["speculators", "older"])
def test_it_begins_where_the_other_training_ended(place: Path, layout: str) -> None:
    ended = json.loads((place / "first" / "manifest.json").read_text())["metrics"]["best"]
    begun = at_start(place, f"from {layout}", init_from=place / layout)
    assert begun.start["loss"] == pytest.approx(ended["loss"], rel=1e-5)
    fresh = at_start(place, f"fresh {layout}")
    assert fresh.start["loss"] > 1.5 * begun.start["loss"]


def test_the_head_follows_the_target_tokens(place: Path) -> None:
    build_vocab(VocabConfig(place / "prepared", 48, place / "smaller"))
    config = settings(place, "smaller vocabulary", init_from=place / "older")
    smaller = TrainConfig(**{**vars(config), "vocab": place / "smaller"})
    data = check_inputs(smaller)
    initial = read_initial(smaller, data)
    assert initial is not None
    kept = "48 of 48 draft tokens are among its 64; the other 0"
    assert any(kept in line for line in initial.differences), initial.differences
    result = train(TrainConfig(**{**vars(smaller), "max_steps": 1, "lr": 1e-12, "draft_dtype": "float32"}))
    mine, theirs = load_file(result.draft / "model.safetensors"), load_file(place / "speculators" / "model.safetensors")
    of_target = {
        int(i + d): row for i, (d, row) in enumerate(zip(theirs["d2t"], theirs["lm_head.weight"], strict=True))
    }
    d2t, _ = load_mapping(place / "smaller")
    for i, offset in enumerate(d2t.tolist()):
        assert torch.allclose(mine["lm_head.weight"][i], of_target[i + offset], atol=1e-6), i


def test_a_draft_of_other_layers_is_refused_unless_that_is_accepted(place: Path) -> None:
    stated = json.loads((place / "older" / "config.json").read_text())
    weights = {k: v for f in (place / "older").glob("*.safetensors") for k, v in load_file(f).items()}
    late = stated | {"eagle_config": {LAYER_IDS: [i + 1 for i in (2, 4, 5)]}}
    write_draft(place / "late", late, weights)
    with pytest.raises(UsageError, match="3 5 6"):
        train(settings(place, "late training", init_from=place / "late"))
    accepted = settings(place, "late accepted", init_from=place / "late", accept_differences=True)
    initial = read_initial(accepted, check_inputs(accepted))
    assert initial is not None and any("native 3 5 6" in line for line in initial.differences)


Change = Any


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda c, w: w.pop("fc.weight"), "no fc.weight"),
        (lambda c, w: w.update({"fc.weight": torch.zeros(64, 128)}), r"fc\.weight \[64, 192\]"),
        (lambda c, w: w.update({"d2t": torch.zeros(64, dtype=torch.long)}), "t2d says"),
        (lambda c, w: w.update({"t2d": w["t2d"][:-1]}), "299"),
        (lambda c, w: w.update({"d2t": torch.tensor(3)}), r"d2t \[\]"),
        (lambda c, w: c.update({LAYER_IDS: "2,4,5"}), "'2,4,5'"),
        (lambda c, w: c.update({"eagle_config": {LAYER_IDS: 2}}), "a list of whole numbers"),
        (lambda c, w: (w.pop("d2t"), w.pop("t2d")), "a d2t"),
        (lambda c, w: c.update({LAYER_IDS: [1, 2, 3]}), "1 2 3 and 2 4 5"),
        (lambda c, w: c.update({"intermediate_size": 9}), "gate_proj"),
    ],
)
def test_what_does_not_fit_is_refused(place: Path, tmp_path: Path, change: Change, told: str) -> None:
    stated = json.loads((place / "older" / "config.json").read_text())
    weights = {k: v for f in (place / "older").glob("*.safetensors") for k, v in load_file(f).items()}
    change(stated, weights)
    write_draft(tmp_path / "draft", stated, weights)
    config = settings(place, "refused", init_from=tmp_path / "draft")
    with pytest.raises(UsageError, match=told):
        read_initial(config, check_inputs(config))


def test_an_index_that_leads_out_of_its_folder_is_refused(place: Path, tmp_path: Path) -> None:
    stated = json.loads((place / "older" / "config.json").read_text())
    write_draft(tmp_path / "draft", stated, {"fc.weight": torch.zeros(64, 192)})
    index = {"weight_map": {"fc.weight": "../speculators/model.safetensors"}}
    (tmp_path / "draft" / "model.safetensors.index.json").write_text(json.dumps(index))
    config = settings(place, "escaped", init_from=tmp_path / "draft")
    with pytest.raises(UsageError, match="in its folder"):
        read_initial(config, check_inputs(config))
