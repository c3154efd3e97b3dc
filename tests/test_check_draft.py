"""`check-draft`: what each release uses of a draft, and what it refuses."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from draft_fixtures import (
    DEFAULTS,
    DRAFT_VOCAB,
    HIDDEN,
    LAYERS,
    TRAINED,
    VOCAB,
    write_draft,
    write_training,
    write_verifier,
)

pytest.importorskip("numpy")
pytest.importorskip("safetensors")
pytest.importorskip("tokenizers")

from pipeline.__main__ import main
from pipeline.serving.check import CheckConfig, Checked, check_draft
from pipeline.serving.facts import FACTS, VERIFIERS, facts_of, holds, verifiers_of
from shims.errors import UsageError
from shims.releases import known
from shims.versions import within

SHIFTED = tuple(i - 1 for i in TRAINED)
_FLAT = {
    "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": HIDDEN, "vocab_size": VOCAB,
    "draft_vocab_size": DRAFT_VOCAB,
}  # fmt: skip


@pytest.fixture
def training(tmp_path: Path) -> Path:
    verifier = write_verifier(tmp_path / "model")
    write_training(tmp_path / "training", verifier)
    write_draft(tmp_path / "training" / "draft", verifier)
    return tmp_path / "training"


def check(training: Path, release: str, **more: Any) -> Checked:
    return check_draft(CheckConfig(training, release, ask_installed=False, **more))


def flat(training: Path, **config: Any) -> Path:
    """Make the draft one of the older format."""
    (training / "draft" / "config.json").write_text(json.dumps(_FLAT | config))
    return training


def ids(result: Checked) -> dict[str, tuple[int, ...]]:
    return {runner: tuple(layers.ids) for runner, layers in result.served.layers.items()}


@pytest.mark.parametrize("release", known())
def test_a_draft_as_train_writes_it_fits_every_release_that_reads_ids(training: Path, release: str) -> None:
    result = check(training, release)
    if release == "0.11.0":
        assert ids(result) == {"V1": DEFAULTS}
        assert result.exit_code == 1
        assert "leaves to the verifier's defaults" in result.mismatches[0].found
        assert "0.11.1" in result.mismatches[0].next_step
        return
    assert set(ids(result).values()) == {TRAINED}
    assert (result.exit_code, result.verdict, result.findings) == (0, "fits", [])
    assert ("V2" in ids(result)) == within(release, ">=0.17")


@pytest.mark.parametrize("release", known())
def test_a_draft_that_names_no_ids_gets_the_defaults_everywhere(training: Path, tmp_path: Path, release: str) -> None:
    write_draft(training / "draft", tmp_path / "model", None)
    result = check(training, release)
    assert set(ids(result).values()) == {DEFAULTS}
    assert result.exit_code == 1
    write_training(training, tmp_path / "model", DEFAULTS)
    assert check(training, release).exit_code == 0


def test_a_training_that_is_not_finished_is_told(training: Path) -> None:
    record = json.loads((training / "manifest.json").read_text())
    (training / "manifest.json").write_text(json.dumps(record | {"complete": False}))
    result = check(training, "0.32.0")
    assert [f.found for f in result.findings] == ["complete = false"] and result.exit_code == 0


@pytest.mark.parametrize(
    ("release", "served"),
    [
        ("0.11.0", {"V1": DEFAULTS}),
        ("0.16.0", {"V1": DEFAULTS}),
        ("0.21.0", {"V1": DEFAULTS, "V2": DEFAULTS}),
        ("0.22.0", {"V1": TRAINED, "V2": DEFAULTS}),
        ("0.26.0", {"V1": TRAINED, "V2": DEFAULTS}),
        ("0.33.0", {"V1": TRAINED, "V2": DEFAULTS}),
    ],
)
def test_ids_nested_in_a_flat_config(training: Path, release: str, served: dict[str, tuple[int, ...]]) -> None:
    flat(training, eagle_config={"eagle_aux_hidden_state_layer_ids": list(TRAINED)})
    result = check(training, release)
    assert ids(result) == served
    # Right under one runner alone is not right.
    assert result.exit_code == 1
    assert len(result.mismatches) == sum(layers != TRAINED for layers in served.values())


def test_the_name_that_runner_v2_reads_in_a_flat_config(training: Path) -> None:
    flat(training, eagle_config={"layer_ids": list(TRAINED)})
    assert ids(check(training, "0.26.0"))["V2"] == DEFAULTS
    assert ids(check(training, "0.27.0")) == {"V1": DEFAULTS, "V2": TRAINED}


def test_nested_ids_of_a_speculators_config_reach_no_runner(training: Path, tmp_path: Path) -> None:
    nested = {"eagle_aux_hidden_state_layer_ids": list(TRAINED), "layer_ids": list(TRAINED)}
    write_draft(training / "draft", tmp_path / "model", None, eagle_config=nested)
    assert set(ids(check(training, "0.33.0")).values()) == {DEFAULTS}


@pytest.mark.parametrize(("by", "hint"), [(-1, "`after` ids where native ones belong"), (1, "one added too many")])
def test_shifted_ids_are_refused_and_called_that(training: Path, tmp_path: Path, by: int, hint: str) -> None:
    write_draft(training / "draft", tmp_path / "model", tuple(i + by for i in TRAINED))
    result = check(training, "0.32.0")
    assert result.exit_code == 1
    assert f"all shifted by {by:+d}: {hint}" in result.mismatches[0].found
    assert f"{list(TRAINED)}" in result.mismatches[0].next_step


def test_the_order_of_the_ids_does_not_matter(training: Path, tmp_path: Path) -> None:
    write_draft(training / "draft", tmp_path / "model", (TRAINED[2], TRAINED[0], TRAINED[1]))
    assert check(training, "0.32.0").exit_code == 0


@pytest.mark.parametrize("missing", [("d2t",), ("t2d",), ("d2t", "t2d")])
def test_a_missing_mapping_is_refused(training: Path, tmp_path: Path, missing: tuple[str, ...]) -> None:
    write_draft(training / "draft", tmp_path / "model", leave_out=missing)
    (finding,) = check(training, "0.32.0").mismatches
    assert all(f"no {name}" in finding.found for name in missing)
    assert ("without a word" in finding.found) == ("d2t" in missing)


def test_a_draft_of_the_whole_vocabulary_needs_no_mapping(training: Path, tmp_path: Path) -> None:
    from safetensors.numpy import load_file, save_file

    write_draft(training / "draft", tmp_path / "model", leave_out=("d2t", "t2d"), draft_vocab_size=VOCAB)
    write_training(training, tmp_path / "model", draft_vocab_size=VOCAB)
    file = training / "draft" / "model.safetensors"
    tensors = load_file(file)
    tensors["lm_head.weight"] = tensors["lm_head.weight"].repeat(8, axis=0)[:VOCAB]
    save_file(tensors, file)
    assert check(training, "0.32.0").exit_code == 0


def test_a_mapping_that_contradicts_itself_is_refused(training: Path) -> None:
    from safetensors.numpy import load_file, save_file

    file = training / "draft" / "model.safetensors"
    tensors = load_file(file)
    tensors["d2t"][3] += 1
    save_file(tensors, file)
    (finding,) = check(training, "0.32.0").mismatches
    assert "draft token 3 maps to" in finding.found


def test_another_verifier_is_refused(training: Path, tmp_path: Path) -> None:
    other = write_verifier(tmp_path / "other", rope_theta=1.0)
    (finding,) = check(training, "0.32.0", model=str(other)).mismatches
    assert "other files" in finding.found
    wide = write_verifier(tmp_path / "wide", hidden_size=2 * HIDDEN, vocab_size=VOCAB + 1)
    found = {finding.found for finding in check(training, "0.32.0", model=str(wide)).mismatches}
    assert str(HIDDEN) in found and str(VOCAB) in found


def test_the_verifier_itself_moved_is_the_same_one(training: Path, tmp_path: Path) -> None:
    moved = shutil.copytree(tmp_path / "model", tmp_path / "moved")
    assert check(training, "0.32.0", model=str(moved)).exit_code == 0


def test_without_a_manifest_the_config_is_believed_and_without_ids_nothing_is(training: Path, tmp_path: Path) -> None:
    (training / "manifest.json").unlink()
    result = check(training, "0.32.0")
    assert (result.exit_code, [finding.kind for finding in result.findings]) == (0, ["note"])
    write_draft(training / "draft", tmp_path / "model", None)
    assert check(training, "0.32.0").exit_code == 2
    assert check(training, "0.32.0", trained_layer_ids=DEFAULTS).exit_code == 0
    assert check(training, "0.32.0", trained_layer_ids=TRAINED).exit_code == 1


@pytest.mark.parametrize(("release", "fits"), [("0.17.1", False), ("0.18.0", True), ("0.24.0", True), ("0.25.0", True)])
def test_kimi_and_deepseek(tmp_path: Path, release: str, fits: bool) -> None:
    inner = json.loads((write_verifier(tmp_path / "plain") / "config.json").read_text())
    text = inner | {"model_type": "kimi_k2", "kv_lora_rank": 8}
    verifier = write_verifier(tmp_path / "model", model_type="kimi_k25", text_config=text)
    training = write_training(tmp_path / "training", verifier)
    write_draft(training / "draft", verifier)
    assert (check(training, release).exit_code == 0) == fits
    last = (TRAINED[0], TRAINED[1], LAYERS)
    write_training(training, verifier, last)
    write_draft(training / "draft", verifier, last)
    assert (check(training, release).exit_code == 0) == (release == "0.25.0")


@pytest.mark.parametrize(
    ("flag", "from_"), [("norm_before_fc", "0.19.0"), ("fc_norm", "0.25.0"), ("norm_output", "0.25.0")]
)
def test_what_a_release_would_leave_out_of_a_draft_is_refused(
    training: Path, tmp_path: Path, flag: str, from_: str
) -> None:
    write_draft(training / "draft", tmp_path / "model", **{flag: True})
    for release in known():
        refused = [finding for finding in check(training, release).mismatches if flag in finding.found]
        assert bool(refused) == within(release, f"<{from_}"), release


def test_exit_codes_and_json(training: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def run(*more: str) -> tuple[int, str]:
        with pytest.raises(SystemExit) as ended:
            main(["check-draft", str(training), "--from-facts", "--vllm", "0.32.0", *more])
        return int(ended.value.code or 0), capsys.readouterr().out

    code, said = run("--json")
    assert (code, json.loads(said)["verdict"]) == (0, "fits")
    assert json.loads(said)["served"]["layers"]["V2"] == {"ids": list(TRAINED), "origin": "config"}
    write_draft(training / "draft", tmp_path / "model", SHIFTED)
    code, said = run("--json")
    assert (code, json.loads(said)["verdict"]) == (1, "does not fit")
    (training / "manifest.json").unlink()
    write_draft(training / "draft", tmp_path / "model", None)
    assert run()[0] == 2


@pytest.mark.parametrize(
    "damage",
    [
        lambda draft: (draft / "config.json").unlink(),
        lambda draft: (draft / "config.json").write_text("["),
        lambda draft: (draft / "model.safetensors").unlink(),
        lambda draft: (draft / "model.safetensors").write_bytes(b"\x08\x00\x00\x00\x00\x00\x00\x00notjson!"),
        lambda draft: _index(draft, {"d2t": "model-00002-of-00002.safetensors"}),
        lambda draft: _index(draft, None),
    ],
)
def test_a_folder_that_is_no_draft_is_refused_in_words(training: Path, damage: Any) -> None:
    damage(training / "draft")
    with pytest.raises(UsageError) as refused:
        check(training, "0.32.0")
    assert all((refused.value.where, refused.value.wanted, refused.value.found, refused.value.next_step))


def _index(draft: Path, weight_map: Any) -> None:
    (draft / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_a_place_that_is_no_folder_is_told_by_what_it_is(training: Path) -> None:
    for place, found in ((training / "manifest.json", "a file"), (training / "nothing", "no such folder")):
        with pytest.raises(UsageError) as refused:
            check(place, "0.32.0")
        assert refused.value.found == found


def test_a_layer_named_twice_is_refused(training: Path, tmp_path: Path) -> None:
    """A server hands out each layer's state once, so that two of them would reach a draft that takes three."""
    (training / "manifest.json").unlink()
    write_draft(training / "draft", tmp_path / "model", (3, 3, 15))
    (finding,) = check(training, "0.32.0").mismatches
    assert "3 more than once" in finding.found


