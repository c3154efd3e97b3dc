"""`prepare` on every kind of input, and what it leaves out, counts and says."""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path
from typing import Any

import pytest
from pipeline_fixtures import CHATML, write_conversations, write_model

pytest.importorskip("transformers")
datasets = pytest.importorskip("datasets")
pyarrow = pytest.importorskip("pyarrow")

from pyarrow import parquet  # noqa: E402

from pipeline.__main__ import main  # noqa: E402
from pipeline.config import PrepareConfig  # noqa: E402
from pipeline.conversation_files import ConversationFiles  # noqa: E402
from pipeline.prepare import Prepared, prepare  # noqa: E402
from pipeline.prepared import PreparedFile  # noqa: E402
from pipeline.row_preparation import Settings, Tokenized, prepare_rows  # noqa: E402
from pipeline.tokenizers import load_tokenizer  # noqa: E402
from shims.errors import SpecshimError, UsageError  # noqa: E402

ALTERNATES = (
    "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}" + CHATML.partition("{% for m in messages %}")[2]
)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model")


def rows(count: int = 6) -> list[dict[str, Any]]:
    return [
        {
            "id": f"r{number}",
            "messages": [
                {"role": "user", "content": f"what is {number}?"},
                {"role": "assistant", "content": f"it is {number}, of course" + "!" * number},
            ],
        }
        for number in range(count)
    ]


def write_jsonl(path: Path, content: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in content))
    return path


def run(model: Path, source: Path, out: str = "out", **more: Any) -> tuple[Prepared, list[dict[str, Any]]]:
    folder = source.parent / out
    result = prepare(PrepareConfig(str(model), source, folder, **more))
    return result, [json.loads(line) for line in (folder / "tokenized_data.jsonl").read_text().splitlines()]


# kinds of input


def test_every_kind_of_file_gives_the_same_rows(model: Path, tmp_path: Path) -> None:
    _, wanted = run(model, write_jsonl(tmp_path / "a.jsonl", rows()))
    table = pyarrow.Table.from_pylist(rows())
    parquet.write_table(table, tmp_path / "b.parquet")
    folder = tmp_path / "folder"
    folder.mkdir()
    parquet.write_table(table.slice(0, 4), folder / "1.parquet")
    write_jsonl(folder / "2.jsonl", rows()[4:])
    saved = datasets.Dataset.from_list(rows())
    saved.save_to_disk(str(tmp_path / "saved"))
    datasets.DatasetDict({"train": saved, "test": saved.select([0])}).save_to_disk(str(tmp_path / "splits"))
    assert run(model, tmp_path / "b.parquet", "b")[1] == wanted
    assert run(model, folder, "c")[1] == wanted
    assert run(model, tmp_path / "saved", "d")[1] == wanted
    assert run(model, tmp_path / "splits", "e", split="train")[1] == wanted
    assert run(model, tmp_path / "splits", "f", split="test")[1] == wanted[:1]


def test_a_tables_empty_fields_are_no_fields(model: Path, tmp_path: Path) -> None:
    content = rows(2)
    content[0]["messages"][0]["name"] = "someone"
    parquet.write_table(pyarrow.Table.from_pylist(content), tmp_path / "a.parquet")
    assert "name" in parquet.read_table(tmp_path / "a.parquet").to_pylist()[1]["messages"][0]
    _, found = run(model, tmp_path / "a.parquet")
    assert [row["id"] for row in found] == ["r0", "r1"]


def test_text_given_in_parts_is_joined(model: Path, tmp_path: Path) -> None:
    plain, parts = rows(1), rows(1)
    parts[0]["messages"][1]["content"] = [{"type": "text", "text": "it is 0,"}, {"type": "text", "text": " of course"}]
    assert (
        run(model, write_jsonl(tmp_path / "a.jsonl", parts), "a")[1]
        == run(model, write_jsonl(tmp_path / "b.jsonl", plain), "b")[1]
    )
    parts[0]["messages"][1]["content"] = [{"type": "image", "url": "x"}]
    with pytest.raises(UsageError, match="text content"):
        run(model, write_jsonl(tmp_path / "c.jsonl", parts), "c")


