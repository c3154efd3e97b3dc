"""The verdict, the report, and what an engine that does not start has to say."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.evaluation.acceptance import Acceptance, served_acceptance
from pipeline.evaluation.plot import draw, read_losses
from pipeline.evaluation.report import summary, text_of, write_report
from pipeline.evaluation.request import DRAFT, NGRAM, NONE, EngineAnswer, EngineRequest, first_difference, speculation
from pipeline.evaluation.results import Results, acceptance_in
from pipeline.evaluation.serving import ask, layers_said, reason
from pipeline.evaluation.verdict import AGREES, MISMATCHED, NOT_SERVED, UNCLEAR, UNDERTRAINED, judge, meaning
from shims.errors import SpecshimError


def _promised(*conditional: float, chains: int = 1000) -> Acceptance:
    counts = [chains]
    for share in conditional:
        counts.append(round(counts[-1] * share))
    return served_acceptance(chains, counts[1:])


GOOD, BAD = _promised(0.8, 0.7, 0.6), _promised(0.2, 0.1, 0.0)


@pytest.mark.parametrize(
    ("promised", "served", "words"),
    [
        (GOOD, GOOD, (AGREES,)),
        (GOOD, _promised(0.79, 0.69, 0.6), (AGREES,)),
        (GOOD, BAD, (MISMATCHED,)),
        (BAD, BAD, (UNDERTRAINED, AGREES)),
        (_promised(0.4, 0.3, 0.2), _promised(0.1, 0.0, 0.0), (UNDERTRAINED, MISMATCHED)),
        (GOOD, _promised(0.72, 0.63, 0.5), (UNCLEAR,)),
        # Too few to tell a difference from chance.
        (_promised(0.8, 0.7, 0.6, chains=10), _promised(0.6, 0.5, 0.5, chains=10), (AGREES,)),
        (GOOD, None, (NOT_SERVED,)),
        (None, GOOD, (UNCLEAR,)),
        (None, None, (NOT_SERVED,)),
    ],
)
def test_the_verdict(promised: Acceptance | None, served: Acceptance | None, words: tuple[str, ...]) -> None:
    found = judge(promised, served)
    assert found.words == words
    assert len(found.reasons) == len(words) and len(meaning(found.words)) == len(words)
    assert set(found.as_dict()["limits"]) >= {"undertrained_below_first_token", "mismatched_below_share"}


def test_a_draft_that_was_fed_other_layers_is_mismatched_whatever_the_numbers() -> None:
    found = judge(GOOD, GOOD, fed=(3, 5, 6), trained=(2, 4, 5))
    assert found.words == (MISMATCHED,)
    assert "fed layers 3 5 6, and trained on 2 4 5" in found.reasons[0]
    assert judge(BAD, BAD, fed=(3, 5, 6), trained=(2, 4, 5)).words == (MISMATCHED, UNDERTRAINED)
    assert judge(GOOD, None, fed=(3, 5, 6), trained=(2, 4, 5)).words == (MISMATCHED, NOT_SERVED)
    assert judge(GOOD, GOOD, fed=(5, 4, 2), trained=(2, 4, 5)).words == (AGREES,)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("(Worker pid=1) INFO 11-29 [gpu_model_runner.py:5243] Using auxiliary layers from speculative config: "
         "(2, 15, 27)", ([2, 15, 27], "V1")),
        ("INFO 11-29 [eagle3_utils.py:28] Using Eagle3 auxiliary layers from model: (2, 15, 27)",
         ([2, 15, 27], "V2")),
        ("nothing of the kind", ([], None)),
    ],
)  # fmt: skip
def test_which_layers_a_server_says_it_uses(line: str, said: tuple[list[int], str | None]) -> None:
    assert layers_said(f"first\n{line}\nlast") == said


def test_the_servers_own_words_count_for_more_than_what_was_expected() -> None:
    results = _results()
    results.trained = (2, 4, 5)
    assert results.verdict().words == (AGREES,)
    results.engines[DRAFT] = replace(results.engines[DRAFT], layers=[3, 5, 6], runner="V2")
    assert results.verdict().words == (MISMATCHED,)
    assert "The server says that layers 3 5 6 feed the draft (runner V2)." in text_of(results, picture=False)


def _results() -> Results:
    promised = {"steps": 2, "greedy_share": 0.9}
    shares = _promised(0.5, 0.5).as_dict()
    return Results(
        "draft", "verifier", 2, (2, 4, 5),
        teacher_forced={"draft on held-out rows": promised | {"every_position": shares, "as_served": shares}},
        engines={
            NONE: EngineAnswer(NONE, [[1, 2, 3], [4, 5]], 2.0),
            NGRAM: EngineAnswer(NGRAM, [[1, 2, 3], [4, 5]], 1.0, 10, 20, [2, 0]),
            DRAFT: EngineAnswer(DRAFT, [[1, 2, 9], [4, 5]], 0.5, 1000, 2000, [500, 250]),
        },
        not_run={"gaps": "no reason"},
        gaps={DRAFT: [1e-6, 3e-6]},
    )  # fmt: skip


def test_numbers_that_follow_from_the_engines() -> None:
    results = _results()
    assert results.speed_up(DRAFT) == 4.0 and results.speed_up(NGRAM) == 2.0
    assert results.engines[NONE].tokens_per_step == 1.0
    # 5 tokens, of which 2 were drafted: 3 passes of the verifier.
    assert results.engines[NGRAM].tokens_per_step == pytest.approx(5 / 3)
    assert results.same_answers(DRAFT) == (1, 2) and results.same_answers(NGRAM) == (2, 2)
    assert results.served() == served_acceptance(1000, [500, 250])
    assert results.verdict().words == (AGREES,)
    assert Results("d", "v", 2, (1,)).speed_up(DRAFT) is None
    assert first_difference([1, 2], [1, 2]) is None
    assert first_difference([1, 2], [1, 3]) == 1
    assert first_difference([1, 2], [1]) == 1


def test_the_report_says_what_was_found_what_was_not_run_and_its_limits(tmp_path: Path) -> None:
    results = _results()
    write_report(results, tmp_path)
    told = (tmp_path / "report.md").read_text()
    for words in (
        "**agrees**",
        "| n-gram | 5.0 | 2.00 | 2 of 2 | 1.667 |",
        "(2 places)",
        "3.0e-06 at most",
        "gaps: no reason",
        "below 80%",
    ):
        assert words in told
    read = json.loads((tmp_path / "report.json").read_text())
    assert read["served"][DRAFT]["same_answers"] == [1, 2]
    assert acceptance_in(read["served"][DRAFT]["acceptance"]) == results.served()
    assert any(line.startswith("served, n-gram: 5.0 tokens/s, 1.667 a step, 2.00 times") for line in summary(results))
    lines = [line for line in text_of(results, picture=False).splitlines() if line.startswith("|")]
    served = [line.count("|") for line in lines if "tokens/s" in line or line.startswith((f"| {NONE}", f"| {DRAFT} |"))]
    assert len(set(served)) == 1, "each row has as many cells as its head"


def test_the_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    losses = tmp_path / "metrics.jsonl"
    losses.write_text('{"kind": "train", "step": 0, "loss": 3.0}\n{"kind": "val", "step": 1, "loss": 2.0}\nnot json\n')
    assert read_losses(losses) == {"train": [(0.0, 3.0)], "val": [(1.0, 2.0)]}
    assert draw(_results(), tmp_path / "report.png", losses)
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")


def test_what_an_engine_died_of() -> None:
    old = """