@pytest.mark.parametrize("said", ["3,9,15", [3.0, 9, 15], {"3": 1}])
def test_layers_that_are_no_list_of_numbers_are_not_passed_over(training: Path, tmp_path: Path, said: Any) -> None:
    (training / "manifest.json").unlink()
    write_draft(training / "draft", tmp_path / "model", None, eagle_aux_hidden_state_layer_ids=said)
    (finding,) = check(training, "0.32.0").mismatches
    assert finding.found == repr(said)


def test_what_runner_v2_alone_reads_is_a_claim_too(training: Path) -> None:
    (training / "manifest.json").unlink()
    flat(training, eagle_config={"layer_ids": list(TRAINED)})
    result = check(training, "0.27.0", model=str(training.parent / "model"))
    assert (result.trained.layers, result.exit_code) == (TRAINED, 1)
    assert ids(result) == {"V1": DEFAULTS, "V2": TRAINED}


def test_a_mapping_of_another_shape_is_refused(training: Path) -> None:
    import numpy as np
    from safetensors.numpy import load_file, save_file

    file = training / "draft" / "model.safetensors"
    save_file(load_file(file) | {"d2t": np.array(3, dtype=np.int64)}, file)
    (finding,) = check(training, "0.32.0").mismatches
    assert "d2t []" in finding.found


