"""Workflow commands of GitHub Actions: each line becomes an annotation of the run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from contract_tests.gate.formats.wording import counts, details, title, told
from contract_tests.gate.report import Finding, Level, Report

_COMMANDS = {Level.BROKEN: "error", Level.NOT_JUDGED: "error", Level.LOOK: "warning"}
# GitHub shows ten errors and ten warnings of a step and drops the rest: the last one then says how many are left.
_SHOWN = 10


def render(reports: Sequence[Report], fail_on: str) -> str:
    """One command a line."""
    return "".join(f"{line}\n" for report in reports for line in _one(report, fail_on))


def _one(report: Report, fail_on: str) -> Iterator[str]:
    shown = dict.fromkeys(("error", "warning", "notice"), 0)
    findings = told(report)
    for finding in findings:
        command = _COMMANDS.get(finding.level, "notice")
        shown[command] += 1
        if shown[command] < _SHOWN:
            yield _annotation(command, finding, report)
    for command, number in shown.items():
        if number >= _SHOWN:
            more = f"and {number - _SHOWN + 1} more; the step summary has all"
            yield command_line(command, more, title=title(report), file=report.file, line=report.line)
    code = report.exit_code(fail_on)
    outcome = f"--fail-on {fail_on}: {('passes', 'falls short', 'cannot be judged')[code]}"
    yield command_line("error" if code else "notice", f"{outcome}; {counts(report)}", title=title(report),
                       file=report.file, line=report.line)  # fmt: skip


def _annotation(command: str, finding: Finding, report: Report) -> str:
    # Where the consumer's file is not one of the user's, the line that names vLLM is what the user can change.
    file, line = (finding.used_in, finding.line) if finding.line else (report.file, report.line)
    text = "\n".join(f"{label}: {text}" for label, text in details(finding))
    return command_line(command, text, title=f"{report.target}: {finding.key}: {finding.level.value}", file=file,
                        line=line)  # fmt: skip


def command_line(command: str, message: str, title: str, file: str, line: int) -> str:
    """One workflow command, escaped as its grammar wants."""
    properties = {"file": file, "line": str(line) if line else "", "title": title}
    given = ",".join(f"{name}={_property(value)}" for name, value in properties.items() if value)
    return f"::{command} {given}::{_data(message)}"


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
