"""The gate on real releases of the index. What it must show at least."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from contract_tests.gate.__main__ import main
from contract_tests.gate.judging import gate
from contract_tests.gate.releases import Release, default_baseline, state_of
from contract_tests.gate.report import Level
from contract_tests.readers.library import Library
from contract_tests.recorded import recorded
from contract_tests.sources import Settings, SourceError
from shims.releases import known

_MOVED = {"_get_kv_cache_groups_uniform_spec", "get_kv_cache_config_from_groups", "unify_hybrid_kv_cache_specs"}
_ROWS = {
    "get-kv-cache-groups-uniform-spec-moved",
    "get-kv-cache-config-from-groups-moved",
    "unify-hybrid-kv-cache-specs-moved",
    "kv-cache-layout-resolved-with-interleave",
}
_SCHEDULE = "override of vllm.v1.core.sched.scheduler.Scheduler.schedule"


def _none() -> Library:
    raise SourceError("a test", "no sources", "none", "nothing")


def _recorded(release: str) -> Release:
    return Release(f"vllm {release}", release, recorded(release), _none)


def test_snapshots_alone_tell_what_moved_and_which_rows_cover_it() -> None:
    """Without network, without sources: what cannot be shown then is said, and the verdict stands."""
    settings = Settings("http://127.0.0.1:9/simple/", Path("/nonexistent"), offline=True)
    report = gate(_recorded("0.33.0"), _recorded("0.32.0"), "0.4.0.1", settings)
    moved = {f.key: f for f in report.findings if any(c.kind == "moved" for c in f.changes)}
    assert set(moved) == _MOVED
    assert all(finding.level is Level.ADAPTED and finding.rows for finding in moved.values())
    assert set(report.rows_new) == _ROWS and report.rows_gone == ("kv-cache-layout-resolved",)
    assert report.verdict == "adapted" and report.exit_code() == 0
    assert any("what else moved" in note for note in report.notes)
    bodies = [f for f in report.findings if f.level is Level.LOOK]
    assert bodies and all("cannot be shown" in f.excerpt[0] for f in bodies)


@pytest.mark.parametrize("release", known())
def test_the_default_baseline_is_the_newest_verified_one_at_or_below(release: str) -> None:
    baseline = default_baseline(release, "0.4.0.1")
    verified = [r for r in known() if state_of(r, "0.4.0.1") == "verified"]
    below = known()[: known().index(release)]
    expected = [r for r in (*below, release) if r in verified] or below or [release]
    assert baseline == expected[-1]


@pytest.mark.network
def test_what_0_33_changed_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["vllm==0.33.0", "--baseline", "0.32.0", "--speculators", "0.4.0.1"]) == 0
    text = capsys.readouterr().out
    note = next(line for line in text.splitlines() if "moved from vllm.v1.core.kv_cache_utils" in line)
    assert "to vllm.v1.core.kv_cache_planning" in note
    names = set(re.findall(r"\w+", note))
    assert names >= {*_MOVED, "get_kv_cache_configs", "get_kv_cache_groups"}
    assert "takes num_blocks, not available_memory" in text
    assert "parameter added, required: cp_kv_cache_interleave_size" in text
    assert all(row in text for row in _ROWS)
    assert "+    self.model_executor.set_kv_cache_layout(" in text
    capsys.readouterr()
    main(["vllm==0.33.0", "--baseline", "0.32.0", "--speculators", "0.4.0.1", "--format", "github"])
    lines = capsys.readouterr().out.splitlines()
    assert all(re.match(r"::(error|warning|notice) [^:]*::", line) for line in lines)
    assert not any(line.startswith("::error") for line in lines)


@pytest.mark.network
def test_all_known_releases_hold_or_are_adapted(tmp_path: Path) -> None:
    arguments = ["all", "--format", "json", "--speculators", "all", "--output", str(tmp_path / "all.json")]
    assert main(arguments) == 0
    reports = json.loads((tmp_path / "all.json").read_text("utf-8"))["reports"]
    assert {(r["version"], r["consumer"].partition(" ")[2]) for r in reports} >= {(v, "0.3.0") for v in known()}
    assert {r["verdict"] for r in reports} == {"adapted"}


@pytest.mark.network
@pytest.mark.parametrize(
    ("consumer", "target", "baseline", "broken"),
    [
        # Each of these was looked up by hand in the two releases' sources, see docs/gate.md.
        ("tpu-inference==0.32.0", "0.33.0", "0.32.0", "vllm.v1.executor.ray_executor.RayDistributedExecutor"),
        ("tpu-inference==0.32.0", "0.33.0", "0.32.0", "class of vllm.v1.core.sched.interface.SchedulerInterface"),
        ("verl==0.9.1", "0.33.0", "0.32.0", "vllm.model_executor.utils.replace_parameter(…, …, …, …)"),
        (
            "vllm-ascend==0.23.0.post1",
            "0.24.0",
            "0.23.0",
            "override of vllm.v1.core.sched.scheduler.Scheduler.schedule",
        ),
    ],
)
def test_projects_of_the_index(
    consumer: str, target: str, baseline: str, broken: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [f"vllm=={target}", "--baseline", baseline, "--speculators", "none", "--consumer", consumer]
    assert main([*arguments, "--format", "json"]) == 1
    (report,) = json.loads(capsys.readouterr().out)["reports"]
    assert broken in {f["key"] for f in report["findings"] if f["level"] == "broken"}
