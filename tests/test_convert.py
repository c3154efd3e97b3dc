"""Conversions change no number that need not change, and refuse what cannot be had from the source."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pipeline_fixtures import FakeEngine, ReferenceEngine, write_conversations, write_model, write_weights

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("safetensors")
datasets = pytest.importorskip("datasets")

from safetensors.torch import save_file  # noqa: E402

from pipeline import extract as extract_module  # noqa: E402
from pipeline import manifest  # noqa: E402
from pipeline.__main__ import main  # noqa: E402
from pipeline.config import ConvertConfig, ExtractConfig, PrepareConfig, VerifyConfig, VocabConfig  # noqa: E402
from pipeline.convert import Converted, convert  # noqa: E402
from pipeline.final_norm import FinalNorm  # noqa: E402
from pipeline.formats.registry import FORMATS, open_rows  # noqa: E402
from pipeline.model_info import read_model  # noqa: E402
from pipeline.prepare import prepare  # noqa: E402
from pipeline.verify import verify  # noqa: E402
from pipeline.vocab import build_vocab  # noqa: E402
from shims.errors import SpecshimError, UsageError  # noqa: E402

ROWS = 6
UNNORMED = sorted(name for name, form in FORMATS.items() if "residual" in form.last_states)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Model, prepared rows, vocabulary and right states, made once; copied for each test."""
    root = tmp_path_factory.mktemp("made")
    model = write_model(root / "model", hidden=32)
    write_weights(model)
    write_conversations(root / "conversations.jsonl", count=ROWS)
    prepare(PrepareConfig(str(model), root / "conversations.jsonl", root / "prepared"))
    build_vocab(VocabConfig(root / "prepared", 64))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(extract_module, "open_engine", lambda name, options: ReferenceEngine(options))
        base = {"prepared_data": root / "prepared" / "tokenized_data.jsonl", "dtype": "float32", "engine": "stock"}
        extract_module.extract(ExtractConfig(str(model), output_dir=root / "states", **base))
        forge = ExtractConfig(str(model), output_dir=root / "forge", format="specforge", **base)
        extract_module.extract(forge)
    return root


@pytest.fixture
def place(made: Path, tmp_path: Path) -> Path:
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    return tmp_path


def moved(place: Path, source: str, target: str, form: str, **more: Any) -> Converted:
    return convert(ConvertConfig(place / source, place / target, form, rows_per_file=4, **more))


def content(folder: Path) -> dict[str, bytes]:
    kinds = {".safetensors", ".tar", ".pt", ".ckpt"}
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.suffix in kinds}


@pytest.mark.parametrize("form", UNNORMED)
def test_there_and_back_is_the_same_files(place: Path, form: str) -> None:
    there = moved(place, "states", "there", form, vocab=place / "prepared")
    back = moved(place, "there", "back", "hs_safetensors")
    assert (there.written, back.written, there.exact, back.exact) == (ROWS, ROWS, True, True)
    assert content(place / "back") == content(place / "states")
    found = verify(VerifyConfig(place / "there", str(place / "model"), sample=ROWS))
    assert not found.faults and found.worst is not None and found.worst < 1e-5


def test_normed_rows_move_between_formats_that_hold_them(place: Path) -> None:
    moved(place, "forge", "there", "sharded")
    assert not verify(VerifyConfig(place / "there", str(place / "model"), sample=ROWS)).faults
    moved(place, "there", "back", "specforge")
    assert content(place / "back") == content(place / "forge")


def test_a_conversion_with_the_norm_equals_a_direct_extraction(place: Path) -> None:
    result = moved(place, "states", "there", "specforge", model=str(place / "model"))
    assert not result.exact and content(place / "there") == content(place / "forge")
    assert manifest.require_rows(place / "there", "folder")["exact"] is False


