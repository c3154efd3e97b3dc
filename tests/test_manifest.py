"""Every manifest that a stage writes fits the schema in docs, and the docs are what the code says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from mini_stack import ROOT
from pipeline_fixtures import FakeEngine, write_conversations, write_model

jsonschema = pytest.importorskip("jsonschema")
pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("safetensors")

from pipeline import extract as extract_module  # noqa: E402
from pipeline import manifest, run_history  # noqa: E402
from pipeline.config import ConvertConfig, ExtractConfig, PrepareConfig, VocabConfig  # noqa: E402
from pipeline.convert import convert  # noqa: E402
from pipeline.manifest_schema import page, schema  # noqa: E402
from pipeline.prepare import prepare  # noqa: E402
from pipeline.vocab import build_vocab  # noqa: E402
from shims.errors import UsageError  # noqa: E402


def test_the_docs_are_fresh() -> None:
    assert json.loads((ROOT / "docs" / "manifest.schema.json").read_text()) == schema(), (
        "python -m pipeline.manifest_schema docs"
    )
    assert (ROOT / "docs" / "manifest.md").read_text() == page()


def test_the_schema_is_one() -> None:
    jsonschema.Draft202012Validator.check_schema(schema())


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(extract_module, "open_engine", lambda name, options: FakeEngine(options))
    model = write_model(tmp_path / "model")
    write_conversations(tmp_path / "conversations.jsonl")
    prepare(PrepareConfig(str(model), tmp_path / "conversations.jsonl", tmp_path / "prepared"))
    return tmp_path


def config(place: Path, **more: Any) -> ExtractConfig:
    settings = {"engine": "stock"} | more
    return ExtractConfig(
        str(place / "model"), place / "prepared" / "tokenized_data.jsonl", place / "states", **settings
    )


def problems(path: Path) -> list[str]:
    found = jsonschema.Draft202012Validator(schema()).iter_errors(json.loads(path.read_text()))
    return [f"{'/'.join(map(str, error.absolute_path))}: {error.message}" for error in found]


def test_what_every_stage_writes_fits_the_schema(place: Path) -> None:
    build_vocab(VocabConfig(place / "prepared", 100))
    extract_module.extract(config(place))
    convert(ConvertConfig(place / "states", place / "moved", "speculators-0.4"))
    for path in ("prepared/manifest.json", "prepared/vocab-100.json", "states/manifest.json", "moved/manifest.json"):
        assert problems(place / path) == [], path


def test_a_conversion_says_which_rows_of_another_tool_it_began_with(place: Path) -> None:
    extract_module.extract(config(place))
    convert(ConvertConfig(place / "states", place / "moved", "sharded"))
    path = place / "moved" / "manifest.json"
    for value, fits in ((None, True), ("0" * 64, True), ("0", False), (1, False)):
        manifest.write(place / "moved", json.loads(path.read_text()) | {"source_sha256": value})
        assert (problems(path) == []) is fits


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"stage": "cook"}, "cook"),
        ({"layers": {"ids": [1], "convention": "before", "native": [2]}}, "before"),
        ({"complete": "yes"}, "yes"),
        ({"counts": {}}, "rows"),
        ({"store_dtype": "int4"}, "int4"),
    ],
)
def test_the_schema_tells_a_wrong_manifest(place: Path, change: dict[str, Any], words: str) -> None:
    extract_module.extract(config(place))
    path = place / "states" / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    assert any(words in problem for problem in problems(path))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"layers": {}}, "layers.ids"),
        ({"layers": "1 3"}, "layers"),
        ({"layers": {"ids": ["1"], "convention": "after", "native": [2]}}, "layers.ids[0]"),
        ({"layers": {"ids": [1], "convention": "before", "native": [2]}}, "after, native"),
        ({"model": None}, "object"),
        ({"dtype": "int7"}, "float32, bfloat16, float16"),
        ({"counts": {"rows": True}}, "counts.rows"),
        ({"counts": {"rows": -1}}, "a number from 0"),
    ],
)
def test_what_no_stage_writes_is_refused_and_named(place: Path, change: dict[str, Any], words: str) -> None:
    extract_module.extract(config(place))
    file = place / "states" / "manifest.json"
    content = json.loads(file.read_text())
    assert manifest.require_rows(place / "states", "--data") == content
    file.write_text(json.dumps(content | change))
    assert problems(file), "the schema refuses it, too"
    with pytest.raises(UsageError) as refused:
        manifest.require_rows(place / "states", "--data")
    assert words in str(refused.value)


def test_a_resume_on_another_stack_keeps_both_and_each_row_names_its_own(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = FakeEngine
    monkeypatch.setattr(extract_module, "open_engine", lambda name, options: broken(options, fail_at=4))
    with pytest.raises(Exception, match="TimeoutError"):
        extract_module.extract(config(place))
    before = manifest.require_rows(place / "states", "folder")
    assert before["complete"] is False and [sorted(run) for run in before["runs"]] == [
        ["engine", "shard", "stack", "started"]
    ]
    monkeypatch.setattr(extract_module, "open_engine", lambda name, options: FakeEngine(options))
    versions = manifest.installed_versions() | {"vllm": "0.99.0"}
    monkeypatch.setattr(manifest, "installed_versions", lambda: versions)
    extract_module.extract(config(place))
    assert "computed with" in capsys.readouterr().err
    after = manifest.require_rows(place / "states", "folder")
    assert len(after["stacks"]) == len(after["runs"]) == 2 and after["complete"]
    assert [after["stacks"][run["stack"]]["versions"].get("vllm") for run in after["runs"]] == [
        before["versions"].get("vllm"), "0.99.0",
    ]  # fmt: skip
    rows = extract_module.plan_job(config(place)).rows()
    stacks = [rows.store.read(index).header["stack"] for index in range(6)]
    assert stacks == [after["runs"][0]["stack"]] * 4 + [after["runs"][1]["stack"]] * 2
    assert problems(place / "states" / "manifest.json") == []


def test_the_next_stage_names_field_wanted_and_found(place: Path) -> None:
    extract_module.extract(config(place))
    for change, field in (
        ({"store_dtype": "bfloat16"}, "store_dtype"),
        ({"format": "sharded"}, "format"),
        ({"max_seq_len": 100}, "max_seq_len"),
        ({"layer_ids": (1, 2, 3, 7)}, "layers"),
    ):
        with pytest.raises(UsageError) as caught:
            extract_module.extract(config(place, **change))
        assert field in caught.value.wanted and field in caught.value.found


def test_a_difference_inside_of_a_field_is_the_one_that_is_shown() -> None:
    """The whole of both may look alike as far as it is shown."""
    one: dict[str, Any] = {"inputs": {"data": "9" * 90, "rows": 24, "files": {"config.json": "a"}}}
    for change, wanted, found in (
        ({"rows": 12}, "inputs.rows = 24", "inputs.rows = 12"),
        ({"files": {"config.json": "b"}}, 'inputs.files.config.json = "a"', 'inputs.files.config.json = "b"'),
        ({"more": 1}, "inputs.more = null", "inputs.more = 1"),
    ):
        with pytest.raises(UsageError) as caught:
            manifest.require_same("here", one, {"inputs": one["inputs"] | change}, "go on")
        assert (caught.value.wanted, caught.value.found) == (wanted, found)


def test_rows_without_prepared_data_are_known_by_what_they_were_converted_from() -> None:
    """A training looks at this, and an evaluation, which has to know the rows that were held out."""
    sources = [{"source": name} for name in ("a", "b", "a")]
    first, second, again = (manifest.rows_identity({"inputs": source}) for source in sources)
    assert manifest.rows_identity({"inputs": {}, "source_sha256": "a"}) != manifest.rows_identity({"inputs": {}})
    assert first == again != second
    assert manifest.rows_identity({"inputs": {"prepared_data": "0f", "source": "a"}}) == "0f"


def test_what_is_no_folder_of_a_stage_is_told_by_what_it_is(place: Path) -> None:
    for name, found in (
        ("model", "no manifest.json in it"),
        ("conversations.jsonl", "a file"),
        ("x", "no such folder"),
    ):
        with pytest.raises(UsageError) as refused:
            manifest.require_rows(place / name, "--data")
        assert refused.value.found == found


def test_a_killed_run_stays_in_the_history(place: Path) -> None:
    extract_module.extract(config(place))
    whole = manifest.require_rows(place / "states", "folder")
    kept = {name: whole[name] for name in ("model", "layers", "dtype", "row_limit", "inputs")}
    record = manifest.compose("extract", complete=False, **kept)
    folder = place / "other"
    folder.mkdir()
    assert [run_history.begin(folder, record), run_history.begin(folder, record)] == [0, 1]
    run_history.end(folder, "extract", 1, {"rows": 3}, complete=True)
    runs = manifest.require_rows(folder, "folder")["runs"]
    assert "ended" not in runs[0] and runs[1]["rows"] == 3


def test_what_a_killed_run_left_half_written_beside_the_rows_is_removed(place: Path) -> None:
    folder = place / "states"
    extract_module.extract(config(place, format="speculators-0.4"))
    record = manifest.require_rows(folder, "folder")
    manifest.write(folder, record | {"complete": False})
    for name in (".manifest.json.tmp-77", ".sample_lengths.json.tmp-77", ".data_2.pt.tmp-77"):
        (folder / name).write_text("half")
    (folder / "data_2.pt").unlink()
    extract_module.extract(config(place, format="speculators-0.4"))
    assert not [path.name for path in folder.iterdir() if ".tmp-" in path.name]
