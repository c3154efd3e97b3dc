"""The checkers themselves: a change made on purpose is reported, with what helps to mend it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from contract_tests import check
from contract_tests.check import Broken, broken
from contract_tests.judge import judge, judge_release, last_that_held
from contract_tests.readers.found import ABSENT, FOUND, OPAQUE, UNREAD, Found, Reading
from contract_tests.readers.library import Library
from contract_tests.recorded import OTHERS, recorded, recorded_others
from contract_tests.snapshot import read_tree
from contract_tests.sources import FolderTree, SourceTree
from contract_tests.strict import idle_rows
from shims import adaptations, planning
from shims.adaptations import ADAPTATIONS, Adaptation
from shims.contract import Parameter, Signature, Verdict
from shims.touchpoints import by_key
from shims.verbs import Drop, Fill

_OTHERS = {package: recorded_others(package) for package in OTHERS}
_RELEASE = "0.33.0"


@dataclass
class Edited:
    """A tree in which some files were changed."""

    tree: SourceTree
    label: str = "a copy"
    files: dict[str, bytes | None] = field(default_factory=dict)

    def paths(self) -> frozenset[str]:
        gone = {path for path, content in self.files.items() if content is None}
        return (self.tree.paths() | set(self.files)) - gone

    def read(self, path: str) -> bytes:
        content = self.files.get(path)
        return self.tree.read(path) if content is None else content


# --- on recorded readings, without network ------------------------------------------------------


def _with(home: str, found: Found) -> Reading:
    reading = recorded(_RELEASE)
    return replace(reading, found={**reading.found, home: found})


def _verdict(reading: Reading, key: str, speculators: str = "0.4.0.1") -> tuple[Verdict, str]:
    one = next(j for j in judge_release(reading, speculators, _OTHERS) if j.touchpoint.key == key)
    return one.verdict, one.why


def _renamed(home: str, old: str, new: str) -> Found:
    found = recorded(_RELEASE).at(home)
    assert found.signature is not None
    parameters = tuple(replace(p, name=new) if p.name == old else p for p in found.signature.parameters)
    return replace(found, signature=Signature(parameters))


_REQUEST = "vllm.v1.request:Request"


def test_a_renamed_parameter_is_broken() -> None:
    verdict, why = _verdict(_with(_REQUEST, _renamed(_REQUEST, "request_id", "identifier")), "Request")
    assert verdict is Verdict.BROKEN
    assert "does not know request_id" in why
    assert "requires identifier" in why


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (Found(ABSENT, detail="gone"), Verdict.BROKEN),
        (Found(UNREAD, detail="not fetched"), Verdict.NOT_JUDGED),
        (Found(OPAQUE, detail="made at run time"), Verdict.OPAQUE),
        (Found(FOUND, "class", _REQUEST, shape=OPAQUE, detail="wrapped"), Verdict.OPAQUE),
        (Found(FOUND, "class", _REQUEST, shape=UNREAD, detail="base not read"), Verdict.NOT_JUDGED),
        (Found(FOUND, "class", _REQUEST, Signature((Parameter("options", "var_keyword"),))), Verdict.OPAQUE),
        (
            Found(FOUND, "class", _REQUEST, Signature((Parameter("novelty"), Parameter("o", "var_keyword")))),
            Verdict.BROKEN,
        ),
        (Found(FOUND, "attribute", _REQUEST), Verdict.OPAQUE),
    ],
)
def test_four_verdicts(found: Found, expected: Verdict) -> None:
    assert _verdict(_with(_REQUEST, found), "Request")[0] is expected


def test_a_call_that_became_a_coroutine_is_broken() -> None:
    home = "vllm.v1.core.sched.scheduler:Scheduler.schedule"
    verdict, why = _verdict(_with(home, replace(recorded(_RELEASE).at(home), is_async=True)), "Scheduler.schedule")
    assert (verdict, "coroutine" in why) == (Verdict.BROKEN, True)


def test_a_harmless_change_is_not_reported() -> None:
    found = recorded(_RELEASE).at(_REQUEST)
    assert found.signature is not None
    more = Signature((*reversed(found.signature.parameters), Parameter("novelty", required=False)))
    assert _verdict(_with(_REQUEST, replace(found, signature=more)), "Request")[0] is Verdict.HOLDS


def test_a_moved_name_is_looked_up_at_its_new_home() -> None:
    home = "vllm.v1.core.kv_cache_planning:get_kv_cache_config_from_groups"
    assert _verdict(recorded(_RELEASE), "get_kv_cache_config_from_groups")[0] is Verdict.HOLDS
    verdict, why = _verdict(_with(home, Found(ABSENT, detail="moved on")), "get_kv_cache_config_from_groups")
    assert (verdict, why) == (Verdict.BROKEN, "moved on")


def test_an_override_that_vllm_calls_with_more_is_broken() -> None:
    home = "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1.get_finished"
    key = "KVConnectorBase_V1.get_finished"
    assert _verdict(recorded(_RELEASE), key, "0.9.0")[0] is Verdict.HOLDS
    more = Signature((Parameter("finished_req_ids"), Parameter("novelty")))
    verdict, why = _verdict(_with(home, replace(recorded(_RELEASE).at(home), signature=more)), key, "0.9.0")
    assert (verdict, "novelty" in why or "at most 1" in why) == (Verdict.BROKEN, True)


@pytest.mark.parametrize("speculators", ["0.3.0", "0.4.0.1", "0.9.0"])
def test_what_the_direct_engine_calls_is_judged_whichever_speculators_is_there(speculators: str) -> None:
    home, key = "vllm.engine.arg_utils:EngineArgs", "direct EngineArgs"
    assert _verdict(recorded(_RELEASE), key, speculators)[0] is Verdict.HOLDS
    found = recorded(_RELEASE).at(home)
    assert found.signature is not None
    less = Signature(tuple(p for p in found.signature.parameters if p.name != "worker_cls"))
    verdict, why = _verdict(_with(home, replace(found, signature=less)), key, speculators)
    assert (verdict, "worker_cls" in why) == (Verdict.BROKEN, True)


def test_a_new_abstract_method_is_broken() -> None:
    home = "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1"
    found = recorded(_RELEASE).at(home)
    more = replace(found, abstract=(*found.abstract, "novelty"))
    verdict, why = _verdict(_with(home, more), "KVConnectorBase_V1", "0.9.0")
    assert (verdict, "novelty" in why) == (Verdict.BROKEN, True)


def test_a_choice_that_is_gone_is_broken() -> None:
    home = "vllm.config.speculative:SpeculativeMethod"
    key = "method=extract_hidden_states"
    assert _verdict(recorded(_RELEASE), key, "0.9.0")[0] is Verdict.HOLDS
    found = Found(FOUND, "attribute", home, text="Literal['ngram']")
    assert _verdict(_with(home, found), key, "0.9.0")[0] is Verdict.BROKEN


def test_the_last_release_that_held_is_told() -> None:
    touchpoint = by_key()["_get_kv_cache_groups_uniform_spec"]
    earlier = [recorded(release) for release in ("0.31.0", "0.32.0")]
    assert last_that_held(touchpoint, "0.4.0.1", earlier) == "0.32.0"
    assert last_that_held(touchpoint, "0.4.0.1", []) is None


def test_without_a_row_what_it_covers_is_broken() -> None:
    rows = [row for row in ADAPTATIONS if row.name != "request-without-eos"]
    judged = judge(
        by_key()["Request"], "0.3.0", [row for row in rows if row.touchpoint == "Request"], recorded("0.17.0").at
    )
    assert (judged.verdict, "eos_token_id" in judged.why) == (Verdict.BROKEN, True)


@pytest.mark.parametrize(
    ("verb", "touchpoint"),
    [(Drop("arrival_time"), "Request"), (Fill("priority", 0), "Request"), (Fill("log_stats", False), "Scheduler")],
)
def test_a_row_that_nothing_calls_for_is_idle(monkeypatch: pytest.MonkeyPatch, verb: Any, touchpoint: str) -> None:
    extra = Adaptation("superfluous", touchpoint, verb, "no reason", "https://example.org", "never")
    monkeypatch.setattr(planning, "ADAPTATIONS", (*adaptations.ADAPTATIONS, extra))
    assert [entry.row for entry in idle_rows(recorded(_RELEASE), "0.4.0.1")] == ["superfluous"]
    monkeypatch.setattr(planning, "ADAPTATIONS", (*adaptations.ADAPTATIONS, replace(extra, behavioural=True)))
    assert not idle_rows(recorded(_RELEASE), "0.4.0.1")


def test_a_row_past_its_range_is_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    wide = tuple(replace(r, vllm="") if r.name.endswith("-moved") else r for r in adaptations.ADAPTATIONS)
    monkeypatch.setattr(planning, "ADAPTATIONS", wide)
    assert len(idle_rows(recorded("0.32.0"), "0.4.0.1")) == 3


def test_exit_codes_and_the_table(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(check, "read_releases", lambda package, releases, settings: [recorded(r) for r in releases])
    assert check.main(["0.16.0", _RELEASE]) == 0
    printed = capsys.readouterr().out
    assert "0.16.0" in printed
    assert "2 releases x 4" in printed

    renamed = _with(_REQUEST, _renamed(_REQUEST, "request_id", "identifier"))
    monkeypatch.setattr(check, "read_releases", lambda package, releases, settings: [renamed])
    monkeypatch.setattr(check, "open_release", lambda *arguments: _Nothing())
    assert check.main([_RELEASE, "--json"]) == 1
    assert '"touchpoint": "Request"' in capsys.readouterr().out


class _Nothing(FolderTree):
    def __init__(self) -> None:
        super().__init__(Path("/nonexistent"))

    def save(self) -> None:
        pass


# --- on a copy of a release's own sources --------------------------------------------------------


def _edit(text: str, changes: Mapping[str, str]) -> bytes:
    for old, new in changes.items():
        assert old in text, old
        text = text.replace(old, new)
    return text.encode()


@pytest.fixture(scope="module")
def sources() -> SourceTree:
    from contract_tests.sources import Settings, open_release

    return open_release("vllm", _RELEASE, Settings.from_environment())


def _report(tree: Edited, key: str, speculators: str = "0.4.0.1") -> Broken:
    reading = read_tree(tree, "vllm", _RELEASE)
    judged = judge_release(reading, speculators, _OTHERS)
    found = broken(reading, speculators, judged, Library(tree))
    assert [entry.judgement.touchpoint.key for entry in found] == [key]
    return found[0]


_Change = Callable[[str], bytes]


@pytest.mark.network
def test_a_renamed_parameter_in_a_copy_is_reported(sources: SourceTree) -> None:
    path = "vllm/v1/request.py"
    text = sources.read(path).decode()
    tree = Edited(sources, files={path: _edit(text, {"prompt_token_ids: list": "prompt_tokens: list"})})
    entry = _report(tree, "Request")
    assert entry.judgement.touchpoint.used_in == "data_generation/vllm_hidden_states_generator.py"
    assert entry.last_held == "0.32.0"
    assert any('Rename("prompt_token_ids", "prompt_tokens")' in row for row in entry.candidates)
    assert "a guess" in str(entry)


@pytest.mark.network
def test_a_removed_function_in_a_copy_is_reported(sources: SourceTree) -> None:
    path = "vllm/v1/core/kv_cache_utils.py"
    text = sources.read(path).decode()
    entry = _report(
        Edited(sources, files={path: _edit(text, {"def init_none_hash(": "def init_empty_hash("})}), "init_none_hash"
    )
    assert "has no init_none_hash" in entry.judgement.why
    assert any("init_empty_hash" in row for row in entry.candidates)


@pytest.mark.network
def test_a_moved_function_in_a_copy_is_found_again(sources: SourceTree) -> None:
    path, new = "vllm/v1/core/kv_cache_utils.py", "vllm/v1/core/kv_cache_hashes.py"
    text = sources.read(path).decode()
    moved = Edited(
        sources,
        files={path: _edit(text, {"def init_none_hash(": "def _gone("}), new: b"def init_none_hash(hash_fn): ...\n"},
    )
    entry = _report(moved, "init_none_hash")
    assert 'Moved("vllm.v1.core.kv_cache_hashes:init_none_hash")' in entry.candidates[0]


@pytest.mark.network
def test_a_file_that_cannot_be_parsed_is_not_judged(sources: SourceTree) -> None:
    path = "vllm/v1/request.py"
    tree = Edited(sources, files={path: b"class Request:\n    syntax of a later Python\n"})
    judged = judge_release(read_tree(tree, "vllm", _RELEASE), "0.4.0.1", _OTHERS)
    verdicts = {j.touchpoint.key: j.verdict for j in judged if j.touchpoint.home.startswith("vllm.v1.request:")}
    assert set(verdicts.values()) == {Verdict.NOT_JUDGED}
    assert Verdict.BROKEN not in {j.verdict for j in judged}


@pytest.mark.network
def test_any_keyword_in_a_copy_is_opaque(sources: SourceTree) -> None:
    path = "vllm/v1/structured_output/__init__.py"
    text = sources.read(path).decode()
    tree = Edited(
        sources, files={path: _edit(text, {"def __init__(self, vllm_config: VllmConfig)": "def __init__(self, **kw)"})}
    )
    judged = judge_release(read_tree(tree, "vllm", _RELEASE), "0.4.0.1", _OTHERS)
    assert next(j.verdict for j in judged if j.touchpoint.key == "StructuredOutputManager") is Verdict.OPAQUE