def test_what_lies_on_the_other_side_of_the_norm_is_refused(place: Path) -> None:
    with pytest.raises(UsageError, match="--model"):
        moved(place, "states", "there", "specforge")
    for form in UNNORMED:
        if form != "sharded":
            with pytest.raises(UsageError, match="cannot be undone"):
                moved(place, "forge", "there", form, model=str(place / "model"))
    assert not (place / "there").exists()


def test_another_models_norm_is_refused(place: Path) -> None:
    write_model(place / "other", hidden=32, seed="b")
    with pytest.raises(UsageError, match=r"model\.fingerprint"):
        moved(place, "states", "there", "specforge", model=str(place / "other"))


@pytest.mark.parametrize("kind", ["llama", "gemma"])
def test_the_final_norm_is_the_models_own(tmp_path: Path, kind: str) -> None:
    from transformers import AutoModelForCausalLM, GemmaConfig, LlamaConfig

    sizes = {
        "vocab_size": 40, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 8,
        "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8,
    }  # fmt: skip
    config = (LlamaConfig if kind == "llama" else GemmaConfig)(**sizes)
    model = AutoModelForCausalLM.from_config(config)
    torch.nn.init.uniform_(model.get_decoder().norm.weight, 0.2, 5.0)
    model.save_pretrained(tmp_path)
    own = model.get_decoder().norm.weight.detach().clone()
    # What lies beside it in checkpoints of multimodal models, of models with draft layers, and in second layouts.
    beside = {f"{part}.norm.weight": torch.ones(16) for part in ("model.visual.merger", "audio_tower", "mtp")}
    save_file({**beside, "norm.weight": own}, tmp_path / "zz-beside.safetensors")
    states = torch.randn(5, 4, 16)
    found = FinalNorm(read_model(str(tmp_path)), trust_remote_code=False).normed_last(states)
    with torch.no_grad():
        assert torch.equal(found[:, -1], model.get_decoder().norm(states[:, -1]))
    assert torch.equal(found[:, :-1], states[:, :-1])
    save_file({"other.norm.weight": own + 1}, tmp_path / "other.safetensors")
    with pytest.raises(SpecshimError, match=r"two that differ: .*norm\.weight and .*norm\.weight"):
        FinalNorm(read_model(str(tmp_path)), trust_remote_code=False)


# layers


def test_the_other_convention_is_another_name_for_the_same_states(place: Path) -> None:
    result = moved(place, "states", "there", "hs_safetensors", layer_convention="native")
    assert result.exact
    record = manifest.require_rows(place / "there", "folder")
    assert record["layers"] == {"ids": [2, 4, 5, 8], "convention": "native", "native": [2, 4, 5, 8]}
    rows = [open_rows(place / n, manifest.require_rows(place / n, "folder")).read(0) for n in ("states", "there")]
    assert torch.equal(rows[0].states, rows[1].states)
    moved(place, "there", "back", "hs_safetensors", layer_convention="after")
    assert content(place / "back") == content(place / "states")


def test_layers_are_picked_by_their_state_not_by_their_place(place: Path) -> None:
    result = moved(place, "states", "there", "hs_safetensors", layer_ids=(8, 4), layer_convention="native")
    assert not result.exact
    assert not verify(VerifyConfig(place / "there", str(place / "model"), sample=ROWS)).faults
    before, after = (
        open_rows(place / n, manifest.require_rows(place / n, "folder")).read(0).states for n in ("states", "there")
    )
    assert torch.equal(after, before[:, [1, 3]])


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"layer_ids": (2, 3, 4, 7)}, "native 3 is not among them"),
        ({"layer_ids": (1, 3, 4, 7), "layer_convention": "native"}, "native 1, 3, 7 is not among them"),
        ({"layer_convention": "before"}, "after or native"),
        ({"store_dtype": "int4"}, "--store-dtype"),
        ({"source_layer_ids": (1,)}, "has a manifest"),
        ({"rows_per_file": 0}, "--rows-per-file"),
    ],
)
def test_states_that_are_not_there_are_not_made_up(place: Path, more: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError) as caught:
        convert(ConvertConfig(place / "states", place / "there", "hs_safetensors", **more))
    assert words in str(caught.value) and not (place / "there").exists()


