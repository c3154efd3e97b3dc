"""Generated pages say what the tables and snapshots say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from contract_tests import docs
from contract_tests.acceptance_page import RESULTS
from contract_tests.devices_page import RESULTS as DEVICES


def test_generated_pages_are_fresh() -> None:
    assert not docs.stale(), "python -m contract_tests.docs"


def test_a_stale_page_is_found_and_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(docs, "ROOT", tmp_path)
    assert docs.main(["--check"]) == 1
    assert docs.main([]) == 0
    assert docs.main(["--check"]) == 0
    page = tmp_path / "docs/touchpoints.md"
    assert "python -m contract_tests.docs" in page.read_text(encoding="utf-8").splitlines()[0]
    page.write_text(page.read_text(encoding="utf-8") + "more\n", encoding="utf-8")
    assert docs.main(["--check"]) == 1


def test_the_draft_that_readme_speaks_of_is_the_recorded_one() -> None:
    run = json.loads(max(RESULTS.glob("*-nvidia-h200.json")).read_text(encoding="utf-8"))
    served = run["evaluations"]["trained"]["served"]
    draft, ngram = ((served[kind]["tokens_per_step"], served[kind]["speed_up"]) for kind in ("draft", "n-gram"))
    readme = " ".join((docs.ROOT / "README.md").read_text(encoding="utf-8").split())
    assert f"taught by {run['settings']['count']:,} of its own answers" in readme
    assert f"{draft[0]:.1f} tokens a step and {draft[1]:.1f} times as fast" in readme
    assert f"(n-gram lookup: {ngram[0]:.1f} and {ngram[1]:.1f})" in readme
    assert [run["check"][name]["exit_code"] for name in ("trained", "shifted")] == [0, 1]
    exact = [
        evaluations["exact"]["served"]["draft"]["same_answers"]
        for path in RESULTS.glob("*-nvidia-h200*.json")
        if "exact" in (evaluations := json.loads(path.read_text(encoding="utf-8"))["evaluations"])
    ]
    assert exact and all(f"In float32 each of {asked} answers" in readme and same == asked for same, asked in exact)


def test_several_devices_did_what_one_does() -> None:
    runs = [json.loads(path.read_text(encoding="utf-8")) for path in DEVICES.glob("*.json")]
    extracted = [model for run in runs for model in run.get("models", [])]
    assert {"dense-8b", "kimi-int4"} <= {model["model"] for model in extracted}
    for model in extracted:
        assert not model["faults"] and model["killed"]["ended_after"] < 30, model
        assert max(model[what]["worst_row"] for what in ("difference", "after_resume")) < model["difference"]["limit"]
    several = [way for run in runs for name, way in run.get("runs", {}).items() if name != "one"]
    assert several and all(way["worst_loss_difference"] < 1e-4 for way in several)
