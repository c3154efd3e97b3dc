"""`verify` tells right states from wrong ones; `train` learns from right ones and names their layers."""

from __future__ import annotations

import gc
import json
import weakref
from pathlib import Path
from typing import Any

import pytest
from pipeline_fixtures import ReferenceEngine, write_conversations, write_model, write_weights

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("safetensors")

from pipeline import extract as extract_module  # noqa: E402
from pipeline import verify as verify_module  # noqa: E402
from pipeline.config import ExtractConfig, PrepareConfig, TrainConfig, VerifyConfig, VocabConfig  # noqa: E402
from pipeline.formats.hs_safetensors import read_row, row_path, write_row  # noqa: E402
from pipeline.layers import LayerIds  # noqa: E402
from pipeline.model_info import read_model  # noqa: E402
from pipeline.prepare import prepare  # noqa: E402
from pipeline.reference import Reference  # noqa: E402
from pipeline.train import train  # noqa: E402
from pipeline.training_inputs import check_inputs  # noqa: E402
from pipeline.vocab import build_vocab  # noqa: E402
from shims.errors import SpecshimError, UsageError  # noqa: E402


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tiny real model with right states extracted, in float32."""
    model = write_model(tmp_path / "model", hidden=64)
    write_weights(model)
    write_conversations(tmp_path / "conversations.jsonl", count=12)
    prepare(PrepareConfig(str(model), tmp_path / "conversations.jsonl", tmp_path / "prepared"))
    build_vocab(VocabConfig(tmp_path / "prepared", 64))
    monkeypatch.setattr(extract_module, "open_engine", lambda name, options: ReferenceEngine(options))
    extract_module.extract(
        ExtractConfig(
            str(model),
            tmp_path / "prepared" / "tokenized_data.jsonl",
            tmp_path / "states",
            dtype="float32",
            engine="stock",
        )
    )
    return tmp_path


def verify(place: Path) -> verify_module.Verified:
    return verify_module.verify(VerifyConfig(place / "states", str(place / "model"), sample=12))


def spoil_row(place: Path, index: int, change: Any, change_mask: Any = None) -> None:
    path = row_path(place / "states", index)
    row, header = read_row(path), json.loads((place / "states" / "manifest.json").read_text())
    metadata = {
        "row": str(index),
        "layer_ids": " ".join(map(str, header["layers"]["ids"])),
        "layer_convention": header["layers"]["convention"],
        "model_fingerprint": header["model"]["fingerprint"],
    }
    mask = row.loss_mask if change_mask is None else change_mask(row.loss_mask)
    write_row(path, type(row)(change(row.states), row.token_ids, mask, row.row_id), metadata)


def test_right_states_pass_and_name_the_models_own_next_token(place: Path) -> None:
    found = verify(place)
    assert not found.faults and found.worst is not None and found.worst < 1e-5
    assert [row.same_next for row in found.compared] == [1.0] * 12


@pytest.mark.parametrize(
    "change",
    [
        lambda states: states.roll(1, dims=0),
        lambda states: states.roll(1, dims=1),
        lambda states: states * 1.001,
        lambda states: torch.cat([states[:, :-1], states[:, -2:-1]], dim=1),
    ],
    ids=["tokens shifted", "layers shifted", "scaled", "last layer is another one"],
)
def test_wrong_states_are_found(place: Path, change: Any) -> None:
    spoil_row(place, 3, change)
    faults = verify(place).faults
    assert faults[0].startswith("row 3: relative error")
    assert all(fault.startswith("the last states name") for fault in faults[1:])


def test_files_that_changed_places_and_other_masks_are_found(place: Path) -> None:
    left, right = row_path(place / "states", 2), row_path(place / "states", 5)
    content = left.read_bytes()
    left.write_bytes(right.read_bytes())
    right.write_bytes(content)
    spoil_row(place, 7, lambda states: states, lambda mask: 1 - mask)
    faults = verify(place).faults
    assert len(faults) == 2 and all("metadata row is" in fault for fault in faults)
    data = place / "prepared" / "tokenized_data.jsonl"
    found = verify_module.verify(VerifyConfig(place / "states", structure_only=True, prepared=data)).faults
    assert any("hs_7" in fault and "loss mask" in fault for fault in found)


@pytest.mark.parametrize("threshold", [float("nan"), 0.0, -1.0, float("inf")])
def test_a_limit_that_decides_nothing_is_refused(place: Path, threshold: float) -> None:
    with pytest.raises(UsageError, match="--threshold"):
        verify_module.verify(VerifyConfig(place / "states", str(place / "model"), threshold=threshold))


def test_an_error_that_is_not_a_number_is_a_fault(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    states = Reference.states

    def broken(self: Reference, token_ids: Any) -> Any:
        wanted, own_next = states(self, token_ids)
        wanted[:, 0] = float("nan")
        return wanted, own_next

    monkeypatch.setattr(Reference, "states", broken)
    result = verify(place)
    assert len(result.faults) == 12 and result.worst != result.worst


def test_a_model_transformers_cannot_load_is_said_in_words(place: Path) -> None:
    config = json.loads((place / "model" / "config.json").read_text()) | {"model_type": "nosuch"}
    (place / "model" / "config.json").write_text(json.dumps(config))
    with pytest.raises(SpecshimError, match="nosuch"):
        Reference(
            read_model(str(place / "model")), LayerIds((1,), "after"),
            weights_dtype="float32", device="cpu", trust_remote_code=False,
        )  # fmt: skip


def test_a_reference_is_gone_when_nobody_holds_it(place: Path) -> None:
    """In a cycle it would keep a GPU's memory until some later collection, and the next engine would find it taken."""
    reference = Reference(
        read_model(str(place / "model")), LayerIds((-1, 1), "after"),
        weights_dtype="float32", device="cpu", trust_remote_code=False,
    )  # fmt: skip
    reference.states([1, 2, 3])
    gc.collect()
    gc.disable()
    try:
        weight = weakref.ref(reference.model.get_input_embeddings().weight)
        del reference
        assert weight() is None
    finally:
        gc.enable()


