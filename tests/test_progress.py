"""What a person waiting for hours reads."""

from __future__ import annotations

import pytest

from pipeline import progress
from pipeline.progress import stage_progress


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds, to be moved by hand; the console is no terminal."""
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(progress.console, "_force_terminal", False)
    return now


def test_time_left_is_not_that_of_the_first_step(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    """A training compiles for minutes in its first step; 599,855 s left were told to somebody who had 250."""
    with stage_progress("train", 1001, unit="steps") as shown:
        clock[0] = 160.0
        shown.advance(1, 4000)
        first = capsys.readouterr().err
        for step in range(1, 401):
            clock[0] = 160.0 + step / 10
            shown.advance(1, 4000)
    assert "train: 1/1001 steps" in first and "left" not in first
    told = capsys.readouterr().err.strip().splitlines()
    assert told == ["train: 301/1001 steps, 10.00 steps/s, 40000 tokens/s, 70 s left"]


def test_a_rate_follows_what_happens_now(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    with stage_progress("extract", 2000) as shown:
        for second in range(1, 401):
            clock[0] = float(second)
            shown.advance(1 if second < 200 else 2, 10)
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert "2.00 rows/s, 10 tokens/s" in last
