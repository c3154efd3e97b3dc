"""Every vLLM release against every speculators release, on the committed snapshots; no network."""

from __future__ import annotations

import json

import pytest

from contract_tests.check import COLUMNS
from contract_tests.homes import GENERATORS, homes_in
from contract_tests.judge import judge_release
from contract_tests.recorded import FOLDER, OTHERS, recorded, recorded_others, rendered, rendered_uses
from contract_tests.strict import idle_rows, wrong_ranges
from contract_tests.support_page import DIRECT, live, results
from shims.adaptations import ADAPTATIONS
from shims.contract import Verdict
from shims.planning import select
from shims.releases import SPECULATORS, TRANSFORMERS, known, proved_direct
from shims.touchpoints import TOUCHPOINTS
from shims.verbs import Compute, Drop, Fill, Moved, Provide
from shims.versions import Stack, base_release, has_generator, newest_first, within

_OTHERS = {package: recorded_others(package) for package in OTHERS}
# `transformers` takes these by a star import for type checkers and answers them at run time.
_OPAQUE = {f"transformers.{name}" for name in ("AutoConfig", "AutoModelForCausalLM", "AutoTokenizer", "LlamaConfig")}


@pytest.mark.parametrize("speculators", COLUMNS)
@pytest.mark.parametrize("release", known())
def test_nothing_is_broken(release: str, speculators: str) -> None:
    judged = judge_release(recorded(release), speculators, _OTHERS)
    wrong = [f"{j.touchpoint.key}: {j.verdict.value}: {j.why}" for j in judged if j.verdict is not Verdict.HOLDS]
    unexpected = [line for line in wrong if line.partition(":")[0] not in _OPAQUE]
    assert not unexpected, "\n".join(unexpected)


def test_what_is_called_known_was_read() -> None:
    """`shims/releases.py` against the snapshots, which the shims do not import."""
    read = newest_first(recorded_others("transformers"))
    assert (read[-1], read[0]) == TRANSFORMERS
    assert set(GENERATORS) | set(COLUMNS) <= set(SPECULATORS)
    assert [version for version in SPECULATORS if has_generator(version)] == list(GENERATORS)


@pytest.mark.parametrize("speculators", GENERATORS)
@pytest.mark.parametrize("release", known())
def test_no_row_is_idle(release: str, speculators: str) -> None:
    assert not idle_rows(recorded(release), speculators)


@pytest.mark.parametrize("package", OTHERS)
def test_rows_on_other_packages_cover_exactly_what_they_must(package: str) -> None:
    assert not list(map(str, wrong_ranges(package, _OTHERS[package])))


def _seen_in_signatures() -> list[str]:
    """Rows whose absence a signature, or a name, shows."""
    shapes = (Drop, Fill, Compute, Moved, Provide)
    return [row.name for row in ADAPTATIONS if isinstance(row.verb, shapes) and not row.behavioural]


@pytest.mark.parametrize("name", _seen_in_signatures())
def test_each_row_is_needed_somewhere(name: str) -> None:
    without = [row for row in ADAPTATIONS if row.name != name]
    row = next(row for row in ADAPTATIONS if row.name == name)
    for release in known():
        for speculators in GENERATORS:
            if not (within(release, row.vllm) and within(speculators, row.speculators)):
                continue
            chosen = [r for r in without if r.holds_for(Stack(release, speculators)) or r.transformers]
            judged = judge_release(recorded(release), speculators, _OTHERS, chosen)
            broken = [j.touchpoint for j in judged if j.verdict is Verdict.BROKEN]
            home = next(t.module for t in TOUCHPOINTS if t.key == row.touchpoint)
            if any(t.key == row.touchpoint or t.module == home for t in broken):
                return
    pytest.fail(f"without {name} nothing is broken anywhere: remove it, or mark it behavioural")


def test_every_known_release_is_planned_with_rows() -> None:
    for release in known():
        for speculators in GENERATORS:
            assert select(Stack(release, speculators)).state == "adapted"


@pytest.mark.parametrize("release", known())
def test_snapshot_covers_the_tables(release: str) -> None:
    reading = recorded(release)
    assert set(reading.found) == set(homes_in("vllm")), f"python -m contract_tests.snapshot {release}"
    assert all(len(sha256) == 64 for sha256 in reading.files.values())
    assert all(path.startswith("vllm/") for path in reading.files)


@pytest.mark.parametrize("package", OTHERS)
def test_snapshots_beside_vllm_cover_the_tables(package: str) -> None:
    assert _OTHERS[package]
    for reading in _OTHERS[package].values():
        assert set(reading.found) == set(homes_in(package)), "python -m contract_tests.snapshot"


def test_each_snapshot_reads_back_as_it_was_written() -> None:
    for release in known():
        text = (FOLDER / f"{release}.json").read_text(encoding="utf-8")
        assert rendered(recorded(release).as_dict()) == text
        assert json.loads(text)["release"] == release


@pytest.mark.network
def test_snapshots_say_what_the_sources_say() -> None:
    from contract_tests.snapshot import other_releases, read_releases, read_uses, render_others
    from contract_tests.sources import Settings

    settings = Settings.from_environment()
    vllm = read_releases("vllm", known(), settings)
    for reading in vllm:
        assert rendered(reading.as_dict()) == (FOLDER / f"{reading.release}.json").read_text(encoding="utf-8")
    for package in OTHERS:
        # New releases of transformers may have come since; those that were read must still read the same.
        recorded_ones = recorded_others(package)
        releases = [r for r in other_releases(package, settings, vllm) if r in recorded_ones]
        assert releases
        text = render_others(read_releases(package, releases, settings))
        assert json.loads(text) == {r: _as_written(package)[r] for r in releases}
    assert rendered_uses(read_uses(settings)) == (FOLDER / "uses.json").read_text(encoding="utf-8")


def _as_written(package: str) -> dict[str, object]:
    data: dict[str, object] = json.loads((FOLDER / f"{package}.json").read_text(encoding="utf-8"))
    return data


def test_the_direct_engine_is_the_default_exactly_where_it_was_seen_to_be_right() -> None:
    """`direct = true` in releases.toml; what it says is in contract_tests/results/."""
    right = {release for release in known() if live(results(release).get("cases", []), DIRECT, "cpu")[0] == "pass"}
    assert right == proved_direct()


def test_results_are_of_the_release_that_they_are_filed_under() -> None:
    """An environment may hold another build than the one that was asked for."""
    for release in known():
        for device, stack in results(release).get("stacks", {}).items():
            assert base_release(stack["vllm"]) == release, (release, device)