@pytest.mark.parametrize("build", ["0.25.1.dev3+g123", "0.33.0rc1"])
def test_a_build_that_is_no_release_is_judged_with_a_note(training: Path, build: str) -> None:
    result = check(training, build)
    (finding,) = result.findings
    assert (result.exit_code, finding.kind) == (0, "note")
    assert build in finding.where


def test_no_release_at_all_names_the_flag(training: Path) -> None:
    with pytest.raises(UsageError, match="--vllm"):
        check(training, "latest")


def test_an_unknown_release_is_refused_or_noted(training: Path) -> None:
    with pytest.raises(UsageError, match="0\\.10\\.0"):
        check(training, "0.10.0")
    assert [finding.kind for finding in check(training, "9.0").findings] == ["note"]


def test_the_facts_are_complete_and_each_says_where_it_was_read() -> None:
    assert len({fact.name for fact in FACTS}) == len(FACTS)
    assert all(fact.link.startswith("https://") and fact.what and fact.seen in ("read", "run") for fact in FACTS)
    for release in known():
        assert sum(within(release, range_) for range_, _ in VERIFIERS) == 1
        assert {fact.name for fact in facts_of(release)} == {f.name for f in FACTS if holds(f.name, release)}
        parts = verifiers_of(release)
        assert parts is None or "llama" in parts


@pytest.mark.live
def test_the_installed_vllm_says_what_is_known_of_it(training: Path) -> None:
    pytest.importorskip("vllm")
    from shims.versions import base_release, installed

    here = base_release(str(installed("vllm")))
    asked = check_draft(CheckConfig(training, here))
    told = check(training, here)
    assert asked.served.known_by == "vLLM's own code"
    assert asked.served.refusal is None
    assert ids(asked)["V1"] == ids(told)["V1"] == TRAINED
    assert (asked.served.method, asked.served.speculative_tokens) == ("eagle3", 3)
    assert asked.served.draft_vocab_size == DRAFT_VOCAB
    assert asked.exit_code == told.exit_code == 0
