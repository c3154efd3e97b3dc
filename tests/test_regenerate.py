"""Conversations in the model's own words: every question asked once, in order, through kills."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from pipeline_fixtures import write_model

pytest.importorskip("torch")
pytest.importorskip("transformers")

from pipeline import regenerate as module
from pipeline.__main__ import main
from pipeline.config import PrepareConfig, RegenerateConfig
from pipeline.prepare import prepare
from pipeline.regenerate import hash_seed, regenerate
from pipeline.speaker import Reply
from shims.errors import UsageError


class Echo:
    """Answers with what it was asked and its seed, so that a reply tells where it belongs."""

    def __init__(self, fail_after: int | None = None) -> None:
        self.asked: list[str] = []
        self._fail_after = fail_after

    def replies(self, conversations: Sequence[Sequence[dict[str, Any]]], seeds: Sequence[int]) -> list[Reply | None]:
        if self._fail_after is not None and len(self.asked) >= self._fail_after:
            raise RuntimeError("killed")
        found: list[Reply | None] = []
        for conversation, seed in zip(conversations, seeds, strict=True):
            question = conversation[-1]["content"]
            self.asked.append(question)
            text = "" if "silence" in question else f"{question} {len(conversation)} {seed}"
            found.append(None if "long" in question else Reply(text, "length" if "cut" in question else "stop"))
        return found


def turns(*questions: str, system: str | None = None) -> list[dict[str, str]]:
    messages = [{"role": "system", "content": system}] if system else []
    for question in questions:
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": "not its own words"}]
    return messages


@pytest.fixture
def place(tmp_path: Path) -> Path:
    write_model(tmp_path / "model")
    rows: list[dict[str, Any]] = [
        {"id": f"r{n}", "messages": turns(f"{n}a", f"{n}b", system="Be kind." if n % 2 else None)} for n in range(7)
    ]
    rows.append({"id": "only a question", "messages": [{"role": "user", "content": "7a"}]})
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def run(place: Path, monkeypatch: pytest.MonkeyPatch, speaker: Echo, out: str = "out", **more: Any) -> Any:
    monkeypatch.setattr(module, "open_speaker", lambda *arguments: speaker)
    config = RegenerateConfig(str(place / "model"), place / "in.jsonl", place / out, **({"batch_size": 3} | more))
    return regenerate(config)


def test_each_turn_is_asked_after_the_models_own_earlier_replies(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = run(place, monkeypatch, Echo())
    rows = [json.loads(line) for line in (place / "out" / "conversations.jsonl").read_text().splitlines()]
    assert [row["id"] for row in rows] == [*(f"r{n}" for n in range(7)), "only a question"]
    assert [m["content"] for m in rows[1]["messages"]] == [
        "Be kind.", "1a", f"1a 2 {hash_seed(0, 1, 0)}", "1b", f"1b 4 {hash_seed(0, 1, 1)}",
    ]  # fmt: skip
    assert (result.conversations, result.replies, result.kept) == (8, 15, 0)
    assert prepare(PrepareConfig(str(place / "model"), place / "out" / "conversations.jsonl", place / "p")).rows == 8


def test_a_killed_run_goes_on_and_equals_an_undisturbed_one(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(place, monkeypatch, Echo(), "whole")
    with pytest.raises(RuntimeError, match="killed"):
        run(place, monkeypatch, Echo(fail_after=9))
    part = place / "out" / "conversations.jsonl.part"
    assert len(part.read_text().splitlines()) == 3 and not (place / "out" / "conversations.jsonl").exists()
    with part.open("a") as handle:
        handle.write('{"row": 3, "id": "r3", "messa')
    speaker = Echo()
    result = run(place, monkeypatch, speaker)
    assert result.kept == 3 and speaker.asked[0] == "3a" and len(speaker.asked) == 15 - 6
    names = ["conversations.jsonl"]
    assert [(place / "out" / n).read_bytes() for n in names] == [(place / "whole" / n).read_bytes() for n in names]
    idle = Echo()
    assert run(place, monkeypatch, idle).kept == 8 and not idle.asked


def test_a_run_killed_between_its_conversations_and_its_manifest_is_completed(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_given: Any, **_fields: Any) -> None:
        raise InterruptedError

    with monkeypatch.context() as patch:
        patch.setattr(module.run_history, "end", killed)
        with pytest.raises(InterruptedError):
            run(place, monkeypatch, Echo())
    manifest, conversations = place / "out" / "manifest.json", place / "out" / "conversations.jsonl"
    before = conversations.read_bytes()
    assert not json.loads(manifest.read_text())["complete"]
    idle = Echo()
    assert run(place, monkeypatch, idle).kept == 8 and not idle.asked
    record = json.loads(manifest.read_text())
    assert record["complete"] and record["counts"]["rows"] == 8 and conversations.read_bytes() == before
    assert not (place / "out" / "conversations.jsonl.part").exists()


def test_a_conversation_ends_before_a_question_without_an_answer(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [turns("a", "silence", "b"), turns("silence"), turns("cut"), turns("a", "too long")]
    (place / "in.jsonl").write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    result = run(place, monkeypatch, Echo())
    kept = [json.loads(line) for line in (place / "out" / "conversations.jsonl").read_text().splitlines()]
    assert [[m["content"][:1] for m in row["messages"]] for row in kept] == [["a", "a"], ["c", "c"], ["a", "a"]]
    assert (result.conversations, result.shortened, result.cut_replies) == (3, 3, 1)


def test_rows_with_tools_are_left_out_and_named(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = [*turns("a"), {"role": "tool", "content": "12:00"}]
    with (place / "in.jsonl").open("a") as handle:
        handle.write(json.dumps({"messages": tool}) + "\n")
    assert ["in.jsonl:9" in line for line in run(place, monkeypatch, Echo()).skipped] == [True]


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"temperature": -1.0}, "--temperature"),
        ({"top_p": 0.0}, "--top-p"),
        ({"batch_size": 0}, "--batch-size"),
        ({"seed": -1}, "--seed"),
        ({"seed": 1 << 32}, "--seed"),
    ],
)
def test_a_wrong_option_is_refused(
    place: Path, monkeypatch: pytest.MonkeyPatch, more: dict[str, Any], words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        run(place, monkeypatch, Echo(), **more)


def test_a_conversation_is_at_most_as_long_as_the_models_context(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The default is longer than that of many a small model, and vLLM refuses more than there is."""
    asked: list[int] = []
    echo = Echo()
    run(place, monkeypatch, echo)
    monkeypatch.setattr(module, "open_speaker", lambda config, *rest: asked.append(config.max_model_len) or echo)
    context = json.loads((place / "model" / "config.json").read_text())["max_position_embeddings"]
    regenerate(RegenerateConfig(str(place / "model"), place / "in.jsonl", place / "more", max_model_len=1 << 20))
    assert asked == [context]


def test_seeds_of_replies_fit_what_vllm_takes() -> None:
    assert hash_seed((1 << 32) - 1, 10**9, 100) < 1 << 63


def test_other_settings_are_not_mixed_into_a_folder(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(place, monkeypatch, Echo())
    with pytest.raises(UsageError, match=r"temperature = 0\.1"):
        run(place, monkeypatch, Echo(), temperature=0.1)


def test_the_command_line(place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(module, "open_speaker", lambda *arguments: Echo())
    given = ["--model-path", place / "model", "--input", place / "in.jsonl", "--output-dir", place / "out"]
    with pytest.raises(SystemExit) as ended:
        main(["regenerate", *map(str, given)])
    assert not ended.value.code and "8 conversations, 15 replies" in capsys.readouterr().out
