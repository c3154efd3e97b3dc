"""JUnit XML: one test case for each use of a name."""

from __future__ import annotations

import re
from collections.abc import Sequence
from xml.etree.ElementTree import Element, SubElement, indent, tostring

from contract_tests.gate.formats.wording import details, facts, title
from contract_tests.gate.report import Finding, Level, Report

# What XML 1.0 cannot hold, even escaped.
_FORBIDDEN = re.compile(r"[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def render(reports: Sequence[Report], fail_on: str) -> str:
    """The document: what falls short is a failure, what cannot be judged an error."""
    root = Element("testsuites", name="specshim gate")
    for report in reports:
        root.append(_suite(report, fail_on))
    indent(root, " ")
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + tostring(root, encoding="unicode") + "\n"


def _suite(report: Report, fail_on: str) -> Element:
    suite = Element("testsuite", name=_clean(title(report)))
    cases = [_case(finding, report, fail_on) for finding in report.findings]
    whole = _whole(report, fail_on)
    cases += [whole] if whole is not None else []
    found = [child.tag for case in cases for child in case]
    numbers = {"tests": len(cases), "failures": found.count("failure"), "errors": found.count("error")}
    for name, value in {**numbers, "skipped": found.count("skipped")}.items():
        suite.set(name, str(value))
    suite.set("time", f"{report.seconds:.3f}")
    suite.extend(cases)
    SubElement(suite, "system-out").text = _clean("\n".join(facts(report)))
    return suite


def _case(finding: Finding, report: Report, fail_on: str) -> Element:
    case = Element("testcase", classname=_clean(finding.home.replace(":", ".")), name=_clean(finding.key), time="0")
    told = "\n".join([f"{label}: {text}" for label, text in details(finding)] + list(finding.excerpt))
    kind = {1: "failure", 2: "error"}.get(_alone(finding, report).exit_code(fail_on))
    if kind:
        SubElement(case, kind, message=_clean(finding.headline), type=finding.level.value).text = _clean(told)
    elif finding.level is Level.STANDING:
        SubElement(case, "skipped").text = _clean(finding.headline)
    elif finding.level is not Level.HOLDS:
        SubElement(case, "system-out").text = _clean(told)
    return case


def _alone(finding: Finding, report: Report) -> Report:
    """A report on this finding only, so that a case fails for its own sake and not for the release's state."""
    return Report(report.target, report.version, report.baseline, report.consumer, "verified", (finding,))


def _whole(report: Report, fail_on: str) -> Element | None:
    """A case for the release itself, where `--fail-on` asks for more than names that fit."""
    if fail_on == "broken" or report.state == "not read":
        return None
    case = Element("testcase", classname="release", name="verified", time="0")
    if report.state != "verified":
        found = f"{report.target} is {report.state}"
        SubElement(case, "failure", message=_clean(found), type="unverified").text = _clean("\n".join(facts(report)))
    return case


def _clean(text: str) -> str:
    return _FORBIDDEN.sub("\ufffd", text)
