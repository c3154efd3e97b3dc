"""Every form says the same, and is valid by the schema of its own field. No network."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote
from xml.etree.ElementTree import fromstring

import pytest

from contract_tests.gate.changes import Change
from contract_tests.gate.formats import FORMATS
from contract_tests.gate.formats.github import command_line
from contract_tests.gate.options import FORMATS as NAMES
from contract_tests.gate.report import FAIL_ON, Finding, Level, Report, exit_code

_SCHEMAS = Path(__file__).with_name("schemas")
# What an attacker, or a lambda default, may bring into any text.
_NASTY = 'a%0A::error::b,c:d\r\ne <script>alert(1)</script> & "q" `x` | \x00\x1b[31m @someone ``` ]]> \ud7ff\U0001f600'


def _finding(level: Level, key: str = "Request", **more: Any) -> Finding:
    return Finding(key, "vllm.v1.request:Request", level, "call", "generator.py", **more)


def _report(*findings: Finding, **more: Any) -> Report:
    return Report(
        "vllm 9.9.9", "9.9.9", "9.9.8", "speculators 0.4.0.1", more.pop("state", "verified"), findings, **more
    )


def _full() -> Report:
    findings = [
        _finding(level, f"use {level.value}", why=_NASTY, line=3 if level is Level.BROKEN else 0,
                 changes=(Change("removed", _NASTY),), rows=("a-row",), candidates=(_NASTY,), first="9.9.9",
                 last_held="9.9.8", excerpt=("--- a", "+++ b", "-old", "+new", "```", _NASTY), also=("b.py:4",))
        for level in Level
    ]  # fmt: skip
    more = {"rows_new": ("in",), "rows_gone": ("out",), "notes": (_NASTY,), "file": "req uirements.txt", "line": 7}
    return _report(*findings, **more)


_REPORTS = {
    "full": [_full()],
    "empty": [_report()],
    "none": [],
    "two": [_full(), replace(_full(), consumer="another")],
    "not read": [_report(_finding(Level.NOT_JUDGED), state="not read")],
    "unknown": [_report(_finding(Level.HOLDS), state="unknown")],
}


@pytest.fixture(params=list(_REPORTS))
def reports(request: pytest.FixtureRequest) -> list[Report]:
    return _REPORTS[request.param]


def test_the_command_line_offers_every_form() -> None:
    assert set(NAMES) == set(FORMATS)


@pytest.mark.parametrize("fail_on", FAIL_ON)
@pytest.mark.parametrize("name", FORMATS)
def test_each_form_can_be_written(name: str, fail_on: str, reports: list[Report]) -> None:
    text = FORMATS[name](reports, fail_on)
    assert text.encode("utf-8").decode("utf-8") == text
    assert all(report.target in text for report in reports)


@pytest.mark.parametrize("fail_on", FAIL_ON)
def test_sarif_is_valid(reports: list[Report], fail_on: str) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    schema = json.loads((_SCHEMAS / "sarif-2.1.0.json").read_text("utf-8"))
    document = json.loads(FORMATS["sarif"](reports, fail_on))
    validator = jsonschema.validators.validator_for(schema)(schema)
    assert not [f"{error.json_path}: {error.message}" for error in validator.iter_errors(document)]
    for result in document["runs"][0]["results"]:
        rule = document["runs"][0]["tool"]["driver"]["rules"][result["ruleIndex"]]
        assert rule["id"] == result["ruleId"]


def test_the_sarif_schema_refuses_what_is_wrong() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    schema = json.loads((_SCHEMAS / "sarif-2.1.0.json").read_text("utf-8"))
    document = json.loads(FORMATS["sarif"]([_full()], "broken"))
    document["runs"][0]["results"][0]["level"] = "fatal"
    assert list(jsonschema.validators.validator_for(schema)(schema).iter_errors(document))


def test_sarif_points_to_a_line_of_the_user() -> None:
    run = json.loads(FORMATS["sarif"]([_full()], "broken"))["runs"][0]
    places = [r["locations"][0]["physicalLocation"] for r in run["results"]]
    assert places[0]["artifactLocation"]["uri"] == "generator.py" and places[0]["region"]["startLine"] == 3
    assert unquote(places[1]["artifactLocation"]["uri"]) == "req uirements.txt"
    prints = [result["partialFingerprints"]["use/v1"] for result in run["results"]]
    assert len(set(prints)) == len(prints)


@pytest.mark.parametrize("fail_on", FAIL_ON)
def test_junit_is_valid(reports: list[Report], fail_on: str, tmp_path: Path) -> None:
    xmlschema = pytest.importorskip("xmlschema")
    schema = xmlschema.XMLSchema(str(_SCHEMAS / "junit-10.xsd"))
    (tmp_path / "gate.xml").write_text(FORMATS["junit"](reports, fail_on), encoding="utf-8")
    assert not [f"{error.path}: {error.reason}" for error in schema.iter_errors(str(tmp_path / "gate.xml"))]


@pytest.mark.parametrize("fail_on", FAIL_ON)
def test_junit_fails_where_the_exit_code_does(reports: list[Report], fail_on: str) -> None:
    root = fromstring(FORMATS["junit"](reports, fail_on))
    failures, errors = root.findall(".//failure"), root.findall(".//error")
    code = exit_code(reports, fail_on)
    assert (1 if failures else 2 if errors else 0) == code
    for suite in root:
        assert int(suite.attrib["failures"]) == len(suite.findall("./testcase/failure"))
        assert int(suite.attrib["errors"]) == len(suite.findall("./testcase/error"))
        assert int(suite.attrib["tests"]) == len(suite.findall("./testcase"))


_COMMAND = re.compile(r"::(error|warning|notice) (?:file=([^,:]*),)?(?:line=(\d+),)?title=([^,:]*)::([^\r\n]*)")


def _unescaped(text: str) -> str:
    for escaped, plain in (("%0D", "\r"), ("%0A", "\n"), ("%3A", ":"), ("%2C", ","), ("%25", "%")):
        text = text.replace(escaped, plain)
    return text


def test_annotations_are_one_command_a_line(reports: list[Report]) -> None:
    # Newlines alone end a line here, as they do for the runner.
    lines = FORMATS["github"](reports, "broken").split("\n")[:-1]
    assert all(_COMMAND.fullmatch(line) for line in lines)
    assert len(lines) >= len(reports)


def test_an_annotation_reads_back_as_it_was_meant() -> None:
    match = _COMMAND.fullmatch(command_line("error", _NASTY, title=_NASTY, file="a,b:c.txt", line=5))
    assert match
    assert [_unescaped(part) for part in match.groups()] == ["error", "a,b:c.txt", "5", _NASTY, _NASTY]


def test_no_annotation_is_dropped_unsaid() -> None:
    findings = [_finding(Level.BROKEN, f"use {i}") for i in range(30)]
    lines = FORMATS["github"]([_report(*findings)], "broken").splitlines()
    errors = [line for line in lines if line.startswith("::error")]
    assert len(errors) <= 11 and any("and 21 more" in line for line in errors)


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.ids: list[str] = []
        self.links: list[str] = []
        self.tags: list[str] = []
        self.loaded: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.tags.append(tag)
        self.ids += [given["id"] or ""] if "id" in given else []
        self.links += [given["href"] or ""] if "href" in given else []
        self.loaded += [given["src"] or ""] if "src" in given else []


def test_the_page_stands_alone_and_its_links_lead_somewhere(reports: list[Report]) -> None:
    page = _Page()
    page.feed(FORMATS["html"](reports, "broken"))
    assert not page.loaded and "link" not in page.tags and page.tags.count("script") == 1
    assert len(set(page.ids)) == len(page.ids)
    assert all(link.startswith("#") and link[1:] in page.ids for link in page.links)


def test_markdown_takes_nothing_for_markup() -> None:
    markdown_it = pytest.importorskip("markdown_it")
    page = _Page()
    page.feed(markdown_it.MarkdownIt("commonmark").render(FORMATS["markdown"]([_full()], "broken")))
    assert set(page.tags) <= {"h3", "p", "strong", "code", "ul", "li", "details", "summary", "pre"}
    assert not page.links
    assert page.tags.count("pre") == len(Level) - 1  # all but `holds` are told


def test_json_holds_everything() -> None:
    report = _full()
    document = json.loads(FORMATS["json"]([report], "drift"))
    assert document["exit_code"] == 1 and document["schema"] == 1
    assert len(document["reports"][0]["findings"]) == len(report.findings)
    assert document["reports"][0]["findings"][0]["changes"] == [{"kind": "removed", "name": _NASTY, "detail": ""}]


@pytest.mark.parametrize(
    ("level", "codes"),
    [
        (Level.BROKEN, (1, 1, 1)),
        (Level.NOT_JUDGED, (2, 2, 2)),
        (Level.GUARDED, (0, 0, 1)),
        (Level.LOOK, (0, 1, 1)),
        (Level.ADAPTED, (0, 0, 0)),
        (Level.CHANGED, (0, 0, 1)),
        (Level.STANDING, (0, 0, 0)),
        (Level.HOLDS, (0, 0, 0)),
    ],
)
def test_exit_codes(level: Level, codes: tuple[int, int, int]) -> None:
    assert tuple(_report(_finding(level)).exit_code(fail_on) for fail_on in FAIL_ON) == codes


def test_exit_codes_of_the_release_itself() -> None:
    holds = _finding(Level.HOLDS)
    assert [_report(holds, state="static").exit_code(fail_on) for fail_on in FAIL_ON] == [0, 1, 1]
    assert [_report(holds, state="unknown").exit_code(fail_on) for fail_on in FAIL_ON] == [0, 1, 1]
    assert [_report(holds, state="not read").exit_code(fail_on) for fail_on in FAIL_ON] == [2, 2, 2]
    covered = _finding(Level.ADAPTED, changes=(Change("removed", "x"),))
    assert [_report(covered).exit_code(fail_on) for fail_on in FAIL_ON] == [0, 0, 1]


def test_what_falls_short_counts_for_more_than_what_cannot_be_judged() -> None:
    broken, unjudged = _report(_finding(Level.BROKEN)), _report(_finding(Level.NOT_JUDGED))
    assert exit_code([unjudged, broken], "broken") == 1
    assert exit_code([unjudged, _report()], "broken") == 2
    assert exit_code([], "broken") == 0
