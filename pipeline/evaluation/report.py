"""report.json, report.md and report.png: the numbers, what they mean, and a picture."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipeline.atomic import write_text
from pipeline.evaluation.acceptance import Acceptance
from pipeline.evaluation.plot import draw
from pipeline.evaluation.request import NGRAM, NGRAM_MAX, NGRAM_MIN, NONE
from pipeline.evaluation.results import Results, acceptance_in
from pipeline.evaluation.verdict import CLOSE, ERRORS, LOW_FIRST_TOKEN, LOW_SHARE, meaning

JSON_NAME, TEXT_NAME, PICTURE_NAME = "report.json", "report.md", "report.png"


def write_report(results: Results, folder: Path, losses: Path | None = None) -> list[Path]:
    """Write all three.

    Args:
        losses: metrics.jsonl of the training, for the picture.

    Returns:
        The files written; the picture needs matplotlib, and is left out without it.
    """
    written = [folder / JSON_NAME, folder / TEXT_NAME]
    picture = draw(results, folder / PICTURE_NAME, losses)
    if not picture:
        results.not_run[PICTURE_NAME] = "matplotlib is not installed"
    write_text(written[0], json.dumps(results.as_dict(), indent=2) + "\n")
    write_text(written[1], text_of(results, picture=picture))
    return [*written, folder / PICTURE_NAME] if picture else written


def text_of(results: Results, picture: bool) -> str:
    """The report for a person, as Markdown."""
    verdict = results.verdict()
    lines = [
        "# Evaluation of a draft",
        "",
        f"**{', '.join(verdict.words)}**",
        "",
        *[f"- {reason}" for reason in verdict.reasons],
        *[f"- {said}" for said in meaning(verdict.words)],
        "",
        f"Draft `{results.draft}`, verifier `{results.verifier}`, native layers "
        f"{' '.join(map(str, results.layers))}, {results.steps} draft tokens a step.",
    ]
    if results.forced:
        lines += ["", "`check-draft` refused this draft, and `--force` passed over it:", ""]
        lines += [f"- {' '.join(line.split())}" for line in results.forced]
    lines += _teacher_forced(results)
    lines += _served(results)
    if results.not_run:
        lines += [
            "",
            "## Not run",
            "",
            *[f"- {part}: {' '.join(why.split())}" for part, why in results.not_run.items()],
        ]
    lines += [
        "",
        "## Limits",
        "",
        f"- *undertrained*: below {LOW_FIRST_TOKEN:.0%} of first draft tokens accepted, teacher-forced",
        f"- *mismatched*: served below {LOW_SHARE:.0%} of the accepted tokens that teacher forcing promises, by more "
        f"than {ERRORS:g} standard errors",
        f"- *agrees*: served and teacher-forced lengths within {CLOSE:.0%}, or within {ERRORS:g} standard errors",
        f"- the n-gram baseline looks up the last {NGRAM_MIN} to {NGRAM_MAX} tokens",
    ]
    if picture:
        lines += ["", f"![acceptance, speed and loss]({PICTURE_NAME})"]
    return "\n".join(lines) + "\n"


def _teacher_forced(results: Results) -> list[str]:
    if not results.teacher_forced:
        return []
    lines = [
        "",
        "## Teacher-forced",
        "",
        *_head(results.steps, "text", "greedy"),
    ]
    for name, found in results.teacher_forced.items():
        for how, key in (("every position", "every_position"), ("as served", "as_served")):
            lines.append(_row(f"{name}, {how}", f"{found['greedy_share']:.0%}", acceptance_in(found[key])))
    return lines


def _served(results: Results) -> list[str]:
    if not results.engines:
        return []
    lines = ["", "## Served", "", *_head(results.steps, "engine", "tokens/s", "times", "same answers", "tokens/step")]
    for kind, answer in results.engines.items():
        same, faster = results.same_answers(kind), results.speed_up(kind)
        cells = [
            f"{answer.tokens_per_second:.1f}",
            "" if faster is None or kind == NONE else f"{faster:.2f}",
            "" if same is None or kind == NONE else f"{same[0]} of {same[1]}",
            f"{answer.tokens_per_step:.3f}",
        ]
        lines.append(_row(kind, *cells, answer.acceptance, steps=results.steps))
    said = [
        f"The server says that layers {' '.join(map(str, answer.layers))} feed the {kind} "
        f"(runner {answer.runner or 'unknown'})."
        for kind, answer in results.engines.items()
        if answer.layers
    ]
    lines += ["", *said] if said else []
    gaps = [gap for found in results.gaps.values() for gap in found]
    if gaps:
        lines += [
            "",
            f"Where answers differ first ({len(gaps)} places), the best token leads the next one by {max(gaps):.1e} at "
            "most in log probability: a lead of the size of rounding errors is no fault of the draft, and "
            "`--dtype float32` decides it.",
        ]
    return lines


def _head(steps: int, *first: str) -> list[str]:
    names = [*first, *[f"token {step + 1}" for step in range(steps)], "length"]
    return [f"| {' | '.join(names)} |", f"|{'---|' * len(names)}"]


def _row(*cells: Any, steps: int | None = None) -> str:
    *texts, found = cells
    if isinstance(found, Acceptance):
        shares = [f"{share:.1%}" for share in found.conditional]
        ending = [*shares, f"{found.length:.3f} ± {found.error:.3f}"]
    else:
        ending = [""] * ((steps or 0) + 1)
    return f"| {' | '.join([*texts, *ending])} |"


def summary(results: Results) -> list[str]:
    """Lines for the end of a run."""
    lines = []
    for name, found in results.teacher_forced.items():
        walked = acceptance_in(found["as_served"])
        lines.append(f"teacher-forced, {name}: length {walked.length:.3f}, by step {_shares(walked.conditional)}")
    for kind, answer in results.engines.items():
        found_here, same, faster = answer.acceptance, results.same_answers(kind), results.speed_up(kind)
        words = [f"{answer.tokens_per_second:.1f} tokens/s, {answer.tokens_per_step:.3f} a step"]
        words += [f"{faster:.2f} times"] if faster is not None and kind != NONE else []
        words += [f"length {found_here.length:.3f}, by step {_shares(found_here.conditional)}"] if found_here else []
        words += ["drafted nothing"] if kind == NGRAM and not found_here else []
        words += [f"{same[0]} of {same[1]} answers the same"] if same and kind != NONE else []
        lines.append(f"served, {kind}: {', '.join(words)}")
    lines += [f"not run: {part}: {' '.join(why.split())}" for part, why in results.not_run.items()]
    verdict = results.verdict()
    return [*lines, f"verdict: {', '.join(verdict.words)}; {'; '.join(verdict.reasons)}"]


def _shares(conditional: Sequence[float]) -> str:
    return " ".join(f"{share:.1%}" for share in conditional)
