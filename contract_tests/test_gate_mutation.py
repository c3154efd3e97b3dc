"""Random edits: each harmful one is reported, each harmless one is not."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from contract_tests.gate import mutation
from contract_tests.gate.edits import Edit, aims, random_edits
from contract_tests.gate.judging import judged
from contract_tests.gate.mutation import SPECULATORS, Score, score
from contract_tests.gate.releases import Release
from contract_tests.gate.report import Finding, Level
from contract_tests.readers.library import Library
from contract_tests.recorded import OTHERS, recorded, recorded_others
from contract_tests.snapshot import read_library
from contract_tests.sources import FolderTree
from contract_tests.stub import stub_files, write_files
from shims.releases import known

_OTHERS = {package: recorded_others(package) for package in OTHERS}


@pytest.fixture(scope="module")
def stub(tmp_path_factory: pytest.TempPathFactory) -> FolderTree:
    folder = tmp_path_factory.mktemp("stub")
    return FolderTree(write_files(stub_files(recorded(known()[-1])), folder), "stub")


@pytest.mark.parametrize("release", [known()[0], "0.20.0", known()[-1]])
def test_a_stub_reads_like_the_release(release: str, tmp_path: Path) -> None:
    reading = recorded(release)
    write_files(stub_files(reading), tmp_path)
    again = read_library(Library(FolderTree(tmp_path)), "vllm", release)
    assert again.requires == reading.requires
    for home, found in reading.found.items():
        ours = again.found[home]
        assert (ours.status, str(ours.signature)) == (found.status, str(found.signature)), home
        assert (ours.is_async, ours.text, ours.fields) == (found.is_async, found.text, found.fields), home
        assert sorted(ours.abstract) == sorted(found.abstract), home


def test_edits_of_a_stub_are_told_apart(stub: FolderTree) -> None:
    found = score(stub, known()[-1], 200, seed=1)
    print(found.render())
    assert not found.wrong
    kinds = {kind for kind, _ in found.total}
    assert len(kinds) >= 18
    assert min(sum(found.total[k, harmful] for k in kinds) for harmful in (True, False)) >= 60


def test_edits_are_code_and_differ_from_the_original(stub: FolderTree) -> None:
    library = Library(stub)
    release = Release("original", known()[-1], read_library(library, "vllm", known()[-1]), lambda: library)
    edits = list(random_edits(aims(library, judged(release, SPECULATORS, _OTHERS), SPECULATORS), 100, 2))
    assert len(edits) == 100
    for edit in edits:
        for path, content in edit.files.items():
            ast.parse(content.decode())
            assert path not in stub.paths() or content != stub.read(path)


def test_the_same_seed_makes_the_same_edits(stub: FolderTree) -> None:
    assert score(stub, known()[-1], 10, seed=3).total == score(stub, known()[-1], 10, seed=3).total


@pytest.mark.parametrize(
    ("harmful", "level", "right"),
    [
        (True, Level.BROKEN, True),
        (True, Level.NOT_JUDGED, True),
        (True, Level.CHANGED, False),
        (False, Level.BROKEN, False),
        (False, Level.NOT_JUDGED, False),
        (False, Level.CHANGED, True),
    ],
)
def test_the_score_counts_what_it_should(harmful: bool, level: Level, right: bool) -> None:
    counted = Score()
    finding = Finding("Request", "vllm.v1.request:Request", level, "call")
    counted.add(Edit("rename", "Request", harmful, {}), [finding])
    assert bool(counted.wrong) is not right
    assert f"{int(right)}/1" in counted.render()


@pytest.mark.network
def test_five_hundred_edits_of_a_real_release(capsys: pytest.CaptureFixture[str]) -> None:
    assert mutation.main(["--edits", "500", "--seed", "0"]) == 0
    printed = capsys.readouterr().out
    with capsys.disabled():
        print(f"\n{printed}")
    assert "wrong" not in printed
