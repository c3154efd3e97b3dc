"""`evaluate` on a draft made for states that stamp their layer: right ids pay, shifted ones do not.

An auxiliary state of layer L is the head's row of the token after next, turned by a rotation that is L's own. The draft
turns three of them back and takes their mean: nothing has to be trained, and what it has to reach is known.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from draft_fixtures import write_draft, write_training
from pipeline_fixtures import write_conversations, write_model, write_weights

torch = pytest.importorskip("torch")
pytest.importorskip("speculators")
pytest.importorskip("transformers")
pytest.importorskip("datasets")

from pipeline import evaluate as evaluate_module  # noqa: E402
from pipeline import extract as extract_module  # noqa: E402
from pipeline import manifest  # noqa: E402
from pipeline.__main__ import main  # noqa: E402
from pipeline.config import EvaluateConfig, ExtractConfig, PrepareConfig, VocabConfig  # noqa: E402
from pipeline.evaluate import evaluate  # noqa: E402
from pipeline.evaluation import serving  # noqa: E402
from pipeline.evaluation.held_out import HeldOut  # noqa: E402
from pipeline.evaluation.report import JSON_NAME, PICTURE_NAME, TEXT_NAME  # noqa: E402
from pipeline.evaluation.request import DRAFT, NONE, EngineAnswer  # noqa: E402
from pipeline.evaluation.results import REPLAY, acceptance_in  # noqa: E402
from pipeline.extract import extract  # noqa: E402
from pipeline.formats.hs_safetensors import read_row, row_path, write_row  # noqa: E402
from pipeline.formats.stores import FileStore  # noqa: E402
from pipeline.model_info import read_model, sha256_file  # noqa: E402
from pipeline.prepare import prepare  # noqa: E402
from pipeline.serving.trained import manifest_of  # noqa: E402
from pipeline.vocab import build_vocab, load_mapping  # noqa: E402
from shims.errors import SpecshimError, UsageError  # noqa: E402
from shims.guardian import identity  # noqa: E402

LAYERS, HIDDEN, DRAFT_VOCAB, RELEASE = 8, 32, 20, "0.31.0"
RIGHT, SHIFTED = (2, 4, 5), (3, 5, 6)


def rotation(layer: int) -> Any:
    """The layer's stamp, an orthogonal matrix [H, H]."""
    generator = torch.Generator().manual_seed(layer)
    return torch.linalg.qr(torch.randn(HIDDEN, HIDDEN, generator=generator))[0]


class StampedEngine:
    """Last states that name the next token, so that the text is the verifier's own, and stamped auxiliary ones."""

    def __init__(self, options: Any) -> None:
        from safetensors.torch import load_file

        self._layers = options.layers.native
        self._head = load_file(options.model.path / "model.safetensors")["lm_head.weight"]
        self._last = options.model.num_layers

    def states(self, rows: Sequence[Sequence[int]]) -> list[Any]:
        return [torch.stack([self._picture(layer, list(row)) for layer in self._layers], dim=1) for row in rows]

    def _picture(self, layer: int, row: list[int]) -> Any:
        if layer == self._last:
            return self._head[torch.tensor([*row[1:], 0])]
        return self._head[torch.tensor([*row[2:], 0, 0])] @ rotation(layer)

    def close(self) -> None:
        pass


def _write_verifier(folder: Path) -> Path:
    """Weights under which a state that is a row of the head names that row's token."""
    from safetensors.torch import save_file

    write_model(folder, layers=LAYERS, hidden=HIDDEN)
    file = folder / "config.json"
    config = json.loads(file.read_text()) | {"tie_word_embeddings": False, "num_key_value_heads": 2}
    file.write_text(json.dumps(config))
    torch.manual_seed(0)
    rows = torch.nn.functional.normalize(torch.randn(config["vocab_size"], HIDDEN))
    weights = {
        "lm_head.weight": rows,
        "model.embed_tokens.weight": torch.randn(config["vocab_size"], HIDDEN),
        "model.norm.weight": torch.ones(HIDDEN),
    }
    save_file(weights, folder / "model.safetensors")
    return folder