(EngineCore pid=9) ERROR 11-29 [core.py:1] EngineCore failed to start.
(EngineCore pid=9) ERROR 11-29 [core.py:1] Traceback (most recent call last):
(EngineCore pid=9) ERROR 11-29 [core.py:1]   File "cpu_model_runner.py", line 25, in __init__
(EngineCore pid=9) ERROR 11-29 [core.py:1]     assert self.speculative_config is None, "spec decode is not supported."
(EngineCore pid=9) ERROR 11-29 [core.py:1] AssertionError: spec decode is not supported.
RuntimeError: Engine core initialization failed. See root cause above.
"""
    assert reason(old) == "AssertionError: spec decode is not supported."
    bare = "Traceback\n    assert here\nAssertionError\nRuntimeError: later"
    assert reason(bare) == "AssertionError at assert here"
    assert reason("Killed") == "Killed" and reason("") == "no message"


def test_how_an_engine_is_asked_to_speculate() -> None:
    assert speculation(NONE, None, 3) is None
    assert speculation(NGRAM, None, 3)["method"] == "ngram"  # type: ignore[index]
    assert speculation(DRAFT, "d", 2) == {"method": "eagle3", "model": "d", "num_speculative_tokens": 2}


def test_an_engine_ends_with_the_command_that_started_it() -> None:
    from pipeline.evaluation.serving import _ended_with_us

    process = subprocess.Popen(["sleep", "60"], start_new_session=True)
    with pytest.raises(KeyboardInterrupt), _ended_with_us(process):
        raise KeyboardInterrupt
    assert process.poll() == -signal.SIGTERM


def test_an_engine_that_says_nothing_is_an_error_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(SpecshimError) as refused:
        ask(EngineRequest(NONE, "model", [[1]], 1), tmp_path, "none")
    assert refused.value.found == "exit code 1: no message"
    assert str(tmp_path / "none.log") in refused.value.next_step