# folders of other tools


def strip(folder: Path) -> None:
    """Leave what another tool would have written: no manifest, no header of ours."""
    (folder / "manifest.json").unlink()
    for path in folder.glob("data_*.pt"):
        row = torch.load(path, weights_only=True)
        del row["specshim"]
        torch.save(row, path)


def foreign(place: Path, **more: Any) -> Converted:
    told = {
        "source_layer_ids": (1, 3, 4, 7), "source_layer_convention": "after", "model": str(place / "model"),
    } | more  # fmt: skip
    return moved(place, "foreign", "there", "hs_safetensors", **told)


def test_rows_of_another_tool_are_taken_once_their_layers_are_proved(place: Path) -> None:
    moved(place, "states", "foreign", "speculators-0.4")
    strip(place / "foreign")
    assert foreign(place).written == ROWS
    assert not verify(VerifyConfig(place / "there", str(place / "model"), sample=ROWS)).faults


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"source_layer_convention": "native"}, "native 2"),
        ({"source_layer_ids": (2, 3, 4, 7)}, "native 2"),
        ({"source_layer_ids": None}, "--source-layer-ids"),
        ({"model": None}, "--model"),
    ],
    ids=["convention", "layer", "nothing said", "no model"],
)
def test_layers_that_are_others_than_said_are_named(place: Path, more: dict[str, Any], words: str) -> None:
    moved(place, "states", "foreign", "speculators-0.4")
    strip(place / "foreign")
    with pytest.raises(UsageError) as caught:
        foreign(place, **more)
    assert words in caught.value.found and not (place / "there").exists()


def _fewer(folder: Path) -> None:
    (folder / f"data_{ROWS - 1}.pt").unlink()


def _more(folder: Path) -> None:
    shutil.copy2(folder / "data_0.pt", folder / f"data_{ROWS}.pt")


def _repaired(folder: Path) -> None:
    """Other numbers under the same size and time; what is zipped has checksums at its end."""
    path = folder / "data_2.pt"
    before, row = path.stat(), torch.load(path, weights_only=True)
    row["hidden_states"][0][3, 3] += 1
    torch.save(row, path)
    assert path.stat().st_size == before.st_size
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def _touched(folder: Path) -> None:
    os.utime(folder / "data_2.pt")


@pytest.mark.parametrize("change", [_fewer, _more, _repaired, _touched])
def test_a_conversion_of_another_tools_rows_does_not_go_on_with_others(
    place: Path, change: Callable[[Path], None]
) -> None:
    moved(place, "states", "foreign", "speculators-0.4")
    strip(place / "foreign")
    foreign(place)
    assert foreign(place).kept == ROWS
    moved(place, "there", "further", "sharded")
    before = content(place / "there")
    change(place / "foreign")
    with pytest.raises(UsageError) as caught:
        foreign(place)
    assert "source_sha256" in caught.value.wanted and content(place / "there") == before
    shutil.rmtree(place / "there")
    foreign(place)
    with pytest.raises(UsageError, match="source_sha256"):
        moved(place, "there", "further", "sharded")


def _nan(row: dict[str, Any]) -> None:
    row["hidden_states"][1][2, 5] = float("nan")


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (_nan, "1 of"),
        (lambda row: row["hidden_states"][3].zero_(), "all zero (first: token 0, layer column 3)"),
        (lambda row: row["hidden_states"][0][4].fill_(2.5), "constant (first: token 4, layer column 0)"),
        (lambda row: row["loss_mask"][2:3].fill_(2), "loss mask holds 2"),
        (lambda row: row["input_ids"][1:2].fill_(300), "token id 300, the vocabulary ends with 299"),
        (lambda row: row["input_ids"][1:2].fill_(-1), "token id -1"),
    ],
    ids=["nan", "zero", "constant", "mask", "beyond the vocabulary", "negative"],
)
@pytest.mark.parametrize("index", [0, 3], ids=["proved", "not proved"])
def test_rows_of_another_tool_that_cannot_be_right_are_refused(
    place: Path, spoil: Callable[[dict[str, Any]], Any], words: str, index: int
) -> None:
    moved(place, "states", "foreign", "speculators-0.4")
    strip(place / "foreign")
    path = place / "foreign" / f"data_{index}.pt"
    row = torch.load(path, weights_only=True)
    spoil(row)
    torch.save(row, path)
    with pytest.raises(UsageError) as caught:
        foreign(place)
    assert f"row {index} " in caught.value.where and words in caught.value.found
    assert not (place / "there" / "hidden_states" / f"hs_{index}.safetensors").exists()


