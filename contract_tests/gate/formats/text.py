"""For a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from contract_tests.gate.formats.wording import HEADINGS, counts, details, facts, printable, title, told
from contract_tests.gate.report import Finding, Report


def render(reports: Sequence[Report], fail_on: str) -> str:
    """Paragraphs for what is worth one, then counts, then what `--fail-on` makes of it."""
    parts = ["\n".join(_one(report, fail_on)) for report in reports]
    return printable("\n\n".join(parts)) + "\n"


def _one(report: Report, fail_on: str) -> Iterator[str]:
    yield title(report)
    yield from (f"  {line}" for line in facts(report))
    for level, findings in groupby(told(report), lambda finding: finding.level):
        yield f"\n{HEADINGS[level]}:"
        for finding in findings:
            yield from _finding(finding)
    yield f"\n{counts(report)}"
    code = report.exit_code(fail_on)
    yield f"--fail-on {fail_on}: {('passes', 'falls short', 'cannot be judged')[code]}"


def _finding(finding: Finding) -> Iterator[str]:
    yield f"  {finding.key} ({finding.home})"
    yield from (f"    {label:<10} {text}" for label, text in details(finding))
    yield from (f"      {line}" for line in finding.excerpt)
