"""Undertrained or mismatched? Two numbers that should agree, and one that should be high."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.evaluation.acceptance import Acceptance

LOW_FIRST_TOKEN = 0.5
"""Below this share of first draft tokens accepted, teacher-forced, a draft is called undertrained."""
LOW_SHARE = 0.8
"""Below this share of the accepted tokens that teacher forcing promises, a served draft is called mismatched."""
CLOSE = 0.05
"""Served and teacher-forced lengths that differ by less than this agree."""
ERRORS = 2.0
"""Standard errors that a difference has to exceed."""

AGREES, MISMATCHED, UNDERTRAINED, NOT_SERVED, UNCLEAR = (
    "agrees", "mismatched", "undertrained", "not served", "unclear"
)  # fmt: skip


@dataclass(frozen=True)
class Verdict:
    """What the numbers say together."""

    words: tuple[str, ...]
    """One or more of the words above; ``unclear`` where there is too little to tell."""
    reasons: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """For JSON, with the limits that were used."""
        return {
            "words": list(self.words),
            "reasons": list(self.reasons),
            "limits": {
                "undertrained_below_first_token": LOW_FIRST_TOKEN,
                "mismatched_below_share": LOW_SHARE,
                "agrees_within": CLOSE,
                "standard_errors": ERRORS,
            },
        }


def judge(
    teacher_forced: Acceptance | None,
    served: Acceptance | None,
    *,
    fed: Sequence[int] = (),
    trained: Sequence[int] | None = None,
) -> Verdict:
    """Compare what a draft should do with what it does.

    Args:
        teacher_forced: on texts of the verifier, as a server would walk them; None where that was not run.
        served: from a server's counters; None where no server was run, or none drafted.
        fed: native ids of the layers that fed the draft.
        trained: those that it has learned from; None where nobody says.
    """
    words: list[str] = []
    reasons: list[str] = []
    if trained is not None and sorted(fed) != sorted(trained):
        words.append(MISMATCHED)
        reasons.append(f"it was fed layers {_list(fed)}, and trained on {_list(trained)}")
    if teacher_forced is not None and teacher_forced.conditional:
        first = teacher_forced.conditional[0]
        if first < LOW_FIRST_TOKEN:
            words.append(UNDERTRAINED)
            reasons.append(
                f"teacher-forced, {first:.0%} of the first draft tokens are accepted (low: below {LOW_FIRST_TOKEN:.0%})"
            )
    if served is None:
        words.append(NOT_SERVED)
        reasons.append("no server's numbers to compare with")
    elif teacher_forced is None:
        words.append(UNCLEAR)
        reasons.append("no teacher-forced numbers to compare the server's with")
    else:
        word, reason = _compared(teacher_forced, served)
        reasons.append(reason)
        # Fed the same wrong layers, the two agree on how little the draft is worth.
        if MISMATCHED not in words:
            words.append(word)
    return Verdict(tuple(words), tuple(reasons))


def _compared(promised: Acceptance, served: Acceptance) -> tuple[str, str]:
    error = math.hypot(promised.error, served.error)
    said = (
        f"served {served.length:.3f} tokens a step, teacher-forced {promised.length:.3f} "
        f"(standard error of the difference {error:.3f})"
    )
    missing = promised.length - served.length
    share = (served.length - 1) / (promised.length - 1) if promised.length > 1 else 1.0
    if share < LOW_SHARE and missing > ERRORS * error:
        return MISMATCHED, f"{said}: {share:.0%} of the accepted tokens arrive (mismatched: below {LOW_SHARE:.0%})"
    if abs(missing) <= max(CLOSE * promised.length, ERRORS * error):
        return AGREES, f"{said}: they agree"
    return UNCLEAR, f"{said}: too far apart to agree, too close to call it a mismatch"


def _list(ids: Sequence[int]) -> str:
    return " ".join(map(str, ids))


def meaning(words: Sequence[str]) -> list[str]:
    """What to do about each word."""
    return [_MEANINGS[word] for word in words]


_MEANINGS = {
    AGREES: "The server feeds the draft what it was trained on.",
    MISMATCHED: "The server does not feed the draft what it was trained on: look at layer ids, vocabulary mapping, "
    "verifier and chat template (`specshim check-draft`). More training will not help.",
    UNDERTRAINED: "The draft guesses badly even on states it was made for: train it longer, or on more data of the "
    "verifier's own words. The server is not the reason.",
    NOT_SERVED: "Only held-out rows were looked at; whether a server does the same is not known.",
    UNCLEAR: "Take more prompts or longer answers.",
}