@pytest.mark.parametrize("structure_only", [True, False])
@pytest.mark.parametrize(("name", "value"), [("token_ids", 300), ("loss_mask", 2)])
def test_verify_tells_ids_and_masks_out_of_range(place: Path, name: str, value: int, structure_only: bool) -> None:
    from pipeline.formats.hs_safetensors import read_row, row_path, write_row

    path = row_path(place / "states", 3)
    row = read_row(path)
    getattr(row, name)[1] = value
    # Sealed anew: what an earlier build carried on from another tool.
    header = {key: text for key, text in row.header.items() if key not in ("row_id", "content_sha256")}
    write_row(path, row, header)
    asked = VerifyConfig(place / "states", str(place / "model"), sample=ROWS, structure_only=structure_only)
    found = verify(asked)
    assert found.rows == ROWS - 1 and len(found.faults) == 1
    assert "hs_3.safetensors" in found.faults[0] and str(value) in found.faults[0]


def test_an_arrow_folder_of_another_tool_brings_its_masks(place: Path) -> None:
    from safetensors.torch import load_file, save_file

    moved(place, "states", "foreign", "speculators-0.5")
    (place / "foreign" / "manifest.json").unlink()
    for path in (place / "foreign" / "hidden_states").iterdir():
        tensors = load_file(path)
        save_file({name: tensors[name] for name in ("hidden_states", "token_ids")}, path)
    assert foreign(place).written == ROWS
    stores = [open_rows(place / n, manifest.require_rows(place / n, "folder")) for n in ("states", "there")]
    assert [stores[0].tokens(i) for i in range(ROWS)] == [stores[1].tokens(i) for i in range(ROWS)]


# damage, going on, options


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda folder: (folder / "hidden_states" / "hs_0.safetensors").write_bytes(b"x" * 40), "a whole row"),
        (lambda folder: shutil.rmtree(folder / "hidden_states"), "without a gap"),
        (lambda folder: (folder / "hidden_states" / "hs_3.safetensors").unlink(), "no row 3"),
        (lambda folder: (folder / "state.json").write_text("{}"), "an Arrow table"),
    ],
)
def test_damage_of_another_tools_rows_is_told_in_words(place: Path, spoil: Callable[[Path], Any], words: str) -> None:
    moved(place, "states", "foreign", "speculators-0.5")
    (place / "foreign" / "manifest.json").unlink()
    spoil(place / "foreign")
    with pytest.raises(UsageError, match=words):
        foreign(place, source_format="speculators-0.5")


def test_damage_is_not_carried_on(place: Path) -> None:
    path = place / "states" / "hidden_states" / "hs_3.safetensors"
    changed = bytearray(path.read_bytes())
    changed[-200] ^= 1
    path.write_bytes(changed)
    with pytest.raises(UsageError, match="row 3") as caught:
        moved(place, "states", "there", "speculators-0.4")
    assert "content hash" in caught.value.found
    assert not manifest.require_rows(place / "there", "folder")["complete"]


def test_rows_that_changed_places_are_not_carried_on(place: Path) -> None:
    rows = place / "states" / "hidden_states"
    for old, new in (("hs_1", "x"), ("hs_2", "hs_1"), ("x", "hs_2")):
        (rows / f"{old}.safetensors").rename(rows / f"{new}.safetensors")
    with pytest.raises(UsageError, match="row 1") as caught:
        moved(place, "states", "there", "sharded")
    assert "'2'" in caught.value.found


