"""A published draft says what a server needs, whatever layers the data has; one that does not is not published."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
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
from pipeline.train import train  # noqa: E402
from pipeline.training_draft import draft_layer_config  # noqa: E402
from pipeline.training_inputs import check_inputs  # noqa: E402
from pipeline.training_metrics import read_metrics  # noqa: E402
from pipeline.training_run import Run  # noqa: E402
from pipeline.training_series import installed_series  # noqa: E402
from pipeline.vocab import build_vocab  # noqa: E402
from shims.errors import SpecshimError  # noqa: E402

LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
STOCK_DEFAULTS = (2, 4, 5, 7)  # of speculators 0.4's generator, for 8 layers: "after", one later than vLLM's


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root: Path = tmp_path_factory.mktemp("draft")
    write_states(root, rows=8, ids=STOCK_DEFAULTS)
    build_vocab(VocabConfig(root / "prepared", 300, root / "all tokens"))
    return root


def settings(place: Path, name: str, vocab: str = "prepared", **changed: Any) -> TrainConfig:
    base = {"max_steps": 1, "max_seq_len": 256, "ttt_steps": 1, "device": "cpu", "tensorboard": False}
    return TrainConfig(place / "states", place / vocab, str(place / "model"), place / name, **base | changed)


@pytest.fixture(scope="module")
def draft(place: Path) -> Path:
    return train(settings(place, "training")).draft


def test_states_one_layer_late_make_a_draft_that_says_so(draft: Path, place: Path) -> None:
    stated = json.loads((draft / "config.json").read_text())
    assert stated[LAYER_IDS] == [3, 5, 6]
    assert stated["speculators_config"]["verifier"]["name_or_path"] == str((place / "model").resolve())
    assert stated["norm_before_residual"] is False, "vLLM takes an absent one for true"
    assert stated.get("dtype", stated.get("torch_dtype")) == "bfloat16"
    assert load_file(draft / "model.safetensors")["fc.weight"].dtype == torch.bfloat16


def test_a_draft_of_the_whole_vocabulary_has_no_mapping(place: Path) -> None:
    whole = train(settings(place, "whole", "all tokens")).draft
    names = load_file(whole / "model.safetensors").keys()
    assert "lm_head.weight" in names and not {"d2t", "t2d"} & names


def change_config(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    stated = json.loads((folder / "config.json").read_text())
    change(stated)
    (folder / "config.json").write_text(json.dumps(stated))


def change_weights(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (lambda f: change_config(f, lambda c: c.pop(LAYER_IDS)), LAYER_IDS),
        (lambda f: change_config(f, lambda c: c.update({LAYER_IDS: [2, 4, 5]})), LAYER_IDS),
        (lambda f: change_config(f, lambda c: c["speculators_config"].pop("verifier")), "no verifier"),
        (lambda f: change_config(f, lambda c: c.update(draft_vocab_size=65)), "draft_vocab_size"),
        (lambda f: change_weights(f, lambda w: w.pop("d2t")), "mapping"),
        (lambda f: change_weights(f, lambda w: (w.pop("d2t"), w.pop("t2d"))), "mapping"),
        (lambda f: change_weights(f, lambda w: w.pop("lm_head.weight")), "lm_head"),
    ],
)
def test_what_a_server_would_pass_over_is_refused(
    draft: Path, place: Path, tmp_path: Path, spoil: Any, told: str
) -> None:
    from pipeline.training_draft import refuse_incomplete

    data = check_inputs(settings(place, "looked at"))
    shutil.copytree(draft, tmp_path / "draft")
    refuse_incomplete(tmp_path / "draft", data)
    spoil(tmp_path / "draft")
    with pytest.raises(SpecshimError, match=told):
        refuse_incomplete(tmp_path / "draft", data)


def test_a_row_that_is_gone_amid_a_training_is_named(place: Path, tmp_path: Path) -> None:
    from pipeline.formats.registry import open_rows
    from pipeline.training_batches import BatchStream, PackedRows
    from pipeline.training_series import SERIES

    data = check_inputs(settings(place, "looked at"))
    shutil.copytree(place / "states", tmp_path / "states")
    rows = PackedRows(
        open_rows(tmp_path / "states", data.record), [0, 3], [data.lengths[0], data.lengths[3]], SERIES[0],
        max_tokens=256, dtype=torch.float32,
    )  # fmt: skip
    (tmp_path / "states" / "hidden_states" / "hs_3.safetensors").unlink()
    with pytest.raises(SpecshimError, match=r"hs_3\.safetensors"):
        list(BatchStream(rows, [[[0], [1]]]))


def test_noise_is_the_same_for_a_row_and_an_epoch(place: Path) -> None:
    from pipeline.formats.registry import open_rows
    from pipeline.training_batches import PackedRows
    from pipeline.training_series import SERIES

    data = check_inputs(settings(place, "looked at"))
    rows = [0, 3, 5]

    def packed(noise: float) -> PackedRows:
        lengths = [data.lengths[row] for row in rows]
        store = open_rows(place / "states", data.record)
        return PackedRows(store, rows, lengths, SERIES[0], max_tokens=256, dtype=torch.float32, noise=noise, seed=1)

    plain, noisy = packed(0.0), packed(0.05)
    first, again, other = noisy[[[0, 1]]], packed(0.05)[[[1, 2]]], plain[[[0, 1]]]
    cut = data.lengths[0] - 1
    of_row = data.lengths[3] - 1
    assert torch.equal(first["hidden_states"][0, cut : cut + of_row], again["hidden_states"][0, :of_row])
    moved = (first["hidden_states"] - other["hidden_states"])[0, : cut + of_row]
    assert 0.02 < moved.std() < 0.04 and moved.abs().max() <= 0.0501
    assert torch.equal(first["verifier_last_hidden_states"], other["verifier_last_hidden_states"])
    noisy.epoch = 1
    assert not torch.equal(noisy[[[0, 1]]]["hidden_states"], first["hidden_states"])


def test_rotary_frequencies_are_not_rounded_with_the_weights(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server computes them in float32: rounded ones would turn far tokens to other positions than there."""
    found: dict[str, Any] = {}

    def seen(run: Run) -> Any:
        found.update(run._draft.state_dict(), inv_freq=run._draft.rotary_emb.inv_freq)
        return trainer(run)

    trainer = Run._make_trainer
    monkeypatch.setattr(Run, "_make_trainer", seen)
    train(settings(place, "in bfloat16", dtype="bfloat16", max_steps=1))
    half = found["inv_freq"].numel()
    theta = draft_layer_config(check_inputs(settings(place, "not run")).model, 1).to_dict()
    base = theta.get("rope_theta") or theta["rope_parameters"]["rope_theta"]
    assert torch.allclose(found["inv_freq"], base ** -(torch.arange(half) / half), rtol=1e-6)
    wanted = torch.float32 if installed_series()[0].autocasts else torch.bfloat16
    assert found["fc.weight"].dtype == wanted


@pytest.mark.parametrize("warmup", [0, None])
def test_no_warmup_is_none_in_every_release(place: Path, warmup: int | None) -> None:
    """speculators 0.4 to 0.6 take 0 for nothing said, and 1% of all epochs for it: more than there are steps."""
    done = train(settings(place, f"warmup {warmup}", epochs=200, max_steps=4, lr=1e-3, warmup_steps=warmup))
    rates = [line["lr"] for line in read_metrics(done.metrics) if line["kind"] == "train"]
    assert rates == pytest.approx([1e-3, 7.5e-4, 5e-4, 2.5e-4])
