"""SARIF 2.1.0, for code scanning."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any
from urllib.parse import quote

import shims
from contract_tests.gate.formats.wording import HEADINGS, details, facts, told
from contract_tests.gate.report import Finding, Level, Report, exit_code

_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
_LEVELS = {Level.BROKEN: "error", Level.NOT_JUDGED: "error", Level.LOOK: "warning"}


def render(reports: Sequence[Report], fail_on: str) -> str:
    """One run that holds the results of all reports."""
    rules: list[Level] = [level for level in Level if level is not Level.HOLDS]
    run = {
        "tool": {
            "driver": {
                "name": "specshim gate",
                "version": shims.__version__,
                "rules": [_rule(level) for level in rules],
            }
        },
        "columnKind": "unicodeCodePoints",
        "invocations": [{"executionSuccessful": exit_code(reports, fail_on) != 2}],
        "results": [_result(f, report, rules.index(f.level)) for report in reports for f in told(report)],
        "properties": {"reports": [{**_summary(report), "facts": facts(report)} for report in reports]},
    }
    return json.dumps({"$schema": _SCHEMA, "version": "2.1.0", "runs": [run]}, indent=1) + "\n"


def _rule(level: Level) -> dict[str, Any]:
    return {
        "id": _rule_id(level),
        "name": "".join(word.capitalize() for word in _rule_id(level).split("-")),
        "shortDescription": {"text": f"A name of vLLM that is used: {HEADINGS[level]}"},
        "defaultConfiguration": {"level": _LEVELS.get(level, "note")},
    }


def _rule_id(level: Level) -> str:
    return "".join(c for c in level.value.replace(" ", "-") if c.isalnum() or c == "-")


def _summary(report: Report) -> dict[str, Any]:
    return {key: value for key, value in report.as_dict().items() if key not in ("findings", "notes")}


def _result(finding: Finding, report: Report, index: int) -> dict[str, Any]:
    text = "\n".join(
        [f"{report.target}: {finding.headline}", *(f"{label}: {text}" for label, text in details(finding))]
    )
    identity = f"{report.consumer}|{finding.key}|{finding.home}|{finding.level.value}"
    result: dict[str, Any] = {
        "ruleId": _rule_id(finding.level),
        "ruleIndex": index,
        "level": _LEVELS.get(finding.level, "note"),
        "message": {"text": text},
        "locations": [_location(finding, report)],
        # The same break in the next run, or of the next target, is the same alert.
        "partialFingerprints": {"use/v1": hashlib.sha256(identity.encode()).hexdigest()[:32]},
        "properties": {"changes": [change.as_dict() for change in finding.changes], "rows": list(finding.rows)},
    }
    if finding.excerpt:
        result["properties"]["diff"] = list(finding.excerpt)
    return result


def _location(finding: Finding, report: Report) -> dict[str, Any]:
    """The consumer's line, or the user's line that names vLLM; the foreign name as a logical location."""
    own = bool(finding.line) or not report.file
    file, line = (finding.used_in, finding.line) if own else (report.file, report.line)
    location: dict[str, Any] = {
        "logicalLocations": [{"fullyQualifiedName": finding.home.replace(":", "."), "name": finding.key}]
    }
    if file:
        place: dict[str, Any] = {"artifactLocation": {"uri": quote(file)}}
        if line:
            place["region"] = {"startLine": line}
        location["physicalLocation"] = place
    return location
