"""Generated pages say what the tables and snapshots say."""

from __future__ import annotations

from pathlib import Path

import pytest

from contract_tests import docs


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