def test_a_device_that_is_not_here_is_named(place: Path) -> None:
    for device in ("gpu7", "meta", "cuda:99"):
        with pytest.raises(UsageError, match="--device"):
            verify_module.verify(VerifyConfig(place / "states", str(place / "model"), device=device))


@pytest.mark.parametrize(("device", "current"), [("cuda:1", ["cuda:1"]), ("cuda", []), ("cpu", [])])
def test_a_gpu_that_is_named_is_the_current_one(
    place: Path, monkeypatch: pytest.MonkeyPatch, device: str, current: list[str]
) -> None:
    found, when_computing = list[str](), list[list[str]]()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda named: found.append(str(named)))
    monkeypatch.setattr(verify_module, "_compare", lambda *given: when_computing.append(list(found)))
    verify_module.verify(VerifyConfig(place / "states", str(place / "model"), device=device))
    assert when_computing == [current]


def test_states_of_another_model_are_refused(place: Path) -> None:
    other = write_model(place / "other", hidden=64)
    write_weights(other, seed=1)
    with pytest.raises(UsageError, match=r"model\.fingerprint"):
        verify_module.verify(VerifyConfig(place / "states", str(other)))


def test_the_reference_gives_unnormed_states_by_either_convention(place: Path) -> None:
    model = read_model(str(place / "model"))
    after, native = LayerIds((0, 3, 7), "after"), LayerIds((1, 4, 8), "native")
    options: dict[str, Any] = {"weights_dtype": "float32", "device": "cpu", "trust_remote_code": False}
    ids = [5, 6, 7, 8]
    by_after, next_tokens = Reference(model, after, **options).states(ids)
    by_native, _ = Reference(model, native, **options).states(ids)
    assert torch.equal(by_after, by_native)
    assert not torch.backends.cudnn.allow_tf32  # float32 in convolutions, too, where there is a GPU
    own = Reference(model, LayerIds((0, 1, 8), "native"), **options)
    whole = own.model(torch.tensor([ids]), output_hidden_states=True).hidden_states
    states, _ = own.states(ids)
    assert torch.equal(states[:, 0], whole[0][0]) and torch.equal(states[:, 1], whole[1][0])
    assert not torch.allclose(states[:, 2], whole[8][0], atol=1e-2), "the last entry of transformers is normed"
    assert torch.equal(own.next_tokens(states[:, 2]), next_tokens)