def _write_draft(folder: Path, model: Path, prepared: Path) -> None:
    """A draft whose input layer undoes the stamps of its layers, and whose decoder layer adds nothing."""
    from safetensors.torch import save_file

    from pipeline.evaluation.draft_model import build
    from pipeline.serving.draft_folder import read_draft

    d2t, t2d = load_mapping(prepared)
    layer = {
        "model_type": "llama", "hidden_size": HIDDEN, "intermediate_size": 8, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": len(t2d), "rms_norm_eps": 1e-5,
        "pad_token_id": None,
    }  # fmt: skip
    write_draft(folder, model, RIGHT, transformer_layer_config=layer, draft_vocab_size=len(d2t))
    mapping = {"d2t": torch.from_numpy(d2t), "t2d": torch.from_numpy(t2d)}
    save_file(mapping, folder / "model.safetensors")
    draft = build(read_draft(folder), read_model(str(model)))
    with torch.no_grad():
        draft.fc.weight.copy_(torch.cat([rotation(layer) for layer in RIGHT], dim=1))
        draft.layers[0].self_attn.o_proj.weight.zero_()
        draft.layers[0].mlp.down_proj.weight.zero_()
    weights = {name: part for name, part in draft.state_dict().items() if not name.startswith("verifier")}
    save_file(weights, folder / "model.safetensors")


class Place:
    def __init__(self, root: Path) -> None:
        self.root = root
        self.training, self.states, self.shifted = root / "training", root / "states", root / "shifted"

    def config(self, out: str, **more: Any) -> EvaluateConfig:
        options = {"data": self.states, "serve": False, "vllm": RELEASE, "device": "cpu"} | more
        return EvaluateConfig(self.training, output_dir=self.root / out, **options)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    place = Place(tmp_path_factory.mktemp("evaluate"))
    model = _write_verifier(place.root / "model")
    write_conversations(place.root / "conversations.jsonl", count=24)
    prepared = place.root / "prepared"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(extract_module, "open_engine", lambda name, options: StampedEngine(options))
        prepare(PrepareConfig(str(model), place.root / "conversations.jsonl", prepared))
        build_vocab(VocabConfig(prepared, DRAFT_VOCAB))
        for folder, auxiliary in ((place.states, RIGHT), (place.shifted, SHIFTED)):
            ids = (*auxiliary, LAYERS)
            options = {"layer_ids": ids, "layer_convention": "native", "engine": "stock", "dtype": "float32"}
            extract(ExtractConfig(str(model), prepared / "tokenized_data.jsonl", folder, batch_size=8, **options))
    inputs = manifest.require_rows(place.states, "states")["inputs"]
    write_training(
        place.training,
        model,
        RIGHT,
        inputs=inputs,
        draft_vocab_size=DRAFT_VOCAB,
        max_seq_len=512,
        val_share=0.2,
        seed=0,
    )
    _write_draft(place.training / "draft", model, prepared)
    return place


def first_share(results: Any, kind: str = "draft") -> float:
    found = acceptance_in(results.teacher_forced[f"{kind} on held-out rows"]["every_position"])
    return found.conditional[0]


def test_the_right_layers_reach_what_the_draft_can_say(place: Place) -> None:
    results = evaluate(place.config("right", untrained=True))
    found = results.teacher_forced["draft on held-out rows"]
    assert found["greedy_share"] == 1.0
    # Every token that is in the draft's vocabulary, and no other.
    can_say = said = 0
    _, t2d = load_mapping(place.root / "prepared")
    for row in HeldOut(place.states, manifest_of(place.training)).each():
        places = [at for at in range(2, len(row.tokens)) if row.mask[at] and row.mask[at - 1]]
        said += len(places)
        can_say += sum(bool(t2d[row.tokens[at]]) for at in places)
    assert 0.5 < can_say / said < 1
    assert first_share(results) == pytest.approx(can_say / said)
    assert first_share(results, "untrained draft") < first_share(results) / 1.5
    assert results.layers == RIGHT and results.steps == 3
    assert results.verdict().words == ("not served",)
    report = (place.root / "right" / TEXT_NAME).read_text()
    assert "draft on held-out rows, as served" in report and "--no-serve" in report
    assert json.loads((place.root / "right" / JSON_NAME).read_text())["layers_native"] == list(RIGHT)
    picture = place.root / "right" / PICTURE_NAME
    assert not picture.exists() or picture.read_bytes().startswith(b"\x89PNG")


