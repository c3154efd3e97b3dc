"""What was read is not read again, and never taken for something else."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from contract_tests import kept
from contract_tests.kept import keep_reading, kept_reading, same_as_recorded
from contract_tests.readers.found import Reading
from contract_tests.recorded import recorded
from contract_tests.served import Served, wheel
from contract_tests.snapshot import read_release
from contract_tests.sources import Settings, open_release, release
from contract_tests.stub import stub_files

_RELEASE = "0.33.0"
_WHEEL = f"vllm-{_RELEASE}-py3-none-any.whl"


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    served = Served()
    monkeypatch.setattr(release, "_pages", {})
    served.files[_WHEEL] = wheel(stub_files(recorded(_RELEASE)))
    yield served
    served.close()


@pytest.fixture
def settings(index: Served, tmp_path: Path) -> Settings:
    return Settings(index.url, tmp_path / "cache", timeout=60)


@pytest.fixture
def reading(settings: Settings) -> Reading:
    return read_release("vllm", _RELEASE, settings)


def _record(monkeypatch: pytest.MonkeyPatch, snapshot: Reading) -> None:
    monkeypatch.setattr(kept, "recorded", lambda release: snapshot)


def test_a_release_is_parsed_once(reading: Reading, index: Served, settings: Settings) -> None:
    answers = index.answers
    assert read_release("vllm", _RELEASE, settings) == reading
    assert index.answers == answers
    assert kept_reading(open_release("vllm", _RELEASE, replace(settings, offline=True))) == reading


def test_other_questions_are_asked_anew(reading: Reading, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = open_release("vllm", _RELEASE, settings)
    assert kept_reading(tree) is not None
    monkeypatch.setattr(kept, "homes_in", lambda package: ("vllm.v1.request:Request",))
    kept._asked.cache_clear()
    try:
        assert kept_reading(tree) is None
        keep_reading(tree, reading)
        assert kept_reading(tree) == reading
    finally:
        kept._asked.cache_clear()


def test_a_release_with_the_recorded_hashes_is_as_recorded(
    reading: Reading, index: Served, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    _record(monkeypatch, reading)
    tree = open_release("vllm", _RELEASE, settings)
    assert same_as_recorded(tree)
    answers = index.answers
    assert same_as_recorded(open_release("vllm", _RELEASE, replace(settings, offline=True)))
    assert index.answers == answers


@pytest.mark.parametrize("what", ["content", "file", "distribution", "names"])
def test_a_release_with_anything_else_is_not(
    what: str, reading: Reading, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = "vllm/v1/request.py"
    assert path in reading.files
    changed = {
        "content": replace(reading, files={**reading.files, path: "0" * 64}),
        "file": replace(reading, files={**reading.files, "vllm/gone.py": "0" * 64}),
        "distribution": replace(reading, distribution="another.whl"),
        "names": replace(reading, found=dict(list(reading.found.items())[:-1])),
    }
    _record(monkeypatch, changed[what])
    assert not same_as_recorded(open_release("vllm", _RELEASE, settings))


def test_the_same_version_with_other_content_is_read_for_what_it_is(settings: Settings) -> None:
    """A mirror may serve its own build under a known number: the real snapshot does not vouch for it."""
    assert not same_as_recorded(open_release("vllm", _RELEASE, settings))