def test_a_conversion_goes_on_where_it_stopped(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    moved(place, "states", "whole", "sharded")
    from pipeline.formats.shards import ShardStore

    write = ShardStore.write

    def stop(self: ShardStore, index: int, *arguments: Any) -> int:
        if index == 4:
            raise RuntimeError("killed")
        return write(self, index, *arguments)

    with monkeypatch.context() as patch, pytest.raises(RuntimeError):
        patch.setattr(ShardStore, "write", stop)
        moved(place, "states", "there", "sharded")
    again = moved(place, "states", "there", "sharded")
    assert (again.kept, again.written) == (4, 2) and content(place / "there") == content(place / "whole")


def test_float8_moves_unchanged_and_becomes_bfloat16_where_it_must(place: Path) -> None:
    assert not moved(place, "states", "packed", "hs_safetensors", store_dtype="float8_e4m3").exact
    assert moved(place, "packed", "there", "sharded").exact
    moved(place, "there", "back", "hs_safetensors")
    assert content(place / "back") == content(place / "packed")
    moved(place, "packed", "plain", "speculators-0.4")
    record = manifest.require_rows(place / "plain", "folder")
    assert (record["store_dtype"], record["exact"]) == ("bfloat16", False)
    found = verify(VerifyConfig(place / "plain", str(place / "model"), sample=ROWS))
    assert found.worst is not None and 1e-2 < found.worst < 4e-2


def test_bad_rows_stay_out_and_keep_their_places(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def make(_name: str, options: Any) -> FakeEngine:
        engine = FakeEngine(options)
        engine._spoil = lambda states: states * 0 if engine.rows_computed == 3 else states
        return engine

    monkeypatch.setattr(extract_module, "open_engine", make)
    data = place / "prepared" / "tokenized_data.jsonl"
    settings = {"dtype": "float32", "max_bad": 1, "engine": "stock"}
    extract_module.extract(ExtractConfig(str(place / "model"), data, place / "holes", **settings))
    moved(place, "holes", "there", "speculators-0.5")
    table = datasets.load_from_disk(str(place / "there")).with_format(None)
    assert len(table) == ROWS and not (place / "there" / "hidden_states" / "hs_2.safetensors").exists()
    assert not verify(VerifyConfig(place / "there")).faults


def test_an_unfinished_source_is_refused(place: Path) -> None:
    record = manifest.require_rows(place / "states", "folder")
    manifest.write(place / "states", record | {"complete": False})
    with pytest.raises(UsageError, match="finished set"):
        moved(place, "states", "there", "sharded")


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("states/hidden_states", "inside of the source"),
        ("states/a/b", "inside of"),
        ("states/../states/a", "inside of"),
        ("link/a", "inside of"),
        (".", "around the source"),
        ("states", "states"),
    ],
)
def test_source_and_target_within_each_other_are_refused(place: Path, target: str, words: str) -> None:
    (place / "link").symlink_to(place / "states")
    before = sorted(place.rglob("*"))
    with pytest.raises(UsageError) as caught:
        moved(place, "states", target, "sharded")
    assert caught.value.where == "--output-dir" and words in caught.value.found
    assert sorted(place.rglob("*")) == before
    moved(place, "states", "states-2", "sharded")


def test_the_command_line(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = [
        "convert",
        place / "states",
        "--to",
        "speculators-0.4",
        "--output-dir",
        place / "there",
        "--layer-ids",
        1,
        3,
        4,
        7,
    ]
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in given])
    assert not ended.value.code and "6 of 6 rows written" in capsys.readouterr().out
    with pytest.raises(SystemExit) as ended:
        main(["convert", str(place / "states"), "--to", "hdf5", "--output-dir", str(place / "x")])
    assert ended.value.code == 2 and "hs_safetensors, sharded" in capsys.readouterr().err