def test_training_lowers_the_loss_and_names_the_layers(place: Path) -> None:
    pytest.importorskip("speculators")
    config = TrainConfig(
        place / "states", place / "prepared", str(place / "model"), place / "training",
        epochs=8, lr=3e-3, max_seq_len=256, device="cpu", ttt_steps=2, num_layers=1,
    )  # fmt: skip
    result = train(config)
    assert result.end["loss"] < 0.9 * result.start["loss"]
    draft = json.loads((result.draft / "config.json").read_text())
    assert draft["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]
    assert draft["speculators_config"]["verifier"]["name_or_path"] == str(place / "model")
    assert draft["speculators_config"]["verifier"]["architectures"] == ["LlamaForCausalLM"]
    lines = [json.loads(line) for line in result.metrics.read_text().splitlines()]
    assert lines[0]["kind"] == lines[-1]["kind"] == "val" and lines[0]["step"] == 0
    assert {"loss", "full_acc_0", "full_acc_1"} <= set(lines[-1])
    again = train(config)
    assert (again.start, again.end) == (result.start, result.end)
    from safetensors import safe_open

    with safe_open(result.draft / "model.safetensors", framework="pt") as file:
        d2t, t2d = file.get_tensor("d2t"), file.get_tensor("t2d")
    assert torch.equal(torch.arange(64) + d2t, t2d.nonzero()[:, 0])


def training(place: Path, **options: Any) -> TrainConfig:
    return TrainConfig(
        place / "states", place / "prepared", str(place / "model"), place / "training",
        **{"epochs": 1, "max_seq_len": 256, "device": "cpu", "ttt_steps": 1, **options},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("lr", float("nan")),
        ("lr", 0.0),
        ("noise_std", -1.0),
        ("ttt_step_loss_decay", -1.0),
        ("device", "gpu7"),
        ("seed", -1),
    ],
)
def test_training_refuses_a_number_it_cannot_use(place: Path, option: str, value: Any) -> None:
    with pytest.raises(UsageError, match="--" + option.replace("_", "-")):
        train(training(place, **{option: value}))
    assert not (place / "training").exists()


def test_training_leaves_out_rows_that_teach_nothing(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for index in range(10):
        spoil_row(place, index, lambda states: states, lambda mask: mask * 0)
    assert set(check_inputs(training(place)).lengths) == {10, 11}
    assert "10 rows have no trainable token" in capsys.readouterr().err
    spoil_row(place, 10, lambda states: states, lambda mask: mask * 0)
    with pytest.raises(UsageError, match="1 of 12"):
        check_inputs(training(place))


def test_a_training_that_failed_does_not_block_its_folder(place: Path) -> None:
    pytest.importorskip("speculators")
    spoil_row(place, 3, lambda states: states * float("nan"))
    with pytest.raises(SpecshimError, match="finite loss"):
        train(training(place))
    spoil_row(place, 3, lambda states: torch.ones_like(states))
    assert train(training(place, lr=1e-3)).steps
    with pytest.raises(UsageError, match="lr"):
        train(training(place))


def test_training_refuses_a_verifier_without_its_head(place: Path) -> None:
    pytest.importorskip("speculators")
    from safetensors.torch import load_file, save_file

    from pipeline.training_compat import refuse_missing_verifier_weights

    path = place / "model" / "model.safetensors"
    weights = load_file(path)
    assert weights.pop("lm_head.weight") is not None
    save_file(weights, path, metadata={"format": "pt"})
    with pytest.raises(UsageError, match=r"none ending in lm_head\.weight"):
        refuse_missing_verifier_weights(read_model(str(place / "model")), trust_remote_code=False)


@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
def test_the_reference_rounds_weights_and_nothing_else(tmp_path: Path, stored: str) -> None:
    model = write_model(tmp_path / "model", hidden=64)
    write_weights(model)
    config = json.loads((model / "config.json").read_text())
    # What the config names is what transformers 5 would load in, whatever the checkpoint holds.
    (model / "config.json").write_text(json.dumps({**config, "dtype": stored, "torch_dtype": stored}))
    layers = LayerIds((1, 3, 4, 7), "after")

    def reference(weights_dtype: str) -> Any:
        return Reference(
            read_model(str(model)), layers, weights_dtype=weights_dtype, device="cpu", trust_remote_code=False
        ).model

    exact, rounded = reference("float32"), reference("bfloat16")
    for name, weight in exact.named_parameters():
        assert weight.dtype == torch.float32
        assert torch.equal(rounded.get_parameter(name), weight.bfloat16().float())
    assert not torch.equal(exact.lm_head.weight, exact.lm_head.weight.bfloat16().float())
    assert all(torch.equal(rounded.get_buffer(name), buffer) for name, buffer in exact.named_buffers())
