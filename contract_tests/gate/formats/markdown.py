"""For a step summary, an issue or a comment."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from contract_tests.gate.formats.wording import HEADINGS, counts, details, facts, printable, title, told
from contract_tests.gate.report import Finding, Level, Report

_MARKS = {"broken": "❌", "not judged": "❓", "adapted": "✅", "holds": "✅"}
# What somebody has to read stands open, the rest folds.
_OPEN = (Level.BROKEN, Level.NOT_JUDGED)


def render(reports: Sequence[Report], fail_on: str) -> str:
    """A heading and its lists for each report."""
    return printable("\n".join(line for report in reports for line in _one(report, fail_on))) + "\n"


def _one(report: Report, fail_on: str) -> Iterator[str]:
    code = report.exit_code(fail_on)
    yield f"### {_MARKS[report.verdict]} {_text(title(report))}"
    yield ""
    yield f"`--fail-on {fail_on}`: **{('passes', 'falls short', 'cannot be judged')[code]}**. {_text(counts(report))}"
    yield ""
    yield from (f"- {_text(line)}" for line in facts(report))
    for level, group in groupby(told(report), lambda finding: finding.level):
        findings = list(group)
        yield ""
        if level not in _OPEN:
            yield f"<details><summary>{HEADINGS[level]} ({len(findings)})</summary>\n"
        else:
            yield f"**{HEADINGS[level]}** ({len(findings)})\n"
        for finding in findings:
            yield from _finding(finding)
        if level not in _OPEN:
            yield "\n</details>"
    yield ""


def _finding(finding: Finding) -> Iterator[str]:
    yield f"- {_code(finding.key)} ({_code(finding.home)})"
    for label, text in details(finding):
        yield f"  - {label}: {_code(text) if label in ('a guess', 'covered by') else _text(text)}"
    if finding.excerpt:
        yield "\n  ```diff"
        # Nothing inside of the diff may end it.
        lines = (" ".join(line.splitlines()).replace("```", "` ` `") for line in finding.excerpt)
        yield from (f"  {line}" for line in lines)
        yield "  ```\n"


def _code(text: str) -> str:
    return f"`{_line(text).replace('`', '′')}`"


def _text(text: str) -> str:
    """Plain text: nothing of it is taken for a tag, a link, a mention or a mark."""
    escaped = _line(text)
    for mark in "\\`*_[]<>#|":
        escaped = escaped.replace(mark, f"\\{mark}")
    return escaped.replace("@", "@\u200b")


def _line(text: str) -> str:
    return " ".join(text.split())