@pytest.mark.parametrize(
    ("make", "more", "words"),
    [
        (lambda root: root / "nothing", {}, "no such file"),
        (lambda root: (root / "empty").mkdir() or root / "empty", {}, "without .jsonl or .parquet"),
        (lambda root: _broken_parquet(root), {}, "Parquet file"),
        (lambda root: _splits(root), {}, "name the split"),
        (lambda root: _splits(root), {"split": "dev"}, "'dev'"),
        (lambda root: write_jsonl(root / "a.jsonl", rows()), {"split": "train"}, "--split"),
    ],
    ids=["absent", "empty folder", "broken parquet", "no split named", "unknown split", "split of a file"],
)
def test_an_input_that_cannot_be_read_is_named(
    model: Path, tmp_path: Path, make: Any, more: dict[str, Any], words: str
) -> None:
    with pytest.raises(UsageError) as caught:
        prepare(PrepareConfig(str(model), make(tmp_path), tmp_path / "out", **more))
    assert words in str(caught.value)


def _broken_parquet(root: Path) -> Path:
    parquet.write_table(pyarrow.Table.from_pylist(rows()), root / "a.parquet")
    (root / "a.parquet").write_bytes((root / "a.parquet").read_bytes()[:-100])
    return root / "a.parquet"


def _splits(root: Path) -> Path:
    saved = datasets.Dataset.from_list(rows())
    datasets.DatasetDict({"train": saved, "test": saved}).save_to_disk(str(root / "splits"))
    return root / "splits"


# several processes


def test_the_number_of_processes_changes_nothing(model: Path, tmp_path: Path) -> None:
    content: list[dict[str, Any]] = [*rows(90), {"id": "bad"}, *rows(3)]
    source = write_jsonl(tmp_path / "a.jsonl", content)
    alone, first = run(model, source, "one", skip_bad=True)
    several, second = run(model, source, "three", skip_bad=True, workers=3)
    assert first == second and alone.counts() == several.counts() and alone.skipped == several.skipped
    assert (tmp_path / "one" / "token_freq.pt").read_bytes() == (tmp_path / "three" / "token_freq.pt").read_bytes()


