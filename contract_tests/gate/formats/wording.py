"""Sentences that several forms share."""

from __future__ import annotations

import re
from collections.abc import Iterator

from contract_tests.gate.report import Finding, Level, Report

STATES = {
    "verified": "verified: run live, with results that are right",
    "static": "static only: a known release that was never run live here",
    "unknown": "unknown: no release of the table, rows are chosen by range and by signature",
}
# Further places of a use that are named.
_PLACES = 4
# A level as the heading of a list.
HEADINGS = {
    Level.BROKEN: "broken",
    Level.NOT_JUDGED: "cannot be judged",
    Level.GUARDED: "gone, but the consumer catches that",
    Level.LOOK: "changed body: look",
    Level.ADAPTED: "adapted by rows",
    Level.CHANGED: "changed, still fits",
    Level.STANDING: "no better on the baseline",
}


# Judged sources may hold anything: control characters (to a terminal they are commands), and half characters.
_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\u202a-\u202e\u2066-\u2069]")


def printable(text: str) -> str:
    """The text with a mark in the place of what is no text; tabs and newlines stay."""
    return _UNPRINTABLE.sub("\ufffd", text.replace("\r\n", "\n"))


def title(report: Report) -> str:
    """What was judged, and the verdict."""
    if report.state == "not read":
        return f"{report.target}: could not be judged"
    against = f" against {report.baseline}" if report.baseline else ""
    return f"{report.target}{against}, as {report.consumer} uses it: {report.verdict}"


def facts(report: Report) -> list[str]:
    """What holds for the report as a whole, one sentence a line."""
    lines = [f"state: {STATES[report.state]}"] if report.state in STATES else []
    lines += [f"rows that come in: {', '.join(report.rows_new)}"] if report.rows_new else []
    lines += [f"rows that go: {', '.join(report.rows_gone)}"] if report.rows_gone else []
    return lines + [f"note: {note}" for note in report.notes]


def counts(report: Report) -> str:
    """How many findings of each level, in one line."""
    parts = [f"{report.counts[level]} {level.value}" for level in Level if report.counts[level]]
    return f"{', '.join(parts) or 'nothing is used'}; {report.seconds:.1f} s"


def told(report: Report) -> list[Finding]:
    """The findings worth a paragraph: not those that are adapted exactly as on the baseline, nor those that hold."""
    return [f for f in report.notable() if f.changes or f.level not in (Level.ADAPTED, Level.STANDING)]


def details(finding: Finding) -> Iterator[tuple[str, str]]:
    """(label, text) pairs that explain a finding, the body's diff aside."""
    if finding.place:
        more = len(finding.also) - _PLACES
        places = [finding.place, *finding.also[:_PLACES], *([f"and {more} more"] if more > 0 else [])]
        yield "used in", ", ".join(places)
    if finding.why:
        yield "why", finding.why
    for change in finding.changes:
        yield "changed", str(change)
    if finding.first:
        yield "first in", finding.first
    if finding.last_held:
        yield "last held", finding.last_held
    if finding.rows:
        yield "covered by", ", ".join(finding.rows)
    for candidate in finding.candidates:
        yield "a guess", candidate
