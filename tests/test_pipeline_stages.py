"""The stages as a user meets them: what they write, what they refuse, how they go on after a kill."""

from __future__ import annotations

import errno
import gzip
import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from pipeline_fixtures import FakeEngine, write_conversations, write_model

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("safetensors")

from pipeline import extract as extract_module  # noqa: E402
from pipeline.__main__ import main, spread_lists  # noqa: E402
from pipeline.formats.hs_safetensors import read_row, row_path  # noqa: E402
from pipeline.formats.stores import FileStore  # noqa: E402
from shims.errors import SpecshimError  # noqa: E402


class Workplace:
    """A folder with a model and conversations, and the command line in it."""

    def __init__(self, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.root, self._capsys = root, capsys
        self.model = write_model(root / "model")
        self.conversations = write_conversations(root / "conversations.jsonl")
        self.prepared = root / "prepared"
        self.data = self.prepared / "tokenized_data.jsonl"
        self.states = root / "states"

    def run(self, *arguments: object) -> tuple[int, str]:
        """Exit code and everything on stderr."""
        self._capsys.readouterr()
        with pytest.raises(SystemExit) as caught:
            main([str(argument) for argument in arguments])
        code = caught.value.code
        return (code if isinstance(code, int) else 0), self._capsys.readouterr().err

    def prepare(self, **flags: object) -> tuple[int, str]:
        options = {"model_path": self.model, "input": self.conversations, "output_dir": self.prepared} | flags
        return self.run("prepare", *_flags(options))

    def extract(self, **flags: object) -> tuple[int, str]:
        options = {
            "model_path": self.model,
            "prepared_data": self.data,
            "output_dir": self.states,
            "batch_size": 2,
            "engine": "stock",
        } | flags
        return self.run("extract", *_flags(options))

    def rows(self) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in (self.states / "hidden_states").iterdir()}


def _flags(options: dict[str, Any]) -> list[object]:
    flags: list[object] = []
    for name, value in options.items():
        flag = "--" + name.replace("_", "-")
        flags += [flag] if value is True else [flag, *(value if isinstance(value, list) else [value])]
    return flags