def test_a_bad_row_in_another_process_is_named_with_its_line(model: Path, tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", [*rows(40), {"id": "bad"}])
    with pytest.raises(UsageError, match=r"a\.jsonl:41"):
        run(model, source, workers=2)


def test_a_process_that_is_killed_ends_the_run_in_words(model: Path, tmp_path: Path) -> None:
    """It was waited for without end."""
    source = ConversationFiles(write_jsonl(tmp_path / "in.jsonl", rows(3000)))
    settings = Settings(str(model), False, vocab_size=300, max_seq_len=2048)
    prepared = prepare_rows(source.rows(), load_tokenizer(str(model), False), settings, 2)
    assert isinstance(next(prepared), Tokenized)
    for child in multiprocessing.active_children():
        child.kill()
    with pytest.raises(SpecshimError, match="fewer --workers"):
        list(prepared)


# left out and counted


def test_rows_that_the_template_refuses_are_skipped_counted_and_reported(tmp_path: Path) -> None:
    model = write_model(tmp_path / "strict", template=ALTERNATES)
    content = rows(4)
    content[2]["messages"].insert(0, {"role": "system", "content": "x"})
    result, found = run(model, write_jsonl(tmp_path / "a.jsonl", content))
    assert [row["id"] for row in found] == ["r0", "r1", "r3"]
    assert result.refused_by_template == 1 and "roles must alternate" in result.skipped[0]
    record = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert record["counts"]["refused_by_template"] == 1 and "a.jsonl:3" in record["skipped"][0]


def test_if_the_template_refuses_all_nothing_is_written(tmp_path: Path) -> None:
    model = write_model(tmp_path / "strict", template=ALTERNATES)
    content = [{"messages": [{"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}]}]
    with pytest.raises(UsageError, match="none usable"):
        run(model, write_jsonl(tmp_path / "a.jsonl", content))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("policy", ["drop", "keep", "refuse"])
def test_duplicates(model: Path, tmp_path: Path, policy: str) -> None:
    again = rows(3)[1] | {"id": "another id"}
    source = write_jsonl(tmp_path / "a.jsonl", [*rows(3), again])
    if policy == "refuse":
        with pytest.raises(UsageError, match=r"row 4 \(id another id\)"):
            run(model, source, duplicates=policy)
        return
    result, found = run(model, source, duplicates=policy)
    assert result.duplicate_rows == 1 and len(found) == (3 if policy == "drop" else 4)


def test_a_row_with_nothing_to_train_on_is_refused_or_counted(model: Path, tmp_path: Path) -> None:
    empty = {"id": "e", "messages": [{"role": "user", "content": "x" * 50}, {"role": "assistant", "content": "y"}]}
    source = write_jsonl(tmp_path / "a.jsonl", [*rows(2), empty])
    with pytest.raises(UsageError, match=r"a\.jsonl:3"):
        run(model, source, max_seq_len=50)
    result, _ = run(model, source, max_seq_len=50, skip_bad=True)
    assert result.counts()["skipped_rows"] == 1


def test_thinking_is_kept_or_masked_and_the_files_say_which(model: Path, tmp_path: Path) -> None:
    content = rows(1)
    content[0]["messages"][1]["content"] = "<think>hm</think>Yes."
    source = write_jsonl(tmp_path / "a.jsonl", content)
    kept, with_thinking = run(model, source, "kept")
    masked, without = run(model, source, "masked", thinking="mask")
    assert with_thinking[0]["input_ids"] == without[0]["input_ids"]
    assert sum(with_thinking[0]["loss_mask"]) - sum(without[0]["loss_mask"]) == len("<think>hm</think>")
    assert (kept.thinking_turns, masked.thinking_turns) == (0, 1)
    assert "not trained on" in json.loads((tmp_path / "masked" / "metadata.json").read_text())["mask"]
    assert json.loads((tmp_path / "masked" / "manifest.json").read_text())["thinking"] == "mask"
    with pytest.raises(UsageError, match="thinking"):
        run(model, source, "masked")
    with pytest.raises(UsageError, match=r'thinking_end = "</end>"'):
        run(model, source, "masked", thinking="mask", thinking_end="</end>")


def test_a_file_that_takes_the_place_of_an_open_one_is_not_read(model: Path, tmp_path: Path) -> None:
    """Another `prepare` into the folder, while `extract` runs: half of the rows would have the new masks."""
    run(model, write_jsonl(tmp_path / "a.jsonl", rows(3)))
    run(model, write_jsonl(tmp_path / "b.jsonl", rows(9)[6:]), "other")
    path = tmp_path / "out" / "tokenized_data.jsonl"
    data = PreparedFile(path, None)
    first = [data[index] for index in range(3)]
    (tmp_path / "other" / "tokenized_data.jsonl").replace(path)
    assert [data[index] for index in range(3)] == first
    assert [PreparedFile(path, None)[index] for index in range(3)] != first
    with pytest.raises(UsageError, match="as it was when this run began"):
        PreparedFile(path, None, checked=True, sha256=data.sha256)


def test_a_broken_chat_template_is_the_models_fault_not_line_ones(tmp_path: Path) -> None:
    model = write_model(tmp_path / "broken", template="{% for m in messages %}{{ m['content'] }")
    with pytest.raises(UsageError, match="valid Jinja template") as caught:
        run(model, write_conversations(tmp_path / "a.jsonl"))
    assert "chat template" in caught.value.where and "a.jsonl" not in str(caught.value)


def test_special_tokens_are_recorded_for_the_vocabulary(model: Path, tmp_path: Path) -> None:
    run(model, write_jsonl(tmp_path / "a.jsonl", rows()))
    assert json.loads((tmp_path / "out" / "manifest.json").read_text())["special_token_ids"] == [256, 257]


# preview


def test_a_preview_marks_what_is_trained_on_and_writes_nothing(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = rows(3)
    content[1] = {"id": "bad"}
    source = write_jsonl(tmp_path / "a.jsonl", content)
    arguments = ["--model-path", model, "--input", source, "--output-dir", tmp_path / "out", "--preview", 2]
    with pytest.raises(SystemExit) as ended:
        main(["prepare", *map(str, arguments)])
    assert not ended.value.code
    shown = capsys.readouterr().out
    assert "assistant\n[[it is 0, of course<|im_end|>]]" in shown and "a.jsonl:2" in shown and "r2" not in shown
    with pytest.raises(SystemExit) as ended:
        main(["prepare", *map(str, arguments[:-1]), "-1"])
    assert ended.value.code == 2 and "--preview" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
