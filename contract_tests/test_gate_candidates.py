"""What is broken comes with a row that mends it: the guess, put into the table, makes the use hold. No network."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from contract_tests.gate.judging import Comparison, judged
from contract_tests.gate.releases import Release
from contract_tests.gate.report import Finding, Level
from contract_tests.judge import judge
from contract_tests.readers.library import Library
from contract_tests.readers.resolve import Resolver
from contract_tests.recorded import OTHERS, recorded, recorded_others
from contract_tests.snapshot import read_library
from contract_tests.sources import FolderTree
from contract_tests.stub import stub_files, write_files
from shims.adaptations import Adaptation
from shims.contract import Verdict
from shims.planning import select
from shims.touchpoints import by_key
from shims.verbs import Drop, Fill, Moved, Rename, Verb
from shims.versions import Stack

_RELEASE, _SPECULATORS = "0.33.0", "0.4.0.1"
_OTHERS = {package: recorded_others(package) for package in OTHERS}
_FILES = stub_files(recorded(_RELEASE))
_UTILS, _REQUEST = "vllm/v1/core/kv_cache_utils.py", "vllm/v1/request.py"
_HASHES = "vllm/v1/core/kv_hashes.py"


def _same(library: Library) -> Library:
    return library


def _release(folder: Path, files: dict[str, bytes]) -> Release:
    library = Library(FolderTree(write_files(files, folder), folder.name))
    return Release(folder.name, _RELEASE, read_library(library, "vllm", _RELEASE), partial(_same, library))


def _edited(path: str, old: str, new: str) -> dict[str, bytes]:
    assert old.encode() in _FILES[path], (path, old)
    return {**_FILES, path: _FILES[path].replace(old.encode(), new.encode())}


def _broken(tmp_path: Path, files: dict[str, bytes], key: str) -> tuple[Finding, Release]:
    before, after = _release(tmp_path / "before", _FILES), _release(tmp_path / "after", files)
    comparison = Comparison(after, before, _SPECULATORS)
    then = {one.touchpoint.key: one for one in judged(before, _SPECULATORS, _OTHERS)}
    now = judged(after, _SPECULATORS, _OTHERS)
    found = [comparison.finding(one, then.get(one.touchpoint.key)) for one in now]
    broken = [finding for finding in found if finding.level is Level.BROKEN]
    assert [finding.key for finding in broken] == [key]
    return broken[0], after


def _mends(verb: Verb, finding: Finding, release: Release) -> bool:
    """Whether the row, put into the table, makes the use hold."""
    row = Adaptation("new", finding.key, verb, "a reason", "https://example.org", "some day")
    rows = [*select(Stack(_RELEASE, _SPECULATORS)).adaptations, row]
    found = dict(release.reading.found)
    if isinstance(verb, Moved):
        found[verb.home] = Resolver(release.library).find(verb.home)
    reading = replace(release.reading, found=found)
    return judge(by_key()[finding.key], _SPECULATORS, rows, reading.at).verdict is Verdict.HOLDS


_HASHER = "def get_request_block_hasher("
_CASES: dict[str, tuple[dict[str, bytes], str, Verb]] = {
    "moved beside": (
        {**_edited(_UTILS, "def init_none_hash(", "def _gone("), _HASHES: b"def init_none_hash(hash_fn): ...\n"},
        "init_none_hash",
        Moved("vllm.v1.core.kv_hashes:init_none_hash"),
    ),
    "a similar name": (
        _edited(_UTILS, "def init_none_hash(", "def init_null_hash("),
        "init_none_hash",
        Moved("vllm.v1.core.kv_cache_utils:init_null_hash"),
    ),
    "a similar signature": (
        _edited(_UTILS, _HASHER, "def chain_of_digests("),
        "get_request_block_hasher",
        Moved("vllm.v1.core.kv_cache_utils:chain_of_digests"),
    ),
    "a parameter renamed": (
        _edited(_REQUEST, "prompt_token_ids", "prompt_tokens"),
        "Request",
        Rename("prompt_token_ids", "prompt_tokens"),
    ),
    "a parameter gone": (_edited(_REQUEST, "arrival_time=None, ", ""), "Request", Drop("arrival_time")),
    "a parameter wanted": (
        _edited(_REQUEST, "(self, request_id", "(self, novelty, request_id"),
        "Request",
        Fill("novelty", 0),
    ),
}


_KINDS = {
    "moved beside": "moved",
    "a similar name": "renamed",
    "a similar signature": "renamed",
    "a parameter renamed": "parameter renamed",
    "a parameter gone": "parameter removed",
    "a parameter wanted": "parameter added, required",
}


@pytest.mark.parametrize("name", _CASES)
def test_a_candidate_mends_it(name: str, tmp_path: Path) -> None:
    files, key, verb = _CASES[name]
    finding, release = _broken(tmp_path, files, key)
    written = f'Moved("{verb.home}")' if isinstance(verb, Moved) else repr(verb).replace("'", '"')
    asked = f'Fill("{verb.keyword}", …)' if isinstance(verb, Fill) else written
    said = [c.replace('keyword="', '"').replace('name="', '"') for c in finding.candidates]
    short = asked.replace('keyword="', '"').replace('name="', '"')
    assert any(short in candidate for candidate in said), finding.candidates
    assert _mends(verb, finding, release)
    assert finding.changes[0].kind == _KINDS[name]


def test_a_row_that_is_there_already_is_named(tmp_path: Path) -> None:
    """On a release that is not yet in a row's range: the row is the answer, not a new one."""
    files = stub_files(recorded("0.33.0"))
    before = _release(tmp_path / "before", stub_files(recorded("0.32.0")))
    library = Library(FolderTree(write_files(files, tmp_path / "after"), "after"))
    after = Release("after", "0.32.1", read_library(library, "vllm", "0.32.1"), partial(_same, library))
    comparison = Comparison(after, before, _SPECULATORS)
    now = {one.touchpoint.key: one for one in judged(after, _SPECULATORS, _OTHERS)}
    finding = comparison.finding(now["unify_hybrid_kv_cache_specs"], None)
    assert finding.level is Level.BROKEN
    assert 'row "unify-hybrid-kv-cache-specs-moved" makes it fit' in finding.candidates[0]


def test_a_nightly_ahead_of_its_version_takes_the_rows_that_fit(tmp_path: Path) -> None:
    """`0.16.0.dev9` that has lost `eos_token_id` already, as a real one had."""
    reading = recorded("0.17.0")
    library = Library(FolderTree(write_files(stub_files(reading), tmp_path), "nightly"))
    for version, verdict in (("0.16.1.dev9+gabc", Verdict.HOLDS), ("0.16.1", Verdict.BROKEN)):
        nightly = Release("nightly", version, read_library(library, "vllm", version), partial(_same, library))
        now = {one.touchpoint.key: one for one in judged(nightly, _SPECULATORS, _OTHERS)}
        assert now["Request"].verdict is verdict