def test_shifted_ids_are_refused_and_when_forced_are_visibly_worse(
    place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    draft = place.training / "draft" / "config.json"
    before = draft.read_text()
    draft.write_text(json.dumps(json.loads(before) | {"eagle_aux_hidden_state_layer_ids": list(SHIFTED)}))
    try:
        with pytest.raises(SystemExit) as ended:
            main(["check-draft", str(place.training), "--vllm", RELEASE, "--from-facts"])
        assert ended.value.code == 1
        assert "all shifted by +1" in capsys.readouterr().err
        with pytest.raises(SpecshimError, match="all shifted by"):
            evaluate(place.config("refused"))
        assert not (place.root / "refused").exists()
        own = evaluate(place.config("own", data=place.shifted, force=True))
    finally:
        draft.write_text(before)
    forced = evaluate(place.config("forced", data=place.shifted, force=True, layer_ids=SHIFTED))
    right = evaluate(place.config("right"))
    assert own.layers == forced.layers == SHIFTED and own.forced
    assert first_share(own) == first_share(forced) < first_share(right) / 2
    assert forced.verdict().words == ("mismatched", "undertrained", "not served")


def test_what_is_finished_is_kept_and_what_changed_is_made_again(
    place: Place, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first = evaluate(place.config("twice"))
    from pipeline.evaluation import draft_model

    def not_again(*_arguments: Any) -> Any:
        raise AssertionError("a finished part was made again")

    with monkeypatch.context() as patch:
        patch.setattr(draft_model, "load_draft", not_again)
        again = evaluate(place.config("twice"))
        assert "kept from before" in capsys.readouterr().err
        assert again.as_dict() == first.as_dict()
        with pytest.raises(AssertionError):
            evaluate(place.config("twice", steps=1))


def test_states_that_were_extracted_anew_and_another_draft_are_evaluated_anew(place: Place, tmp_path: Path) -> None:
    """What was kept from before would be the numbers of what is gone."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(place.states, tmp_path / "states")
    shutil.copytree(place.training, tmp_path / "training")
    config = replace(place.config("anew", data=tmp_path / "states", untrained=True), draft=tmp_path / "training")
    first = evaluate(config)

    file = tmp_path / "states" / manifest.FILE_NAME
    record = json.loads(file.read_text())
    for index in range(record["counts"]["rows"]):
        row = read_row(row_path(tmp_path / "states", index))
        wrong = replace(row, states=row.states.flip(0))
        write_row(row_path(tmp_path / "states", index), wrong, dict(row.header))
    file.write_text(json.dumps(record | {"created": "later"}))
    assert first_share(evaluate(config)) < first_share(first) / 2

    weights = tmp_path / "training" / "draft" / "model.safetensors"
    tensors = {name: part * (2 if name == "norm.weight" else 1) for name, part in load_file(weights).items()}
    save_file(tensors, weights)
    evaluate(config)
    assert sha256_file(weights) in (place.root / "anew" / "untrained" / "made_from.json").read_text()


def test_a_row_is_checked_once(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    checked = list[int]()
    own = FileStore.check

    def counted(self: FileStore, index: int, wanted: Any) -> int:
        checked.append(index)
        return own(self, index, wanted)

    monkeypatch.setattr(FileStore, "check", counted)
    held_out = HeldOut(place.states, manifest_of(place.training))
    assert [row.index for row in held_out.each()] == held_out.rows
    assert sorted(checked) == list(range(24))


def test_another_number_of_rows_than_the_training_drew_from_is_refused(place: Place) -> None:
    """It would be another split, with rows that were trained on."""
    record = manifest_of(place.training)
    assert record is not None
    drawn = {"inputs": {**record["inputs"], "rows": 24}}
    assert HeldOut(place.states, record | drawn).rows == HeldOut(place.states, record).rows
    drawn["inputs"]["rows"] = 23
    with pytest.raises(UsageError, match="another one, with rows that were trained on"):
        HeldOut(place.states, record | drawn)
    assert len(HeldOut(place.states, record | drawn, "all").rows) == 24


@pytest.mark.parametrize(("device", "current"), [("cuda:1", ["cuda:1"]), ("cuda", []), ("auto", [])])
def test_a_gpu_that_is_named_is_the_current_one(
    place: Place, monkeypatch: pytest.MonkeyPatch, device: str, current: list[str]
) -> None:
    found = list[str]()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda named: found.append(str(named)))

    def stop(*_given: Any) -> Any:
        raise InterruptedError

    monkeypatch.setattr(evaluate_module, "task_of", stop)
    with pytest.raises(InterruptedError):
        evaluate(place.config("gpu", device=device))
    assert found == current


def test_rows_that_were_trained_on_are_not_looked_at(place: Place) -> None:
    record = manifest_of(place.training)
    assert record is not None
    held_out = HeldOut(place.states, record)
    assert len(held_out.rows) == 5 and len(HeldOut(place.states, record, "all").rows) == 24
    with pytest.raises(UsageError, match="no manifest"):
        HeldOut(place.states, None)
    with pytest.raises(UsageError, match="other prepared data"):
        HeldOut(place.states, record | {"inputs": {"prepared_data": "x"}})


def test_a_row_that_was_trained_on_is_not_looked_at_under_another_number(place: Place, tmp_path: Path) -> None:
    record = manifest_of(place.training)
    assert record is not None
    held_out = HeldOut(place.states, record).rows
    trained = next(index for index in HeldOut(place.states, record, "all").rows if index not in held_out)
    states = tmp_path / "states"
    shutil.copytree(place.states, states)
    one, other = row_path(states, held_out[0]), row_path(states, trained)
    kept = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(kept)
    with pytest.raises(UsageError, match="a whole row"):
        HeldOut(states, record)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"layer_ids": RIGHT}, "--force"),
        ({"layer_ids": (1, 2), "force": True}, "3 native ids"),
        ({"rows": "some"}, "held-out or all"),
        ({"max_tokens": 0}, "at least 1"),
        ({"steps": 0}, "--steps"),
        ({"max_rows": 0}, "--max-rows"),
        ({"layer_ids": (2, 4, LAYERS + 1), "force": True}, "native ids from 0 to 8"),
        ({"layer_ids": (-1, 2, 4), "force": True}, "-1"),
        ({"data": None}, "neither rows nor a server"),
        ({"data": None, "serve": True, "vllm": None}, "--prompts"),
        ({"device": "tpu"}, "cpu, cuda"),
    ],
)
def test_options_that_make_no_sense_are_refused_before_anything_loads(
    place: Place, options: dict[str, Any], word: str
) -> None:
    with pytest.raises(UsageError) as refused:
        evaluate(place.config("never", **options))
    assert word in str(refused.value)
    assert not (place.root / "never").exists()


def test_a_verifier_too_large_for_one_gpu_costs_its_own_part_alone(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    freed = list[bool]()

    def too_large(*_given: Any, **_options: Any) -> Any:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nMore words")

    def served(task: Any, results: Any, drafts: Any) -> list[list[int]]:
        assert freed == [True], "the engines need the memory that the teacher-forced part had"
        results.engines |= {kind: EngineAnswer(kind, [[4, 5]], 1.0) for kind in (NONE, DRAFT)}
        return [[1, 2, 3]]

    monkeypatch.setattr("pipeline.evaluation.task.installed", lambda package: None)
    monkeypatch.setattr(evaluate_module, "serve", served)
    monkeypatch.setattr("pipeline.evaluation.texts._free_memory", lambda task: freed.append(True))
    monkeypatch.setattr("pipeline.evaluation.held_out.Reference", too_large)
    results = evaluate(place.config("large", serve=True))
    assert results.not_run[REPLAY] == "CUDA out of memory. Tried to allocate 2 GiB."
    assert results.teacher_forced and (place.root / "large" / TEXT_NAME).is_file()
    monkeypatch.setattr("pipeline.evaluation.draft_model.load_draft", too_large)
    with pytest.raises(SpecshimError, match="give --device cpu"):
        evaluate(place.config("larger"))


def test_another_release_than_the_one_that_would_serve_is_refused(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.evaluation.task.installed", lambda package: "0.32.0+cpu")
    with pytest.raises(UsageError, match="leave it out, or add --no-serve"):
        evaluate(place.config("never", serve=True))


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")
def test_what_a_crashed_engine_leaves_behind_is_ended(tmp_path: Path) -> None:
    crash = (
        "import os, signal, subprocess, sys\n"
        "left = subprocess.Popen(['sleep', '100'])\n"
        "print(left.pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGSEGV)"
    )
    with (tmp_path / "log").open("w") as log:
        assert serving._run([sys.executable, "-c", crash], log) == -signal.SIGSEGV
    left, ends = int((tmp_path / "log").read_text()), time.monotonic() + 60
    while identity(left) and time.monotonic() < ends:
        time.sleep(0.05)
    alive = identity(left)
    if alive:
        os.kill(left, signal.SIGKILL)
    assert not alive


@pytest.mark.live
def test_a_release_that_cannot_speculate_here_says_so_in_its_own_words(tmp_path: Path) -> None:
    from pipeline.evaluation.request import NGRAM, EngineRequest, speculation
    from pipeline.evaluation.serving import ask
    from pipeline.serving.facts import holds
    from shims.versions import base_release, installed

    pytest.importorskip("vllm")
    if torch.cuda.is_available() or holds("cpu-speculation", base_release(str(installed("vllm")))):
        pytest.skip("this one can")
    model = write_model(tmp_path / "model", hidden=64)
    write_weights(model)
    request = EngineRequest(
        NGRAM, str(model), [[1, 2, 3]], 4, {"dtype": "float32", "max_model_len": 64}, speculation(NGRAM, None, 2)
    )
    with pytest.raises(SpecshimError) as refused:
        ask(request, tmp_path / "parts", "ngram")
    assert "spec decode is not supported" in refused.value.found
    assert "ngram.log" in refused.value.next_step
