"""A page that stands alone: releases as columns, uses as lines. No build step, no script from elsewhere, no network."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from contract_tests.gate.formats.wording import counts, details, facts, printable, title
from contract_tests.gate.report import Finding, Level, Report

_CLASSES = {
    Level.BROKEN: "broken",
    Level.NOT_JUDGED: "unjudged",
    Level.GUARDED: "look",
    Level.LOOK: "look",
    Level.ADAPTED: "adapted",
    Level.CHANGED: "changed",
    Level.STANDING: "standing",
    Level.HOLDS: "holds",
}
_SIGNS = {
    Level.BROKEN: "✕",
    Level.NOT_JUDGED: "?",
    Level.GUARDED: "○",
    Level.LOOK: "◐",
    Level.ADAPTED: "✓",
    Level.CHANGED: "△",
    Level.STANDING: "–",
    Level.HOLDS: "·",
}
_STYLE = """
:root { color-scheme: light dark; --paper: #fff; --ink: #1f2328; --soft: #59636e; --line: #d1d9e0;
  --broken: #cf222e; --unjudged: #8250df; --look: #bf8700; --adapted: #1a7f37; --changed: #0969da; }
@media (prefers-color-scheme: dark) { :root { --paper: #0d1117; --ink: #e6edf3; --soft: #9198a1; --line: #30363d;
  --broken: #f85149; --unjudged: #ab7df8; --look: #d29922; --adapted: #3fb950; --changed: #4493f8; } }
body { margin: 2rem; background: var(--paper); color: var(--ink); font: 14px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
.wide { overflow: auto; max-height: 80vh; border: 1px solid var(--line); }
table { border-collapse: collapse; }
th, td { padding: 2px 6px; border-bottom: 1px solid var(--line); text-align: center; }
thead th { position: sticky; top: 0; background: var(--paper); z-index: 2; writing-mode: vertical-rl;
  transform: rotate(180deg); font-weight: 500; }
tbody th { position: sticky; left: 0; background: var(--paper); text-align: left; font-weight: 400;
  font-family: ui-monospace, monospace; font-size: 12px; white-space: nowrap; }
thead th:first-child { left: 0; z-index: 3; }
tr.group th { font: 600 12px system-ui, sans-serif; color: var(--soft); }
td a, thead a { color: inherit; text-decoration: none; display: block; }
td.broken, .level.broken { color: #fff; background: var(--broken); }
td.unjudged, .level.unjudged { color: #fff; background: var(--unjudged); }
td.look, .level.look { color: var(--look); font-weight: 700; }
td.adapted, .level.adapted { color: #fff; background: var(--adapted); } td.steady { color: var(--adapted); }
td.changed, .level.changed { color: var(--changed); font-weight: 700; }
td.holds, td.standing, td.none { color: var(--soft); }
tr.verdict td, tr.verdict th { border-bottom: 2px solid var(--soft); font-weight: 600; }
.legend > span { margin-right: 1.4em; white-space: nowrap; } .level { padding: 0 .4em; border-radius: 3px; }
details { margin: .3rem 0; } summary { cursor: pointer; }
details:target { outline: 2px solid var(--changed); }
dl { display: grid; grid-template-columns: 7em 1fr; margin: .3rem 1.2rem; gap: 2px 10px; }
dt { color: var(--soft); } dd { margin: 0; overflow-wrap: anywhere; }
pre { margin: .3rem 1.2rem; padding: .5rem; border: 1px solid var(--line); overflow: auto; font-size: 12px; }
ins { color: var(--adapted); text-decoration: none; } del { color: var(--broken); text-decoration: none; }
"""
# A cell leads to its details, which are folded away until then.
_SCRIPT = """
addEventListener("hashchange", open); addEventListener("DOMContentLoaded", open);
function open() {
  const place = document.getElementById(location.hash.slice(1));
  if (place && place.tagName === "DETAILS") { place.open = true; place.scrollIntoView({block: "center"}); }
}
"""


def render(reports: Sequence[Report], fail_on: str) -> str:
    """The page."""
    return printable("\n".join(_page(reports, fail_on))) + "\n"


def _page(reports: Sequence[Report], fail_on: str) -> Iterator[str]:
    yield '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">'
    yield "<title>specshim gate: vLLM releases and what is used of them</title>"
    yield f"<style>{_STYLE}</style>\n<script>{_SCRIPT}</script>\n</head>\n<body>"
    yield "<h1>vLLM releases, and what is used of them</h1>"
    yield "<p>Each release, the newest first, is compared with the one before it; a cell leads to what changed. "
    yield "What a row covers as it did before is green on the page's own ground; what it covers anew is filled.</p>"
    yield f'<p class="legend">{"".join(_legend(level) for level in Level)}</p>'
    for consumer in dict.fromkeys(report.consumer for report in reports):
        own = [(i, report) for i, report in enumerate(reports) if report.consumer == consumer][::-1]
        yield f"<h2>{escape(consumer)}</h2>"
        yield from _matrix(own)
        for index, report in own:
            yield from _details(index, report, fail_on)
    yield "</body>\n</html>"


def _legend(level: Level) -> str:
    return f'<span><span class="level {_CLASSES[level]}">{_SIGNS[level]}</span> {escape(level.value)}</span>'


def _matrix(reports: Sequence[tuple[int, Report]]) -> Iterator[str]:
    yield '<div class="wide"><table><thead><tr><th></th>'
    for index, report in reports:
        yield f'<th scope="col"><a href="#report-{index}">{escape(report.version)}</a></th>'
    yield "</tr></thead><tbody>"
    known: dict[str, Finding] = {}
    for _, report in reports:
        for finding in report.findings:
            known.setdefault(finding.key, finding)
    cells = {(index, f.key): (number, f) for index, r in reports for number, f in enumerate(r.findings)}
    module = ""
    yield '<tr class="verdict"><th scope="row">all of it</th>'
    yield "".join(_verdict(index, report) for index, report in reports)
    yield "</tr>"
    for key, finding in sorted(known.items(), key=lambda item: _order(item[1])):
        if finding.home.partition(":")[0] != module:
            module = finding.home.partition(":")[0]
            yield f'<tr class="group"><th scope="rowgroup">{escape(module)}</th>{"<td></td>" * len(reports)}</tr>'
        yield f'<tr><th scope="row">{escape(key)}</th>'
        yield "".join(_cell(index, report, cells.get((index, key))) for index, report in reports)
        yield "</tr>"
    yield "</tbody></table></div>"


def _order(finding: Finding) -> tuple[bool, bool, str, str]:
    """vLLM's own names first, then watched bodies, then what stands beside it."""
    return not finding.home.startswith("vllm"), finding.kind == "body", finding.home, finding.key


def _verdict(index: int, report: Report) -> str:
    worst = min((f.level for f in report.findings), key=lambda level: level.rank, default=Level.HOLDS)
    said = escape(title(report), quote=True)
    sign = f'<a href="#report-{index}" aria-label="{said}">{_SIGNS[worst]}</a>'
    return f'<td class="{_CLASSES[worst]}" title="{said}">{sign}</td>'


def _cell(index: int, report: Report, found: tuple[int, Finding] | None) -> str:
    if found is None:
        return '<td class="none" title="not used of this release"></td>'
    number, finding = found
    said = escape(f"{report.version}: {finding.headline}", quote=True)
    sign = _SIGNS[finding.level]
    if finding.level is not Level.HOLDS:
        sign = f'<a href="#finding-{index}-{number}" aria-label="{said}">{sign}</a>'
    name = "steady" if finding.level is Level.ADAPTED and not finding.changes else _CLASSES[finding.level]
    return f'<td class="{name}" title="{said}">{sign}</td>'


def _details(index: int, report: Report, fail_on: str) -> Iterator[str]:
    outcome = ("passes", "falls short", "cannot be judged")[report.exit_code(fail_on)]
    yield f'<details id="report-{index}"><summary>{escape(title(report))} ({outcome})</summary><ul>'
    yield from (f"<li>{escape(line)}</li>" for line in facts(report))
    yield f"<li>{escape(counts(report))}</li></ul></details>"
    for number, finding in enumerate(report.findings):
        if finding.level is not Level.HOLDS:
            yield from _finding(f"finding-{index}-{number}", report, finding)


def _finding(anchor: str, report: Report, finding: Finding) -> Iterator[str]:
    level = f'<span class="level {_CLASSES[finding.level]}">{escape(finding.level.value)}</span>'
    yield f'<details id="{anchor}"><summary>{escape(report.version)} {level} {escape(finding.key)}</summary><dl>'
    yield f"<dt>name</dt><dd>{escape(finding.home)}</dd>"
    yield from (f"<dt>{escape(label)}</dt><dd>{escape(text)}</dd>" for label, text in details(finding))
    yield "</dl>"
    if finding.excerpt:
        yield f"<pre>{chr(10).join(map(_diff_line, finding.excerpt))}</pre>"
    yield "</details>"


def _diff_line(line: str) -> str:
    tag = {"+": "ins", "-": "del"}.get(line[:1])
    return f"<{tag}>{escape(line)}</{tag}>" if tag else escape(line)