@pytest.fixture
def place(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Workplace:
    return Workplace(tmp_path, capsys)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Puts the fake engine in place; the dict holds its settings and, afterwards, itself."""
    state: dict[str, Any] = {"fail_at": None, "spoil": None, "made": []}

    def open_engine(name: str, options: Any) -> FakeEngine:
        state["made"].append(FakeEngine(options, state["fail_at"], state["spoil"]))
        return state["made"][-1]

    monkeypatch.setattr(extract_module, "open_engine", open_engine)
    return state


def assert_four_parts(message: str, *words: str) -> None:
    for part in ("wanted:", "found:", "next:", *words):
        assert part in message, message


# prepare and vocab


def test_prepare_writes_rows_counts_and_a_manifest(place: Workplace) -> None:
    assert place.prepare()[0] == 0
    rows = [json.loads(line) for line in place.data.read_text().splitlines()]
    assert [row["id"] for row in rows] == ["m0", "s1", "m2", "s3", "m4", "s5"]
    assert all(len(row["input_ids"]) == len(row["loss_mask"]) and any(row["loss_mask"]) for row in rows)
    frequency = torch.load(place.prepared / "token_freq.pt", weights_only=True)
    assert sum(frequency.values()) == sum(sum(row["loss_mask"]) for row in rows)
    record = json.loads((place.prepared / "manifest.json").read_text())
    assert (record["stage"], record["counts"]["rows"], record["max_seq_len"]) == ("prepare", 6, 2048)
    assert json.loads((place.prepared / "metadata.json").read_text())["rows"] == 6


def test_prepare_again_gives_the_same_bytes(place: Workplace) -> None:
    place.prepare()
    before = place.data.read_bytes()
    assert place.prepare()[0] == 0
    assert place.data.read_bytes() == before


@pytest.mark.parametrize("line", ["{", '{"messages": []}', '{"conversations": [{"from": "wizard", "value": "x"}]}'])
def test_a_bad_line_is_named_and_nothing_is_written(place: Workplace, line: str) -> None:
    with place.conversations.open("a") as handle:
        handle.write(line + "\n")
    code, message = place.prepare()
    assert code == 2
    assert_four_parts(message, f"{place.conversations}:7")
    assert not place.prepared.exists()


def test_a_bad_line_leaves_earlier_data_alone(place: Workplace) -> None:
    place.prepare()
    before = {path.name: path.read_bytes() for path in place.prepared.iterdir() if path.name != ".lock"}
    place.conversations.write_text(place.conversations.read_text() + "{\n")
    assert place.prepare()[0] == 2
    assert {path.name: path.read_bytes() for path in place.prepared.iterdir() if path.name != ".lock"} == before


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (lambda text: text.encode("utf-16"), "UTF-16 text"),
        (lambda text: gzip.compress(text.encode()), "a gzip file"),
        (lambda text: b"\xff" * 20, "not UTF-8"),
        (lambda text: b"", "no line with text"),
        (lambda text: json.dumps([json.loads(line) for line in text.splitlines()]).encode(), "found:  a list"),
        (lambda text: b'{"messages": null}', "`messages` is null"),
    ],
    ids=["utf-16", "gzip", "binary", "empty", "one list", "null"],
)
def test_a_file_of_another_kind_is_told_by_what_it_is(place: Workplace, content: Any, words: str) -> None:
    place.conversations.write_bytes(content(place.conversations.read_text()))
    code, message = place.prepare()
    assert code == 2
    assert_four_parts(message, str(place.conversations), words)
    assert not place.prepared.exists()


def test_what_other_editors_write_is_read(place: Workplace) -> None:
    place.prepare()
    plain = place.data.read_bytes()
    text = "\ufeff\n\n" + place.conversations.read_text().replace("\n", "\r\n")
    place.conversations.write_text(text.replace("\ufeff\n\n", "\ufeff", 1), encoding="utf-8")
    assert place.prepare(output_dir=place.root / "again")[0] == 0
    assert (place.root / "again" / "tokenized_data.jsonl").read_bytes() == plain


def test_prepare_killed_before_its_rows_are_named_goes_on(place: Workplace, monkeypatch: pytest.MonkeyPatch) -> None:
    place.prepare(output_dir=place.root / "undisturbed")
    undisturbed = (place.root / "undisturbed" / "tokenized_data.jsonl").read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", _replace_but_not("tokenized_data.jsonl"))
        assert place.prepare()[0] == 1
    assert not place.data.exists()
    assert place.prepare()[0] == 0
    assert place.data.read_bytes() == undisturbed


def _replace_but_not(name: str) -> Any:
    replace = Path.replace

    def instead(self: Path, target: Path) -> Path:
        if target.name == name:
            raise RuntimeError("killed")
        return replace(self, target)

    return instead


@pytest.mark.parametrize("place_of_it", ["file", "file/below", "/proc/below"])
def test_an_output_folder_that_cannot_be_is_a_wrong_request(place: Workplace, place_of_it: str) -> None:
    (place.root / "file").write_text("something")
    code, message = place.prepare(output_dir=place.root / place_of_it)
    assert code == 2
    assert_four_parts(message, "--output-dir", place_of_it)
    assert (place.root / "file").read_text() == "something"


def test_skip_bad_counts_and_lists(place: Workplace) -> None:
    place.conversations.write_text("{\n" + place.conversations.read_text())
    code, message = place.prepare(skip_bad=True)
    assert code == 0 and f"{place.conversations}:1" in message
    assert json.loads((place.prepared / "metadata.json").read_text())["skipped_rows"] == 1


def test_a_row_cut_before_its_first_trainable_token_is_refused(place: Workplace) -> None:
    code, message = place.prepare(max_seq_len=10)
    assert code == 2
    assert_four_parts(message, f"{place.conversations}:1", "first 10 tokens")


def test_prepared_data_of_other_settings_is_not_overwritten(place: Workplace) -> None:
    place.prepare()
    code, message = place.prepare(max_seq_len=64)
    assert code == 2
    assert_four_parts(message, "max_seq_len = 64", "max_seq_len = 2048")


@pytest.mark.parametrize("flags", [{"model_path": "/nowhere"}, {"input": "/nowhere.jsonl"}])
def test_a_path_that_does_not_exist_is_named(place: Workplace, flags: dict[str, str]) -> None:
    code, message = place.prepare(**flags)
    assert code == 2
    assert_four_parts(message, *flags.values())


def test_vocab_writes_a_consistent_mapping_and_refuses_too_many(place: Workplace) -> None:
    place.prepare()
    assert place.run("vocab", "--prepared", place.prepared, "--draft-vocab-size", 100)[0] == 0
    code, message = place.run("vocab", "--prepared", place.prepared, "--draft-vocab-size", 301)
    assert code == 2
    assert_four_parts(message, "1 to 300", "301")
    code, message = place.run("vocab", "--prepared", place.prepared, "--draft-vocab-size", 1)
    assert code == 2
    assert_four_parts(message, "2 special tokens for a draft vocabulary of 1")


# extract


def test_extract_stores_every_row_with_its_own_states(place: Workplace, engine: dict[str, Any]) -> None:
    place.prepare()
    assert place.extract(layer_ids=[7, 1, 3, 4])[0] == 0
    rows = [json.loads(line) for line in place.data.read_text().splitlines()]
    for index, row in enumerate(rows):
        stored = read_row(row_path(place.states, index))
        assert stored.row_id == row["id"]
        assert (stored.token_ids.tolist(), stored.loss_mask.tolist()) == (row["input_ids"], row["loss_mask"])
        assert stored.states[:, 0, 0].tolist() == [token + 2000.0 for token in row["input_ids"]]
        assert stored.states.shape == (len(row["input_ids"]), 4, 4)
    record = json.loads((place.states / "manifest.json").read_text())
    assert record["layers"] == {"ids": [1, 3, 4, 7], "convention": "after", "native": [2, 4, 5, 8]}
    assert record["complete"] and record["counts"]["rows"] == 6
    assert place.run("verify", place.states, "--structure")[0] == 0


def test_native_ids_ask_for_the_same_states(place: Workplace, engine: dict[str, Any]) -> None:
    place.prepare()
    place.extract(layer_ids=[2, 4, 5, 8], layer_convention="native")
    assert read_row(row_path(place.states, 0)).states[0, :, 0].diff().tolist() == [2000.0, 1000.0, 3000.0]


def test_a_killed_run_goes_on_and_equals_an_undisturbed_one(place: Workplace, engine: dict[str, Any]) -> None:
    place.prepare()
    place.extract()
    undisturbed = place.rows()
    for path in (place.states / "hidden_states").iterdir():
        path.unlink()
    engine["fail_at"] = 3
    code, message = place.extract()
    assert code == 1
    assert_four_parts(message, "TimeoutError", "no message", "Traceback")
    (place.states / "hidden_states" / ".hs_5.safetensors.tmp-1").write_bytes(b"half")
    kept = row_path(place.states, 0)
    damaged = row_path(place.states, 1)
    before = kept.stat().st_mtime_ns
    damaged.write_bytes(damaged.read_bytes()[:-5])
    engine["fail_at"] = None
    assert place.extract()[0] == 0
    assert place.rows() == undisturbed
    assert kept.stat().st_mtime_ns == before
    assert engine["made"][-1].rows_computed == 5
    place.extract()
    assert len(engine["made"]) == 3, "a finished folder loads no model"


def test_rows_longer_than_the_limit_are_stated_and_cut_alike(place: Workplace, engine: dict[str, Any]) -> None:
    place.prepare()
    code, message = place.extract(max_seq_len=50)
    assert code == 0 and "longer than 50 tokens" in message
    stored = read_row(row_path(place.states, 0))
    assert len(stored.token_ids) == len(stored.loss_mask) == len(stored.states) == 50


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"layer_ids": [1, 2, 3, 8]}, ["--layer-ids", "0 to 7", "8"]),
        ({"layer_ids": [-1]}, ["--layer-ids", "-1"]),
        ({"layer_ids": [0, 3], "layer_convention": "native"}, ["native 0"]),
        ({"batch_size": 0}, ["--batch-size"]),
        ({"gpu_memory_utilization": 1.5}, ["--gpu-memory-utilization"]),
        ({"dtype": "int8"}, ["--dtype"]),
        ({"engine": "magic"}, ["--engine"]),
        ({"model_path": "/nowhere"}, ["/nowhere"]),
        ({"prepared_data": "/nowhere.jsonl"}, ["/nowhere.jsonl"]),
    ],
)
def test_a_wrong_option_is_refused_before_anything_loads(
    place: Workplace, engine: dict[str, Any], flags: dict[str, Any], words: list[str]
) -> None:
    place.prepare()
    code, message = place.extract(**flags)
    assert code == 2
    assert_four_parts(message, *words)
    assert not place.states.exists() and not engine["made"]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"id": "x", "input_ids": [1, 300], "loss_mask": [0, 1]}', "token id 300"),
        ('{"id": "x", "input_ids": [1, -1], "loss_mask": [0, 1]}', "token id -1"),
        ('{"id": "x", "input_ids": [1, 2], "loss_mask": [1]}', "2 and 1"),
        ('{"id": "x", "input_ids": [], "loss_mask": []}', "empty"),
        ('{"id": "x", "input_ids": [1, true], "loss_mask": [0, 1]}', "true in it"),
        ('{"id": "x"}', "input_ids"),
        ("{", "malformed JSON"),
        ('{"input_ids": [1], "input_ids": [2], "loss_mask": [1]}', "'input_ids' twice"),
    ],
)
def test_a_wrong_prepared_line_is_named(place: Workplace, engine: dict[str, Any], line: str, words: str) -> None:
    place.prepare()
    with place.data.open("a") as handle:
        handle.write(line + "\n")
    code, message = place.extract()
    assert code == 2
    assert_four_parts(message, f"{place.data}:7", words)


def test_prepared_data_cut_between_two_lines_is_refused(place: Workplace, engine: dict[str, Any]) -> None:
    place.prepare()
    place.data.write_text("".join(place.data.read_text().splitlines(keepends=True)[:-1]))
    code, message = place.extract()
    assert code == 2
    assert_four_parts(message, str(place.data), "changed or cut")
    assert not engine["made"]


def test_another_models_folder_is_refused_and_untouched(
    place: Workplace, engine: dict[str, Any], tmp_path: Path
) -> None:
    place.prepare()
    place.extract()
    before = place.rows()
    other = write_model(tmp_path / "other", seed="b")
    place.run("prepare", "--model-path", other, "--input", place.conversations, "--output-dir", tmp_path / "p2")
    code, message = place.extract(model_path=other, prepared_data=tmp_path / "p2" / "tokenized_data.jsonl")
    assert code == 2
    assert_four_parts(message, "model.fingerprint")
    code, message = place.extract(layer_ids=[1, 2, 3, 7])
    assert code == 2
    assert_four_parts(message, "layers")
    assert place.rows() == before


def test_a_stack_that_cannot_do_it_leaves_no_folder(place: Workplace, monkeypatch: pytest.MonkeyPatch) -> None:
    place.prepare()

    def refuse(_name: str, _options: Any) -> Any:
        raise SpecshimError("stack", "one with a generator", "none", "install it")

    monkeypatch.setattr(extract_module, "open_engine", refuse)
    assert place.extract()[0] == 1
    assert not place.states.exists()


def test_a_file_in_the_place_of_the_rows_is_refused(place: Workplace, engine: dict[str, Any]) -> None:
    place.prepare()
    place.states.mkdir()
    (place.states / "hidden_states").write_text("something")
    code, message = place.extract()
    assert code == 2
    assert_four_parts(message, "hidden_states", "a file")
    assert not engine["made"]


def test_a_full_disk_is_said_without_a_traceback(
    place: Workplace, engine: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    place.prepare()
    write = FileStore.write

    def full(self: FileStore, index: int, *arguments: Any) -> int:
        if index == 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(self, index, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(FileStore, "write", full)
        code, message = place.extract()
    assert code == 1 and "Traceback" not in message
    assert_four_parts(message, "No space left on device", "same command")
    assert len(place.rows()) == 3
    assert place.extract()[0] == 0 and len(place.rows()) == 6


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_closes_the_engine_and_gives_its_own_exit_code(
    place: Workplace, engine: dict[str, Any], number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.prepare()
    closed = []
    monkeypatch.setattr(FakeEngine, "close", lambda self: closed.append(self))
    # A job that a shell put in the background ignores SIGINT, and so does what it starts.
    given = signal.signal(number, signal.default_int_handler)
    try:
        engine["spoil"] = lambda states: os.kill(os.getpid(), number)
        code, message = place.extract()
        assert code == 128 + number and number.name in message
        assert closed == engine["made"] and signal.getsignal(number) is signal.default_int_handler
    finally:
        signal.signal(number, given)
    engine["spoil"] = None
    assert place.extract()[0] == 0


def test_data_prepared_for_another_model_is_refused(place: Workplace, engine: dict[str, Any], tmp_path: Path) -> None:
    place.prepare()
    code, message = place.extract(model_path=write_model(tmp_path / "other", seed="b"))
    assert code == 2
    assert_four_parts(message, "model.fingerprint")


def test_weights_that_are_not_there_are_named_before_anything_loads(place: Workplace, engine: dict[str, Any]) -> None:
    place.prepare()
    index = place.model / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}))
    code, message = place.extract()
    assert code == 2
    assert_four_parts(message, str(place.model), "model-2.safetensors")
    index.unlink()
    (place.model / "model.safetensors").unlink()
    code, message = place.extract()
    assert code == 2
    assert_four_parts(message, "no file of weights")
    header = b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'
    (place.model / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(7))
    code, message = place.extract()
    assert code == 2
    assert_four_parts(message, "the end of model.safetensors")
    (place.model / "model.safetensors").write_text(
        "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
    )
    code, message = place.extract()
    assert code == 2
    assert_four_parts(message, "Git LFS", "model.safetensors", "git lfs pull")
    assert not place.states.exists() and not engine["made"]


def test_two_sets_of_weights_in_one_folder_are_named(place: Workplace, engine: dict[str, Any]) -> None:
    place.prepare()
    shard = "model-00001-of-00001.safetensors"
    shutil.copy(place.model / "model.safetensors", place.model / shard)
    index = place.model / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": shard}}))
    code, message = place.extract()
    assert code == 2
    assert_four_parts(message, str(place.model), shard, "and model.safetensors", "which transformers reads")
    assert not place.states.exists() and not engine["made"]
    (place.model / shard).unlink()
    index.write_text(json.dumps({"weight_map": {"a": "model.safetensors"}}))
    place.prepare(output_dir=place.root / "again")
    assert place.extract(prepared_data=place.root / "again" / "tokenized_data.jsonl")[0] == 0


@pytest.mark.parametrize("name", ["sub/model-2.safetensors", "../outside.safetensors", "/model.safetensors", "..", ""])
def test_an_index_that_names_other_folders_is_refused(place: Workplace, engine: dict[str, Any], name: str) -> None:
    place.prepare()
    for path in (place.model / "sub" / "model-2.safetensors", place.model.parent / "outside.safetensors"):
        path.parent.mkdir(exist_ok=True)
        shutil.copy(place.model / "model.safetensors", path)
    index = place.model / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model.safetensors", "b": name}}))
    code, message = place.extract()
    assert code == 2
    assert_four_parts(message, "model.safetensors.index.json", "in its own folder", name)
    assert not place.states.exists() and not engine["made"]


@pytest.mark.parametrize("weight_map", [None, ["a"], "a"])
def test_an_index_that_names_no_files_is_refused(place: Workplace, engine: dict[str, Any], weight_map: Any) -> None:
    place.prepare()
    (place.model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    code, message = place.extract()
    assert code == 2
    assert_four_parts(message, "weight_map")


@pytest.mark.parametrize("value", [None, "8", True, 0, 8.0])
def test_a_config_without_the_numbers_needed_is_named(place: Workplace, engine: dict[str, Any], value: Any) -> None:
    place.prepare()
    config = json.loads((place.model / "config.json").read_text()) | {"num_hidden_layers": value}
    (place.model / "config.json").write_text(json.dumps(config))
    code, message = place.extract()
    assert code == 2
    assert_four_parts(message, "config.json", "num_hidden_layers", json.dumps(value))


def test_a_model_with_code_of_its_own_needs_permission(place: Workplace, engine: dict[str, Any]) -> None:
    place.prepare()
    config = json.loads((place.model / "config.json").read_text()) | {"auto_map": {"AutoConfig": "evil.Config"}}
    (place.model / "config.json").write_text(json.dumps(config))
    code, message = place.extract()
    assert code == 2
    assert_four_parts(message, "auto_map", "--trust-remote-code")


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda states: states[:-1], "tokens, wanted"),
        (lambda states: states * float("nan"), "not finite"),
        (lambda states: states * 0, "all zero"),
    ],
    ids=["short", "nan", "zero"],
)
def test_impossible_states_stop_the_run_and_name_the_row(
    place: Workplace, engine: dict[str, Any], spoil: Any, words: str
) -> None:
    place.prepare()
    engine["spoil"] = spoil
    code, message = place.extract()
    assert code == 1
    assert_four_parts(message, "row 0 (id m0)", words)
    assert place.rows() == {}


def test_a_folder_in_use_is_refused(place: Workplace, engine: dict[str, Any]) -> None:
    from pipeline.lock import exclusive

    place.prepare()
    with exclusive(place.states):
        code, message = place.extract()
    assert code == 2
    assert_four_parts(message, str(place.states), "lock")


# verify


def test_a_manifest_that_lacks_its_fields_is_no_manifest(place: Workplace, engine: dict[str, Any]) -> None:
    place.prepare()
    place.extract()
    (place.states / "manifest.json").write_text('{"stage": "extract", "schema": 1}')
    code, message = place.run("verify", place.states, "--structure")
    assert code == 2
    assert_four_parts(message, "manifest.json", "no model, layers")


def test_structural_damage_is_listed(place: Workplace, engine: dict[str, Any]) -> None:
    place.prepare()
    place.extract()
    row_path(place.states, 1).unlink()
    row_path(place.states, 2).write_bytes(row_path(place.states, 3).read_bytes()[:-1])
    row_path(place.states, 4).write_bytes(row_path(place.states, 5).read_bytes())
    data = [json.loads(line) for line in place.data.read_text().splitlines()]
    data[5]["input_ids"][0] += 1
    place.data.write_text("".join(json.dumps(row) + "\n" for row in data))
    code, message = place.run("verify", place.states, "--structure", "--prepared-data", place.data)
    assert code == 1
    assert "hs_1.safetensors: missing" in message and "hs_2.safetensors" in message
    assert "hs_4.safetensors: metadata row is '5', not '4'" in message
    assert "hs_5.safetensors: other token ids" in message


# train


@pytest.mark.parametrize(
    ("layers", "words"),
    [([1, 3, 7], "3 layers"), ([1, 2, 3, 4], "last of 8 layers")],
)
def test_train_refuses_states_a_draft_cannot_use(
    place: Workplace, engine: dict[str, Any], layers: list[int], words: str
) -> None:
    place.prepare()
    place.run("vocab", "--prepared", place.prepared, "--draft-vocab-size", 100)
    place.extract(layer_ids=layers)
    code, message = place.run(
        "train",
        "--data",
        place.states,
        "--vocab",
        place.prepared,
        "--model",
        place.model,
        "--output-dir",
        place.root / "t",
    )
    assert code == 2
    assert_four_parts(message, words)


def test_train_refuses_another_models_vocabulary(place: Workplace, engine: dict[str, Any], tmp_path: Path) -> None:
    place.prepare()
    place.extract()
    other, prepared = write_model(tmp_path / "other", seed="b"), tmp_path / "p2"
    place.run("prepare", "--model-path", other, "--input", place.conversations, "--output-dir", prepared)
    place.run("vocab", "--prepared", prepared, "--draft-vocab-size", 100)
    code, message = place.run(
        "train", "--data", place.states, "--vocab", prepared, "--model", place.model, "--output-dir", place.root / "t"
    )
    assert code == 2
    assert_four_parts(message, "model.fingerprint")


# command line


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["extract", "--layer-ids", "1", "two"], ["--layer-ids", "'two'"]),
        (["extract", "--layer-ids", "--model-path", "m"], ["--layer-ids", "nothing"]),
        (["prepare", "--model-path", "m", "--output-dir", ""], ["--output-dir", "an empty text"]),
        (["prepare", "--model-path="], ["--model-path", "an empty text"]),
    ],
)
def test_an_argument_without_a_value_is_refused(place: Workplace, arguments: list[str], words: list[str]) -> None:
    code, message = place.run(*arguments)
    assert code == 2
    assert_four_parts(message, *words)


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert not caught.value.code
    assert capsys.readouterr().out.startswith("specshim ")


STAGES = ["prepare", "vocab", "extract", "convert", "regenerate", "verify", "train", "report", "plan"]


@pytest.mark.parametrize("stage", ["", *STAGES])
def test_help_fits_in_100_columns_and_cuts_nothing_off(
    stage: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit):
        main([*([stage] if stage else []), "--help"])
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 100
    assert not [line for line in lines if line.endswith("...") and not line.startswith("Usage:")]


def test_a_list_option_takes_all_its_numbers() -> None:
    given = ["extract", "--layer-ids", "2", "30", "58,60", "--tp-size", "1"]
    assert spread_lists(given) == ["extract", *[f"--layer-ids={i}" for i in (2, 30, 58, 60)], "--tp-size", "1"]
    assert spread_lists(["--layer-ids=-1", "3"]) == ["--layer-ids=-1", "--layer-ids=3"]


def test_an_unexpected_error_is_never_silent(place: Workplace, monkeypatch: pytest.MonkeyPatch) -> None:
    import pipeline.prepare

    def fail(_config: object) -> None:
        raise AssertionError

    monkeypatch.setattr(pipeline.prepare, "prepare", fail)
    code, message = place.prepare()
    assert code == 1
    assert "Traceback" in message and "AssertionError: no message" in message
